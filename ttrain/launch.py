"""Runs one stage in a process of its own and publishes what it leaves."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ttrain import provenance, results, runs, supervise, unfinished
from ttrain.config import Settings
from ttrain.errors import Interrupted, StageFailed, TTrainError
from ttrain.input_files import data_files, file_digests
from ttrain.plan import Planned, plan_stage, section_of
from ttrain.stages import Stage
from ttrain.store import Artifact, Store, remove_tree, write_json
from ttrain.worker import JOB, PROGRESS

NODE_SECONDS, NODE_POLL_SECONDS = 600.0, 0.2  # how long, and how often, a node looks for what the first one builds
EARLIER_OUTPUTS = 8  # artifacts of the same stage in which finished parts are looked for


class Observer(supervise.Observer, Protocol):
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
        if planned.goes_on_with:
            unfinished.adopt(store, planned.goes_on_with, planned.key, planned.ingredients)
        _prepare(stage, settings, inputs, planned, work, store)
        observer.started(stage, planned, work)
        observer.prepared(stage, work)
        result = supervise.run(stage, settings, work, work / "output" / "run" / "log.txt", observer)
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
        "reuse": [str(artifact.path) for artifact in earlier if not store.damage(artifact)],
        "runtime": settings.runtime.model_dump(mode="json"),
        "output": "output",
        "start_from": str(planned.start_from) if planned.start_from else None,
        "key": planned.key,
    }
    if stage.uses_ranks:
        write_json(work / unfinished.INGREDIENTS, planned.ingredients)
    write_json(work / JOB, spec)


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
        supervise.run(stage, settings, work, log_path, observer)
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
        "extends": str(planned.start_from.name) if planned.start_from else None,
        "continued": unfinished.history(work, planned.key or ""),
        "seconds": seconds,
        "provenance": provenance.of(settings, work),
    }
