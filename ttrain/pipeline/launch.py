"""Runs one stage in a process of its own and publishes what it leaves."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ttrain.config import Settings
from ttrain.core import redact
from ttrain.core.files import PRIVATE_FILE, read_object, remove_tree, write_json
from ttrain.errors import ArtifactError, DamagedFile, Interrupted, StageFailed, TTrainError
from ttrain.pipeline import damage, processes, provenance, results, resume
from ttrain.pipeline.input_files import data_files, file_digests
from ttrain.pipeline.plan import plan_stage, section_of
from ttrain.pipeline.planned import Planned
from ttrain.pipeline.stage_worker import JOB, PROGRESS
from ttrain.stages import Stage
from ttrain.store import integrity, runs
from ttrain.store.artifacts import Store
from ttrain.store.layout import Artifact

NODE_SECONDS, NODE_POLL_SECONDS = 600.0, 0.2  # how long, and how often, a node looks for what the first one builds
PARTS = ("run/blocks",)  # where a stage that reuses parts keeps what it knows of them
EARLIER_OUTPUTS = 8  # artifacts of the same stage in which finished parts are looked for


class Observer(processes.Observer, Protocol):
    """Watches a stage from its plan to its end."""

    def started(self, stage: Stage, planned: Planned, work: Path) -> None: ...

    def prepared(self, stage: Stage, work: Path) -> None: ...

    def waiting(self, stage: Stage, who: str) -> None: ...

    def fetching(self, stage: Stage, line: str) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """What became of a stage."""

    artifact: Artifact
    state: str  # "cached", "completed", "equal" or "different" (the last two: forced, compared with what was stored)
    seconds: float


def build(
    stage: Stage,
    settings: Settings,
    store: Store,
    inputs: Mapping[str, Artifact],
    observer: Observer,
    *,
    forced: bool = False,
    extend: bool = False,
    go_on: str = "",
) -> Outcome:
    """Take the stage's artifact from the store, or make it.

    Raises StageFailed with the stage's own message, or Interrupted once its state is saved.
    """
    began = time.monotonic()
    planned = plan_stage(stage, settings, store, inputs, forced=forced, extend=extend, go_on=go_on)
    assert planned.key is not None, "the inputs exist, so the key is known"
    if planned.state == "cached":
        assert planned.artifact is not None, "cached means there is an artifact"
        return Outcome(planned.artifact, "cached", time.monotonic() - began)
    if settings.runtime.node_rank > 0:
        take = _take_part if stage.uses_ranks else _take_result
        return take(stage, settings, store, planned, observer, began)
    key, work = planned.key, store.work(stage.name, planned.key)
    with store.lock(stage.name, key, waiting=lambda: observer.waiting(stage, runs.builder(store, stage.name, key))):
        found = store.find(stage.name, key) or (None if forced else store.finish_publishing(stage.name, key))
        if found and not forced:
            remove_tree(work)  # where a run was killed between its last rename and this
            return Outcome(found, "cached", time.monotonic() - began)
        with store.lock(stage.name, f"{key}.process", waiting=lambda: observer.waiting(stage, "a process of an ended run")):
            pass  # a killed run's process may live for another 0.2 s: it must be gone before its work is touched
        if forced and found:
            remove_tree(work)
        for name, given in inputs.items():
            store.complete(given, stage.inputs[name], said=lambda line: observer.fetching(stage, line))
        verify_inputs(stage, store, inputs)
        if planned.goes_on_with:
            resume.adopt(store, planned.goes_on_with, planned.key, planned.ingredients)
        _prepare(stage, settings, inputs, planned, work, store)
        observer.started(stage, planned, work)
        observer.prepared(stage, work)
        try:
            result = processes.run(stage, settings, work, work / "output" / "run" / "log.txt", observer)
        except TTrainError as error:
            _hide_sources(work)
            if isinstance(error, StageFailed) and error.damaged:
                raise _set_aside(stage, store, inputs, error.damaged, str(error)) from None
            raise
        _check_inputs_did_not_change(stage, settings, store, planned)
        state, artifact = "completed", None
        manifest = _manifest(planned, inputs, settings, work, result, time.monotonic() - began)
        if forced and found:
            artifact = store.compare(found, work / "output")
            state = "equal" if artifact else "different"
            artifact = artifact if artifact and not artifact.absent else None  # what was just built is here as a whole
        artifact = artifact or store.publish(stage.name, planned.key, work / "output", manifest)
        remove_tree(work)
    return Outcome(artifact, state, time.monotonic() - began)


def verify_inputs(stage: Stage, store: Store, inputs: Mapping[str, Artifact]) -> None:
    """Compare what is read for the stage with the manifests; shards are compared when a row of one is asked for.

    Raises StageFailed for a damaged file, and sets its artifact aside.
    """
    with setting_aside(stage, store, inputs):
        for name, artifact in inputs.items():
            integrity.verify_artifact(artifact, stage.inputs.get(name, ()))


@contextlib.contextmanager
def setting_aside(stage: Stage, store: Store, inputs: Mapping[str, Artifact]) -> Iterator[None]:
    """Turn a DamagedFile into a StageFailed, and set aside the input that the file belongs to."""
    try:
        yield
    except DamagedFile as error:
        raise _set_aside(stage, store, inputs, error.path, f"stage {stage.name}: {error}") from None


def _set_aside(stage: Stage, store: Store, inputs: Mapping[str, Artifact], path: Path, message: str) -> StageFailed:
    """What to raise where an input is damaged: it, and what may have been made from its wrong bytes, was set aside."""
    artifact = next((artifact for artifact in inputs.values() if path.is_relative_to(artifact.path)), None)
    removals = damage.set_aside(store, [damage.Removal(artifact.path, "damaged", artifact)]) if artifact else []
    names = ", ".join(map(str, removals))
    moved = f"moved to {store.root / 'replaced'}: {names}; run the same command again, which builds them anew"
    return StageFailed(message.replace(DamagedFile.fix, moved) if removals else message, DamagedFile.__name__, path)


def _check_inputs_did_not_change(stage: Stage, settings: Settings, store: Store, planned: Planned) -> None:
    """What was read must be what the key says; a stat per file, where nothing changed."""
    if file_digests(stage, settings, store) != planned.ingredients["files"]:
        raise StageFailed(f"stage {stage.name}: its input files changed while they were read; run the same command again")


def _prepare(
    stage: Stage, settings: Settings, inputs: Mapping[str, Artifact], planned: Planned, work: Path, store: Store
) -> None:
    """Lay out the work directory. What an earlier try of the same key left is kept: training continues from it."""
    output = work / "output"
    if not (stage.uses_ranks or stage.reuses_parts):
        remove_tree(output)
    (output / "run").mkdir(parents=True, exist_ok=True)
    forget(work)
    if planned.start_from:
        curve = planned.start_from.parent.parent / "run" / "metrics.jsonl"
        if curve.exists() and not (output / "run" / curve.name).exists():
            shutil.copyfile(curve, output / "run" / curve.name)
    files = data_files(stage, settings)
    known = planned.ingredients["files"]
    weights = settings.data.weights(stage.dataset) if stage.reuses_parts and stage.dataset else ()
    earlier = store.artifacts(stage.name)[:EARLIER_OUTPUTS] if stage.reuses_parts and not planned.forced else []
    spec = {
        "stage": stage.name,
        "uses_ranks": stage.uses_ranks,
        "config": section_of(stage, settings).model_dump(mode="json"),
        "inputs": {name: str(artifact.path) for name, artifact in inputs.items()},
        "files": {role: [file.location for file in found] for role, found in files.items()},
        "versions": {role: [file["sha256"] for file in found] for role, found in known.items()},
        "groups": {role: [file.group for file in found] for role, found in files.items()},
        "weights": list(weights),
        "reuse": [str(artifact.path) for artifact in earlier if not store.damage(artifact) and _has_intact_parts(artifact)],
        "runtime": settings.runtime.model_dump(mode="json"),
        "output": "output",
        "start_from": str(planned.start_from) if planned.start_from else None,
        "key": planned.key,
    }
    if stage.uses_ranks:
        write_json(work / resume.INGREDIENTS, planned.ingredients)
    write_json(work / JOB, spec, PRIVATE_FILE)  # the stage opens the files, so that it has their URLs in full


def _hide_sources(work: Path) -> None:
    """Take the secrets of URLs out of a job that ended; the next try lays it out anew."""
    job = read_object(work / JOB)
    if isinstance(job.get("files"), dict):
        hidden = {role: [redact.url(location) for location in files] for role, files in job["files"].items()}
        with contextlib.suppress(OSError):  # a full disk
            write_json(work / JOB, {**job, "files": hidden}, PRIVATE_FILE)


def _has_intact_parts(artifact: Artifact) -> bool:
    """Whether what an earlier artifact tells of its parts may be believed; each part has a digest in there."""
    try:
        integrity.verify_artifact(artifact, PARTS)
    except ArtifactError:
        return False
    return True


def forget(work: Path) -> None:
    """Remove what the processes of an earlier try told, so that it is not taken for this one's."""
    results.clear(work)
    for path in (work / PROGRESS, *work.glob("rendezvous-*"), *work.glob("rank*.beat")):
        path.unlink(missing_ok=True)


def _take_part(
    stage: Stage, settings: Settings, store: Store, planned: Planned, observer: Observer, began: float
) -> Outcome:
    """What a node does that is not the first: it trains along, and takes the artifact that node 0 publishes.

    Node 0 has the key's lock and its work directory; what is this node's own, its log, lies beside it.
    """
    assert planned.key is not None, "the inputs exist, so the key is known"
    work = store.work(stage.name, planned.key)
    own = work.with_name(f"{planned.key}.node{settings.runtime.node_rank}")
    log_path = own / "output" / "run" / "log.txt"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    observer.started(stage, planned, own)
    ended: TTrainError | None = None
    try:
        processes.run(stage, settings, work, log_path, observer)
    except TTrainError as error:
        ended = error
    with store.lock(stage.name, planned.key, waiting=lambda: observer.waiting(stage, "node 0")):
        found = store.find(stage.name, planned.key)
    if isinstance(ended, Interrupted):
        raise ended
    if found is None:
        raise ended or StageFailed(f"stage {stage.name}: node 0 published nothing; its own log says why")
    remove_tree(own)
    return Outcome(found, "completed", time.monotonic() - began)


def _take_result(
    stage: Stage, settings: Settings, store: Store, planned: Planned, observer: Observer, began: float
) -> Outcome:
    """What a node does that is not the first while a stage runs that does not train: node 0 builds and tracks it.

    Raises StageFailed where nobody has built it for NODE_SECONDS, or Interrupted.
    """
    assert planned.key is not None, "the inputs exist, so the key is known"
    observer.waiting(stage, "node 0")
    seen = time.monotonic()
    while (found := store.find(stage.name, planned.key)) is None:
        if signum := observer.stop_signal():
            raise Interrupted(f"stopped while node 0 had yet to build stage {stage.name}", signum)
        if store.is_locked(stage.name, planned.key):
            seen = time.monotonic()
        if time.monotonic() - seen > NODE_SECONDS:
            raise StageFailed(
                f"stage {stage.name}: node 0 has not begun it for {NODE_SECONDS:.0f} s; its log says why, or it does not "
                f"run, or it has other settings or another TTRAIN_HOME"
            )
        time.sleep(NODE_POLL_SECONDS)
    return Outcome(found, "cached", time.monotonic() - began)


def _manifest(
    planned: Planned,
    inputs: Mapping[str, Artifact],
    settings: Settings,
    work: Path,
    result: Mapping[str, Any],
    seconds: float,
) -> dict[str, Any]:
    return {
        "result": result,
        "ingredients": planned.ingredients,
        "inputs": {name: {"stage": a.stage, "key": a.key, "content": a.content} for name, a in inputs.items()},
        "inputs_verified": True,  # no byte was read from them that is not the published one
        "extends": str(planned.start_from.name) if planned.start_from else None,
        "continued": resume.history(work, planned.key or ""),
        "seconds": seconds,
        "provenance": provenance.of(settings, work),
    }
