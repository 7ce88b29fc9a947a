"""Run one stage in its own process and publish its output."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrain.config import TRAINING_STAGES, Settings, Training, rules
from ttrain.core import redact
from ttrain.core.files import PRIVATE_FILE, JsonDict, read_object, remove_tree, write_json
from ttrain.engine import processes, provenance, resume, stage_worker
from ttrain.engine.graph import NOTHING_AGAIN, Planned, Rerun
from ttrain.engine.input_files import data_files, file_digests
from ttrain.engine.planner import plan_stage
from ttrain.engine.processes import StageObserver
from ttrain.engine.restart import RESTARTED
from ttrain.engine.stage_worker import PROGRESS
from ttrain.errors import ArtifactError, DamagedFile, Interrupted, StageFailed, TTrainError
from ttrain.store import integrity, runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.damaged import DamagedArtifact, set_aside
from ttrain.store.layout import JOB, Artifact, Artifacts
from ttrain.store.results import TrainingResult
from ttrain.tasks import SHARDS, TOKENIZER, Stage

NODE_SECONDS, NODE_POLL_SECONDS = 600.0, 0.2  # how long, and how often, a node polls for what node 0 builds

MANY_ROWS = 1 << 40  # of which `auto` makes what it makes of all sets that are large enough

PARTS = ("run/blocks",)  # where a stage that reuses parts records them

EARLIER_OUTPUTS = 8  # artifacts of the same stage that are searched for finished parts


@dataclass(frozen=True)
class StageOutcome:
    """The artifact of a stage and how it was obtained."""

    artifact: Artifact
    state: str  # "cached", "completed", "equal" or "different" (the last two: forced, compared with what was stored)
    seconds: float


def build(
    stage: Stage,
    settings: Settings,
    store: ArtifactStore,
    inputs: Artifacts,
    observer: StageObserver,
    rerun: Rerun = NOTHING_AGAIN,
    *,
    forced: bool = False,
    planned: Planned | None = None,
) -> StageOutcome:
    """Take the stage's artifact from the store, or make it. `planned`: its plan, taken where these are its inputs.

    Raises StageFailed with the stage's own message, or Interrupted once its state is saved.
    """
    began = time.monotonic()
    if planned is None or not planned.has_inputs(inputs):
        planned = plan_stage(stage, settings, store, inputs, rerun, forced=forced)
    assert planned.key is not None, "the inputs exist, so the key is known"
    if planned.state == "cached":
        assert planned.artifact is not None, "cached means there is an artifact"
        return StageOutcome(planned.artifact, "cached", time.monotonic() - began)
    if settings.runtime.node_rank > 0:
        take = _train_along if stage.uses_ranks else _wait_for_first_node
        return take(stage, settings, store, planned, observer, began)
    key, work = planned.key, store.work(stage.name, planned.key)
    with store.lock(stage.name, key, waiting=lambda: observer.waits_for(stage, runs.builder(store, stage.name, key))):
        stored = store.find(stage.name, key) or (None if forced else store.finish_publishing(stage.name, key))
        if stored and not forced:
            remove_tree(work)  # left if a run was killed between publishing and this line
            return StageOutcome(stored, "cached", time.monotonic() - began)
        with store.lock(
            stage.name, f"{key}.process", waiting=lambda: observer.waits_for(stage, "a process of an ended run")
        ):
            pass  # a killed run's process may live for another 0.2 s: it must be gone before its work is touched
        if forced and stored and not (work / RESTARTED).exists():
            remove_tree(work)
        for name, input_artifact in inputs.items():
            store.complete(input_artifact, stage.inputs.get(name, ()), report=lambda line: observer.noted(stage, line))
        verify_inputs(stage, store, inputs)
        if planned.partial_run:
            resume.take_over(store, planned.partial_run, planned.key, planned.ingredients)
        _prepare(stage, settings, inputs, planned, work, store)
        observer.started(stage, planned, work)
        try:
            result = processes.run(stage, settings, work, work / "output" / "run" / "log.txt", observer)
        except TTrainError as error:
            _hide_sources(work)
            if isinstance(error, StageFailed) and error.damaged:
                raise _set_aside(stage, store, inputs, error.damaged, str(error)) from None
            raise
        if file_digests(stage, settings, store) != planned.ingredients["files"]:  # costs one stat per unchanged file
            raise StageFailed(
                f"stage {stage.name}: its input files changed while they were read; run the same command again"
            )
        state, artifact = "completed", None
        manifest = _manifest(planned, inputs, settings, work, result, time.monotonic() - began)
        if forced and stored:
            artifact = store.compare(stored, work / "output")
            state = "equal" if artifact else "different"
            if artifact and artifact.absent:
                artifact = None  # an incomplete stored one is replaced by the one just built
        artifact = artifact or store.publish(stage.name, planned.key, work / "output", manifest)
        remove_tree(work)
    return StageOutcome(artifact, state, time.monotonic() - began)


def verify_inputs(stage: Stage, store: ArtifactStore, inputs: Artifacts) -> None:
    """Verify the stage's inputs against their manifests; shards are verified when a row of one is read.

    Raises StageFailed for a damaged file, and sets its artifact aside.
    """
    with setting_aside(stage, store, inputs):
        for name, artifact in inputs.items():
            integrity.verify_artifact(artifact, stage.inputs.get(name, ()))


@contextlib.contextmanager
def setting_aside(stage: Stage, store: ArtifactStore, inputs: Artifacts) -> Iterator[None]:
    """Turn a DamagedFile into a StageFailed, and set aside the input that the file belongs to."""
    try:
        yield
    except DamagedFile as error:
        raise _set_aside(stage, store, inputs, error.path, f"stage {stage.name}: {error}") from None


def _set_aside(stage: Stage, store: ArtifactStore, inputs: Artifacts, path: Path, message: str) -> StageFailed:
    """Set a damaged input aside; return the error to raise."""
    artifact = next((artifact for artifact in inputs.values() if path.is_relative_to(artifact.path)), None)
    damaged = [DamagedArtifact(artifact.path, "damaged", artifact)] if artifact else []
    removals = set_aside(store, damaged)
    names = ", ".join(map(str, removals))
    moved = f"moved to {store.root / 'replaced'}: {names}; run the same command again to rebuild them"
    return StageFailed(message.replace(DamagedFile.fix, moved) if removals else message, DamagedFile.__name__, path)


def _prepare(
    stage: Stage, settings: Settings, inputs: Artifacts, planned: Planned, work: Path, store: ArtifactStore
) -> None:
    """Prepare the work directory. What an earlier attempt of the same key left is kept: training continues from it."""
    output = work / "output"
    if not (stage.uses_ranks or stage.reuses_parts):
        remove_tree(output)
    (output / "run").mkdir(parents=True, exist_ok=True)
    remove_earlier_results(work)
    if planned.start_from:
        curve = planned.start_from.parent.parent / "run" / "metrics.jsonl"
        if curve.exists() and not (output / "run" / curve.name).exists():
            shutil.copyfile(curve, output / "run" / curve.name)
    files = data_files(stage, settings)
    digests = planned.ingredients["files"]
    weights = settings.data.weights(stage.dataset) if stage.reuses_parts and stage.dataset else ()
    earlier = store.artifacts(stage.name)[:EARLIER_OUTPUTS] if stage.reuses_parts and not planned.forced else []
    spec = {
        "stage": stage.name,
        "uses_ranks": stage.uses_ranks,
        "settings": stage.part_of(settings),
        "inputs": {name: str(artifact.path) for name, artifact in inputs.items()},
        "files": {role: [file.location for file in input_files] for role, input_files in files.items()},
        "versions": {role: [file["sha256"] for file in input_files] for role, input_files in digests.items()},
        "groups": {role: [file.group for file in input_files] for role, input_files in files.items()},
        "weights": list(weights),
        "reuse": [str(artifact.path) for artifact in earlier if not store.damage(artifact) and _has_intact_parts(artifact)],
        "runtime": settings.runtime.model_dump(mode="json"),
        "output": "output",
        "start_from": str(planned.start_from) if planned.start_from else None,
        "key": planned.key,
    }
    if stage.uses_ranks:
        write_json(work / resume.INGREDIENTS, planned.ingredients)
    write_json(work / JOB, spec, PRIVATE_FILE)  # private: it has full URLs, since the stage opens the files


def _hide_sources(work: Path) -> None:
    """Remove the secrets of URLs from an ended job; the next attempt writes it again."""
    job = read_object(work / JOB)
    if isinstance(job.get("files"), dict):
        hidden = {role: [redact.url(location) for location in files] for role, files in job["files"].items()}
        with contextlib.suppress(OSError):  # a full disk
            write_json(work / JOB, {**job, "files": hidden}, PRIVATE_FILE)


def _has_intact_parts(artifact: Artifact) -> bool:
    """Whether an earlier artifact's record of its parts is intact; it holds a digest of each part."""
    try:
        integrity.verify_artifact(artifact, PARTS)
    except ArtifactError:
        return False
    return True


def remove_earlier_results(work: Path) -> None:
    """Remove the results and progress of an earlier attempt, so that they are not taken for this one's."""
    stage_worker.clear(work)
    for path in (work / PROGRESS, *work.glob("rendezvous-*")):
        path.unlink(missing_ok=True)


def _train_along(
    stage: Stage, settings: Settings, store: ArtifactStore, planned: Planned, observer: StageObserver, began: float
) -> StageOutcome:
    """Train as a node other than the first, and return the artifact that node 0 publishes.

    Node 0 has the key's lock and its work directory; this node's log lies next to it.
    """
    assert planned.key is not None, "the inputs exist, so the key is known"
    work = store.work(stage.name, planned.key)
    node_work = work.with_name(f"{planned.key}.node{settings.runtime.node_rank}")
    log_path = node_work / "output" / "run" / "log.txt"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    observer.started(stage, planned, node_work)
    failure: TTrainError | None = None
    try:
        processes.run(stage, settings, work, log_path, observer)
    except TTrainError as error:
        failure = error
    with store.lock(stage.name, planned.key, waiting=lambda: observer.waits_for(stage, "node 0")):
        artifact = store.find(stage.name, planned.key)
    if isinstance(failure, Interrupted):
        raise failure
    if artifact is None:
        raise failure or StageFailed(f"stage {stage.name}: node 0 published nothing; its own log says why")
    remove_tree(node_work)
    return StageOutcome(artifact, "completed", time.monotonic() - began)


def _wait_for_first_node(
    stage: Stage, settings: Settings, store: ArtifactStore, planned: Planned, observer: StageObserver, began: float
) -> StageOutcome:
    """Wait, as a node other than the first, for a stage that does not train: node 0 builds and tracks it.

    Raises StageFailed if it is not being built for NODE_SECONDS, or Interrupted.
    """
    assert planned.key is not None, "the inputs exist, so the key is known"
    observer.waits_for(stage, "node 0")
    last_sign_of_life = time.monotonic()
    while (artifact := store.find(stage.name, planned.key)) is None:
        if signum := observer.stop_signal():
            raise Interrupted(f"stopped while node 0 had yet to build stage {stage.name}", signum)
        if store.is_locked(stage.name, planned.key):
            last_sign_of_life = time.monotonic()
        if time.monotonic() - last_sign_of_life > NODE_SECONDS:
            raise StageFailed(
                f"stage {stage.name}: node 0 has not begun it for {NODE_SECONDS:.0f} s; its log says why, or it does not "
                f"run, or it has other settings or another TTRAIN_HOME"
            )
        time.sleep(NODE_POLL_SECONDS)
    return StageOutcome(artifact, "cached", time.monotonic() - began)


def _manifest(
    planned: Planned,
    inputs: Artifacts,
    settings: Settings,
    work: Path,
    result: Mapping[str, Any],
    seconds: float,
) -> JsonDict:
    return {
        "result": result,
        "ingredients": planned.ingredients,
        "inputs": {name: {"stage": a.stage, "key": a.key, "content": a.content} for name, a in inputs.items()},
        "inputs_verified": True,  # all bytes read from them were the published ones
        "extends": str(planned.start_from.name) if planned.start_from else None,
        "continued": resume.history(work, planned.key or ""),
        "seconds": seconds,
        "provenance": provenance.of(settings, work),
    }


def check(config: Training, shards: Path, tokenizer: Path) -> None:
    """Raise TooFewRows where the shards give fewer rows than one step takes, as the stage itself would, minutes later.

    Rows are packed only where the index leaves it open: the shards of most trainings hold thousands of steps.
    """
    config = resolved(config, shards, tokenizer)
    index = read_object(shards / "train" / "index.json")
    if index and not config.mask_intervals and _rows_at_least(index, config) >= config.rows_per_step:
        return
    from ttrain.tasks.common import rows

    rows.order_of(config, _open_rows(config, shards, tokenizer))


def resolved(config: Training, shards: Path, tokenizer: Path) -> Training:
    """The settings with numbers for what is `auto`, as the stage resolves them on these shards.

    Raises DataError or UsageError for data that it cannot train on.
    """
    if not config.automatic:
        return config
    index = read_object(shards / "train" / "index.json")
    if index and not config.mask_intervals:
        usual = config.resolved(MANY_ROWS)
        if config.resolved(_rows_at_least(index, config)) == usual:  # as of all larger numbers
            return usual
    from ttrain.tasks.common import rows

    return rows.resolved(config, _open_rows(config, shards, tokenizer))


def rules_of_rows(settings: Settings, stages: Iterable[Planned], *, packs: bool = False) -> dict[str, rules.Rule]:
    """The rules of the trainings whose batch or passes their rows decide.

    The value is `auto` unless the stage is in the store, or its shards are and `packs`, which loads the libraries for it.
    """
    found: dict[str, rules.Rule] = {}
    artifacts = {planned.stage.name: planned.artifact for planned in stages}
    for name in settings.trainings:
        config: Training = getattr(settings, name)
        trained = artifacts.get(name)
        values = config.replaced(TrainingResult.of(trained.result).by_rule) if trained else config
        shards = artifacts.get(SHARDS[TRAINING_STAGES[name].dataset].name)
        tokenizer = artifacts.get(TOKENIZER.name)
        if packs and values.automatic and shards and tokenizer and not (shards.absent or tokenizer.absent):
            with contextlib.suppress(TTrainError):  # the training says it
                values = resolved(config, shards.path, tokenizer.path)
        reasons = config.by_rows.reasons(config.row_length)
        for key in config.automatic:
            found[f"{name}.{key}"] = rules.Rule(getattr(values, key), reasons[key])
    return found


def _rows_at_least(index: JsonDict, config: Training) -> int:
    """Rows that shards with this index give at least: each holds up to `row_length` tokens."""
    learnable = index["live_tokens"] if index["kind"] != "documents" else index["tokens"] - index["rows"]
    return int(learnable // config.row_length)


def _open_rows(config: Training, shards: Path, tokenizer: Path) -> Any:
    from ttrain.data.encoder import Encoder
    from ttrain.tasks.common import rows

    return rows.open_rows(shards / "train", Encoder(tokenizer, fast=False), config)
