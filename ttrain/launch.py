"""Runs one stage in a process of its own and publishes what it leaves."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from ttrain import __version__
from ttrain.config import DATASETS, Settings
from ttrain.errors import Interrupted, StageFailed
from ttrain.plan import Planned, data_files, file_digests, plan_stage, section_of
from ttrain.stages import Stage
from ttrain.store import Artifact, Store, read_json, remove_tree, write_json
from ttrain.worker import JOB, PARENT, PROGRESS, RESULT

POLL_SECONDS = 0.1
EARLIER_OUTPUTS = 8  # artifacts of the same stage in which finished parts are looked for
# After being told to stop: time for a step and its checkpoint, or for nothing in particular. Native code may never listen.
GRACE_SECONDS = {True: 60.0, False: 5.0}
RECORDED_LIBRARIES = ("torch", "transformers", "tokenizers", "peft", "pyarrow", "numpy", "safetensors")
# glibc keeps freed memory and uses huge pages: 1.35 x the training speed of the quickstart's size, measured on two cores.
GLIBC_TUNABLES = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184"


class Observer(Protocol):
    """Watches a stage while it runs."""

    def started(self, stage: Stage, planned: Planned, work: Path) -> None: ...

    def prepared(self, stage: Stage, work: Path) -> None: ...

    def progressed(self, stage: Stage, progress: Mapping[str, Any]) -> None: ...

    def logged(self, stage: Stage, line: str) -> None: ...

    def waiting(self, stage: Stage) -> None: ...

    def process_ended(self, stage: Stage) -> None: ...

    def stop_signal(self) -> int: ...


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
) -> Outcome:
    """Take the stage's artifact from the store, or make it.

    Raises StageFailed with the stage's own message, or Interrupted once its state is saved.
    """
    began = time.monotonic()
    planned = plan_stage(stage, settings, store, inputs, forced=forced, extend=extend)
    assert planned.key is not None, "the inputs exist, so the key is known"
    if planned.state == "cached":
        assert planned.artifact is not None, "cached means there is an artifact"
        return Outcome(planned.artifact, "cached", time.monotonic() - began)
    with store.lock(stage.name, planned.key, waiting=lambda: observer.waiting(stage)):
        found = store.find(stage.name, planned.key)
        if found and not forced:
            return Outcome(found, "cached", time.monotonic() - began)
        work = store.work(stage.name, planned.key)
        with store.lock(stage.name, f"{planned.key}.process", waiting=lambda: observer.waiting(stage)):
            pass  # a killed run's process may live for another 0.2 s: it must be gone before its work is touched
        if forced and found:
            remove_tree(work)
        _prepare(stage, settings, inputs, planned, work, store)
        observer.started(stage, planned, work)
        observer.prepared(stage, work)
        result = _run(stage, settings, work, observer)
        _check_inputs_did_not_change(stage, settings, store, planned)
        state, artifact = "completed", None
        manifest = _manifest(planned, inputs, settings, work, result, time.monotonic() - began)
        if forced and found:
            artifact = store.compare(found, work / "output")
            state = "equal" if artifact else "different"
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
    for name in (RESULT, PROGRESS):
        (work / name).unlink(missing_ok=True)
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
        "start_from": str(planned.start_from) if planned.start_from else None,
        "key": planned.key,
    }
    write_json(work / JOB, spec)


def _run(stage: Stage, settings: Settings, work: Path, observer: Observer) -> dict[str, Any]:
    log_path = work / "output" / "run" / "log.txt"
    command = [sys.executable, "-P", "-m", "ttrain.worker", str(work)]
    with log_path.open("ab") as log:
        position = log.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(settings),
            start_new_session=True,
        )
    try:
        told, timed_out = _wait(process, stage, settings, work, log_path, position, observer)
    finally:
        _end(process)
        observer.process_ended(stage)
    return _outcome(stage, work, log_path, process.returncode, told, timed_out, settings)


def _wait(
    process: subprocess.Popen[bytes],
    stage: Stage,
    settings: Settings,
    work: Path,
    log_path: Path,
    position: int,
    observer: Observer,
) -> tuple[int, bool]:
    """Until the process ends; passes its progress and log lines on, and a stop signal to it, which it returns with whether
    time was up."""
    limit = settings.runtime.timeout_seconds
    deadline = time.monotonic() + limit if limit else None
    told, give_up, timed_out, seen = 0, 0.0, False, None
    while True:
        ended = process.poll() is not None
        position = _follow(log_path, position, stage, observer, to_the_end=ended)
        progress = read_json(work / PROGRESS)
        if progress and progress != seen:
            seen = progress
            observer.progressed(stage, progress)
        if ended:
            return told, timed_out
        signum = told or observer.stop_signal()
        if deadline and time.monotonic() > deadline and not timed_out:
            timed_out, signum = True, signal.SIGTERM
        if signum and not told:
            told, give_up = signum, time.monotonic() + GRACE_SECONDS[stage.uses_ranks]
            process.send_signal(signal.SIGTERM)
        if told and time.monotonic() > give_up:
            process.kill()
        time.sleep(POLL_SECONDS)


def _follow(path: Path, position: int, stage: Stage, observer: Observer, *, to_the_end: bool) -> int:
    with path.open("rb") as file:
        file.seek(position)
        data = file.read()
    whole = len(data) if to_the_end else data.rfind(b"\n") + 1
    for line in data[:whole].decode("utf-8", "replace").splitlines():
        observer.logged(stage, line)
    return position + whole


def _end(process: subprocess.Popen[bytes]) -> None:
    """No process outlives the wait for it."""
    if process.poll() is None:
        process.kill()
        process.wait()


def _outcome(
    stage: Stage, work: Path, log_path: Path, returncode: int, told: int, timed_out: bool, settings: Settings
) -> dict[str, Any]:
    outcome = read_json(work / RESULT)
    others = [found for path in sorted(work.glob("result.rank*.json")) if (found := read_json(path))]
    for path in work.glob("result.rank*.json"):
        path.unlink()
    if others and (outcome is None or outcome["outcome"] == "failed"):
        outcome = others[0]  # the rank that failed first takes the others down with it
    if outcome and outcome["outcome"] == "completed":
        result: dict[str, Any] = outcome["result"]
        return result
    if timed_out:
        limit = settings.runtime.timeout_seconds
        raise StageFailed(f"stage {stage.name} took longer than runtime.timeout_seconds={limit}; the next run continues it")
    if outcome and outcome["outcome"] == "interrupted":
        raise Interrupted(f"stage {stage.name}: {outcome['error']}", told or outcome["signal"])
    if told and outcome is None:
        raise Interrupted(f"stage {stage.name} did not stop by itself and was ended", told)
    if outcome:
        where = "" if outcome["kind"] != "unexpected" else f"; the traceback is in {log_path}"
        raise StageFailed(f"stage {stage.name} failed: {outcome['error']}{where}")
    how = f"was killed by {signal.Signals(-returncode).name}" if returncode < 0 else f"ended with exit code {returncode}"
    tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-5:])
    raise StageFailed(f"stage {stage.name}: its process {how} without a result; its log is {log_path}\n{tail}")


def _environment(settings: Settings) -> dict[str, str]:
    environment = dict(os.environ)
    environment.setdefault("GLIBC_TUNABLES", GLIBC_TUNABLES)
    # How long an idle OpenMP thread spins before it sleeps. A step of the quickstart on two cores, alone / beside a busy
    # process: libgomp's default 0.18 s / 5 s, no spinning at all 0.24 s / 0.31 s, this 0.18 s / 0.47 s.
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", "10000")
    environment.setdefault("TOKENIZERS_PARALLELISM", "true")
    if not any(path.startswith("hf://") for name in DATASETS for path in settings.data.paths(name)):
        environment.setdefault("HF_HUB_OFFLINE", "1")
    environment["PYTHONUNBUFFERED"] = "1"
    environment[PARENT] = str(os.getpid())
    if settings.runtime.threads:
        environment["OMP_NUM_THREADS"] = str(settings.runtime.threads)
    return environment


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
        "seconds": seconds,
        "provenance": {
            "ttrain": __version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "libraries": library_versions(),
            "runtime": settings.runtime.model_dump(mode="json"),
        },
    }


def library_versions() -> dict[str, str]:
    """Versions of the libraries that compute: recorded and shown, never hashed."""
    found = {}
    for name in RECORDED_LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
