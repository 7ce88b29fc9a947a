"""Run one stage in its own process: for the store, or alone for a directory of the user."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ttrain.config import Runtime, Settings
from ttrain.config.loading import Override, settings_of_task
from ttrain.config.runtime import TaskRuntime
from ttrain.core.files import (
    PRIVATE_FILE,
    JsonDict,
    JsonObject,
    exclusive,
    read_object,
    remove_tree,
    write_json,
)
from ttrain.engine import processes, provenance, resume, stage_worker
from ttrain.engine.display import Display
from ttrain.engine.graph import Planned
from ttrain.engine.input_files import data_files, file_digests
from ttrain.engine.processes import Report
from ttrain.engine.stop_request import StopRequest
from ttrain.errors import (
    ArtifactError,
    DamagedFile,
    Interrupted,
    StageFailed,
    TTrainError,
    UsageError,
)
from ttrain.store import integrity, runs
from ttrain.store.artifacts import SHOWN_KEY, ArtifactStore
from ttrain.store.layout import JOB, Artifact, Artifacts
from ttrain.tasks import RUNNABLE, Stage

# How long, and how often, a node polls for what node 0 builds.
NODE_SECONDS = 600.0
NODE_POLL_SECONDS = 0.2

PARTS = ("run/blocks",)  # where a stage that reuses parts records them

# In the directory of a stage that runs alone.
WORK, LOCK, LOG = Path("run", "work"), Path("run", "lock"), Path("run", "log.txt")

EARLIER_OUTPUTS = 8  # artifacts of the same stage that are searched for finished parts


@dataclass(frozen=True)
class StageOutcome:
    """The artifact of a stage and how it was obtained."""

    artifact: Artifact
    # "cached", "completed", "equal" or "different" (the last two: forced, compared with what was
    # stored)
    state: str
    seconds: float


def build(
    planned: Planned, settings: Settings, store: ArtifactStore, report: Report, stop: StopRequest
) -> StageOutcome:
    """Take the artifact of a stage whose inputs exist from the store, or make it.

    Reports "started", "progressed", "logged" and "message". Raises StageFailed or Interrupted.
    """
    began = time.monotonic()
    if planned.state == "cached":
        assert planned.artifact is not None, "cached means there is an artifact"
        return StageOutcome(planned.artifact, "cached", 0.0)
    take = _with_first_node if settings.runtime.node_rank else _make
    artifact, state = take(planned, settings, store, report, stop)
    return StageOutcome(artifact, state, time.monotonic() - began)


def _make(
    planned: Planned, settings: Settings, store: ArtifactStore, report: Report, stop: StopRequest
) -> tuple[Artifact, str]:
    began = time.monotonic()
    stage = planned.stage
    key = planned.known_key
    work = store.work(stage.name, key)
    with store.lock(
        stage.name, key, waiting=lambda: _wait_for(runs.builder(store, stage.name, key), report)
    ):
        stored = store.find(stage.name, key) or (
            None if planned.forced else store.finish_publishing(stage.name, key)
        )
        if stored and not planned.forced:
            remove_tree(work)  # left if a run was killed between publishing and this line
            return stored, "cached"
        with store.lock(
            stage.name,
            f"{key}.process",
            waiting=lambda: _wait_for("a process of an ended run", report),
        ):
            # a killed run's process may live for another 0.2 s: it must be gone before its work is
            # touched
            pass
        if stored and not (work / resume.RESTARTED).exists():
            remove_tree(work)
        if planned.partial_run:
            resume.take_over(store, planned.partial_run, key, planned.ingredients)
        elif planned.start_from and not resume.saved_step(work):
            remove_tree(work)
            resume.begun_at(
                store, planned, planned.start_from.parents[1], planned.first_step
            ).rename(work)
        remove_earlier_results(work)  # at once: the ranks of other nodes begin when there is a job
        for name, artifact in planned.inputs.items():
            store.complete(
                artifact,
                stage.inputs.get(name, ()),
                report=lambda line: report("message", {"text": line}),
            )
        with verified(stage, store, planned.inputs):
            _prepare(planned, settings, store, work)
        report("started", {"planned": planned, "work": work})
        try:
            result = processes.run(
                stage, settings, work, work / "output" / "run" / "log.txt", report, stop
            )
        except TTrainError as error:
            # URLs of sources may have secrets; the next attempt writes them again.
            with contextlib.suppress(OSError):  # a full disk
                write_json(work / JOB, {**read_object(work / JOB), "files": {}}, PRIVATE_FILE)
            if isinstance(error, StageFailed) and error.damaged:
                raise _set_aside(stage, store, planned.inputs, error.damaged, str(error)) from None
            raise
        # Costs one stat per unchanged file.
        if file_digests(stage, settings, store) != planned.ingredients["files"]:
            raise StageFailed(
                f"stage {stage.name}: its input files changed while they were read; run the "
                f"same command again"
            )
        same = store.compare(stored, work / "output") if stored else None
        state = "completed"
        if stored:
            state = "equal" if same else "different"
        # An incomplete stored one is replaced by the one just built.
        if same is None or same.absent:
            manifest = {
                "result": result,
                "ingredients": planned.ingredients,
                "inputs": {
                    name: {"stage": of.stage, "key": of.key, "content": of.content}
                    for name, of in planned.inputs.items()
                },
                "inputs_verified": True,  # all bytes read from them were the published ones
                "extends": str(planned.start_from.name) if planned.start_from else None,
                "continued": resume.history(work, key),
                "seconds": time.monotonic() - began,
                "provenance": provenance.of(settings, work),
            }
            same = store.publish(stage.name, key, work / "output", manifest)
        remove_tree(work)
    return same, state


def _wait_for(who: str, report: Report) -> None:
    report("message", {"text": f"{who} is building it; waiting for it to finish"})


@contextlib.contextmanager
def verified(stage: Stage, store: ArtifactStore, inputs: Artifacts) -> Iterator[None]:
    """Verify the inputs against their manifests; shards are verified as rows are read in the block.

    Raises StageFailed for a damaged file, and quarantines its artifact.
    """
    try:
        for name, artifact in inputs.items():
            integrity.verify_artifact(artifact, stage.inputs.get(name, ()))
        yield
    except DamagedFile as error:
        raise _set_aside(stage, store, inputs, error.path, f"stage {stage.name}: {error}") from None


def _set_aside(
    stage: Stage, store: ArtifactStore, inputs: Artifacts, path: Path, message: str
) -> StageFailed:
    artifact = next(
        (artifact for artifact in inputs.values() if path.is_relative_to(artifact.path)), None
    )
    if artifact and store.set_damaged_aside(artifact.path, artifact):
        moved = (
            f"moved to {store.root / 'replaced'}: {artifact.stage} {artifact.key[:SHOWN_KEY]} "
            "(damaged); run the same command again to rebuild it"
        )
        message = message.replace(DamagedFile.fix, moved)
    return StageFailed(message, DamagedFile.__name__, path)


def _prepare(planned: Planned, settings: Settings, store: ArtifactStore, work: Path) -> None:
    # What an earlier attempt of the same key left is kept: training continues from it.
    stage = planned.stage
    output = work / "output"
    if not (stage.uses_ranks or stage.reuses_parts or stage.keeps_output):
        remove_tree(output)
    (output / "run").mkdir(parents=True, exist_ok=True)
    files = data_files(stage, settings)
    reusable = list[str]()
    if stage.reuses_parts and not planned.forced:
        for artifact in store.artifacts(stage.name)[:EARLIER_OUTPUTS]:
            # its record of parts, with the digest of each, may be damaged
            with contextlib.suppress(ArtifactError):
                integrity.verify_artifact(artifact, PARTS)
                reusable.append(str(artifact.path))
    spec = {
        "stage": stage.name,
        "uses_ranks": stage.uses_ranks,
        "settings": stage.part_of(settings),
        "inputs": {name: str(artifact.path) for name, artifact in planned.inputs.items()},
        "files": {
            role: [file.location for file in input_files] for role, input_files in files.items()
        },
        "groups": {
            role: [file.group for file in input_files] for role, input_files in files.items()
        },
        "weights": list(settings.data.weights(stage.dataset))
        if stage.reuses_parts and stage.dataset
        else [],
        "reuse": reusable,
        "runtime": settings.runtime.model_dump(mode="json"),
        "output": "output",
        "key": planned.key,
    }
    if stage.uses_ranks:
        write_json(work / resume.INGREDIENTS, planned.ingredients)
    write_json(
        work / JOB, spec, PRIVATE_FILE
    )  # private: it has full URLs, since the stage opens the files


def remove_earlier_results(work: Path) -> None:
    """Remove job, results and progress of an earlier attempt."""
    for path in (
        work / JOB,
        work / stage_worker.PROGRESS,
        *work.glob("rendezvous-*"),
        *work.glob(stage_worker.RESULTS),
    ):
        path.unlink(missing_ok=True)


def _with_first_node(
    planned: Planned, settings: Settings, store: ArtifactStore, report: Report, stop: StopRequest
) -> tuple[Artifact, str]:
    # Node 0 has the key's lock and its work directory; this node's log lies next to it. Raises
    # StageFailed if node 0 does not begin within NODE_SECONDS.
    stage = planned.stage
    key = planned.known_key
    work = store.work(stage.name, key)
    _wait_for("node 0", report)
    artifact = _wait_for_first_node(planned, store, stop)
    if artifact:
        return artifact, "cached"
    node_work = work.with_name(f"{key}.node{settings.runtime.node_rank}")
    log_path = node_work / "output" / "run" / "log.txt"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    report("started", {"planned": planned, "work": node_work})
    failure: TTrainError | None = None
    try:
        processes.run(stage, settings, work, log_path, report, stop)
    except TTrainError as error:
        failure = error
    with store.lock(stage.name, key, waiting=lambda: _wait_for("node 0", report)):
        artifact = store.find(stage.name, key)
    if artifact is None or isinstance(failure, Interrupted):
        raise failure or StageFailed(
            f"stage {stage.name}: node 0 published nothing; its own log says why"
        )
    remove_tree(node_work)
    return artifact, "completed"


def _wait_for_first_node(
    planned: Planned, store: ArtifactStore, stop: StopRequest
) -> Artifact | None:
    # None once node 0 has a job for the ranks of all nodes.
    stage = planned.stage
    key = planned.known_key
    last_sign_of_life = time.monotonic()
    while (artifact := store.find(stage.name, key)) is None:
        if stop.signum:
            raise Interrupted(
                f"stopped while node 0 had yet to build stage {stage.name}", stop.signum
            )
        if store.is_locked(stage.name, key):
            last_sign_of_life = time.monotonic()
            if stage.uses_ranks and (store.work(stage.name, key) / JOB).exists():
                return None
        if time.monotonic() - last_sign_of_life > NODE_SECONDS:
            raise StageFailed(
                f"stage {stage.name}: node 0 has not begun it for {NODE_SECONDS:.0f} s; its "
                f"log says why, or it does not "
                f"run, or it has other settings or another TTRAIN_HOME"
            )
        time.sleep(NODE_POLL_SECONDS)
    return artifact


# --- outside of a pipeline: a user's task, or a gate ----------------------------------------------


def split_runtime(overrides: Sequence[Override]) -> tuple[Runtime, list[Override]]:
    """Split the overrides into (runtime settings, other overrides). Raises UsageError for several
    machines.
    """
    own = [override for override in overrides if override.key.partition(".")[0] == "runtime"]
    runtime = settings_of_task(TaskRuntime, own).runtime
    if runtime.nodes > 1:
        raise UsageError(
            f"runtime.nodes is {runtime.nodes}, but a task trains on one machine; set "
            f"runtime.nodes=1"
        )
    return runtime, [override for override in overrides if override not in own]


def run_alone(
    stage: Stage, settings: JsonObject, runtime: Runtime, out: Path, why: str, display: Display
) -> JsonDict:
    """Run the stage with `out` as its output; returns its result.

    An earlier attempt in `out` is continued; "was_finished" tells if nothing was left to do.
    """
    work = out / WORK
    work.mkdir(parents=True, exist_ok=True)
    stop = StopRequest(display.say, "the training saves its state")
    display.log_level = runtime.log_level

    def report(event: str, data: JsonObject) -> None:
        if event == "progressed":
            display(stage.name, event, data)
        elif runtime.log_level == "debug":
            display(stage.name, "message", {"text": data["line"]})

    with (
        exclusive(
            out / LOCK,
            lambda: display.say(f"  another process trains in {out}; waiting for that one"),
        ),
        stop.catching_signals(),
    ):
        with exclusive(work.with_name(f"{work.name}.process.lock")):
            pass  # a killed run's process may live for another 0.2 s
        remove_earlier_results(work)
        spec: JsonDict = {
            "stage": next(name for name, each in RUNNABLE.items() if each.module == stage.module),
            "uses_ranks": True,
            "settings": settings,
            "runtime": runtime.model_dump(mode="json"),
            "output": str(out),
            **{
                name: {} for name in ("inputs", "files", "groups")
            },  # only stages of a pipeline have these
            **{name: [] for name in ("weights", "reuse")},
        }
        write_json(work / JOB, spec, PRIVATE_FILE)
        display(stage.name, "started", {"why": why})
        os.environ.setdefault("HF_HUB_OFFLINE", "0")  # a task may need the Hub
        try:
            figures = processes.run(stage, Settings(runtime=runtime), work, out / LOG, report, stop)
        except TTrainError as error:
            offer = "; the same command continues it" if isinstance(error, Interrupted) else ""
            display(stage.name, "failed", {"error": f"{error}{offer}"})
            error.shown = True
            raise
    return {"was_finished": figures.get("resumed_from_step") == figures.get("steps", 0), **figures}
