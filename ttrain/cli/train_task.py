"""`ttrain train --task`: a user's task, trained in a process of its own, outside of a pipeline and its store."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ttrain.config import Runtime, Section, Settings
from ttrain.config.loading import Given, merge
from ttrain.core.files import PRIVATE_FILE, exclusive, write_json
from ttrain.core.signals import catching_signals
from ttrain.errors import Interrupted, StageFailed, TTrainError, UsageError
from ttrain.pipeline import launch, processes, results
from ttrain.pipeline.progress_display import Display
from ttrain.pipeline.stage_worker import JOB
from ttrain.stages import TASK, Stage
from ttrain.store.layout import MANIFEST, usable_home
from ttrain.train import task_registry

WEIGHTS, METRICS, LOG = "model.safetensors", "run/metrics.jsonl", "run/log.txt"
WORK, LOCK = Path("run", "work"), Path("run", "lock")


class TaskRuntime(Section):
    """Where and how fast, as for stages; a step is one micro-batch, unless it has more rows than this."""

    runtime: Runtime = Runtime(rows_per_device=1024)


def train(name: str, given: Sequence[Given], output: Path | None, allow: Sequence[str], display: Display) -> dict[str, Any]:
    """Train the task, or continue where the same command was stopped; returns a summary.

    The task's own settings are checked where it is imported, in its process. Raises UsageError for what is wrong with them.
    """
    point = task_registry.find(name)
    runtime, own = split_runtime(given)
    out = (output or usable_home() / "tasks" / name.replace(":", ".")).absolute()
    config = {"task": name, "given": own, "allow": list(allow)}
    figures = run_alone(TASK, name, config, runtime, out, f"{point.value} in {out}", display)
    return {"task": name, "out": str(out), **figures}


def split_runtime(given: Sequence[Given]) -> tuple[Runtime, list[Given]]:
    """(what is given of the runtime, over its defaults here; the rest). Raises UsageError for several machines."""
    runtime = merge(TaskRuntime, [one for one in given if _is_runtime(one)])[0].runtime
    if runtime.nodes > 1:
        raise UsageError(f"runtime.nodes is {runtime.nodes}, but a task trains on one machine; set runtime.nodes=1")
    return runtime, [one for one in given if not _is_runtime(one)]


def run_alone(
    stage: Stage, name: str, config: Mapping[str, Any], runtime: Runtime, out: Path, why: str, display: Display
) -> dict[str, Any]:
    """Run a stage that is no part of a pipeline, in its process, with `out` as its output; returns its figures.

    What an earlier try left there is continued; "was_finished" says whether nothing was left to do. `name` and `why` are
    shown. Raises UsageError where `out` holds something else.
    """
    check_output(out)
    work = out / WORK
    work.mkdir(parents=True, exist_ok=True)
    observer = _Observer(display)
    with (
        exclusive(out / LOCK, lambda: display.say(f"  another process trains in {out}; waiting for that one")),
        catching_signals(observer.asked),
    ):
        with exclusive(work.with_name(f"{work.name}.process.lock")):
            pass  # a killed run's process may live for another 0.2 s
        launch.forget(work)
        spec: dict[str, Any] = {
            "stage": stage.name,
            "uses_ranks": True,
            "config": config,
            "runtime": runtime.model_dump(mode="json"),
            "output": str(out),
            "start_from": None,
            **{name: {} for name in ("inputs", "files", "versions", "groups")},  # what only stages of a pipeline have
            **{name: [] for name in ("weights", "reuse")},
        }
        write_json(work / JOB, spec, PRIVATE_FILE)
        display.started(name, why)
        try:
            figures = _run(replace(stage, name=name), runtime, work, out / LOG, observer)
        except TTrainError as error:
            display.failed(name, f"{error}; the same command continues it" if isinstance(error, Interrupted) else str(error))
            error.shown = True
            raise
    return {"was_finished": figures["resumed_from_step"] == figures["steps"], **figures}


def check_output(out: Path) -> None:
    """Raise UsageError where a training must not be left: in an artifact, or over files that are not one's."""
    if any((above / MANIFEST).exists() for above in (out, *out.parents)):
        raise UsageError(f"--out is {out}, which holds an artifact of a pipeline; name another directory")
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out is {out}, which is a file; name a directory")
    if out.exists() and not (out / WORK / JOB).exists() and any(out.iterdir()):
        raise UsageError(f"--out is {out}, which holds other files; name an empty directory, or one of an earlier training")


def _is_runtime(given: Given) -> bool:
    return given.key == "runtime" or given.key.startswith("runtime.")


def _run(stage: Stage, runtime: Runtime, work: Path, log_path: Path, observer: _Observer) -> dict[str, Any]:
    """The process of the task. No fork server: it would load the libraries of language models, and be used once."""
    os.environ.setdefault("HF_HUB_OFFLINE", "0")  # whether a task asks the Hub is not known
    settings = Settings(runtime=runtime.model_copy(update={"fork_server": False}))
    try:
        return processes.run(stage, settings, work, log_path, observer)
    except StageFailed:
        outcome = results.read(work)
        if outcome and outcome.get("kind") == UsageError.__name__:
            raise UsageError(outcome["error"]) from None
        raise


@dataclass
class _Observer:
    """Passes on what the process tells."""

    display: Display
    signum: int = 0

    def asked(self, signum: int) -> None:
        """To stop."""
        self.signum = signum
        self.display.say("[yellow]stopping: the training saves its state (again to end at once)[/]")

    def progressed(self, stage: Stage, progress: Mapping[str, Any]) -> None:
        self.display.progressed(stage.name, progress)

    def logged(self, stage: Stage, line: str) -> None:
        """Its log is a file."""

    def process_ended(self, stage: Stage) -> None:
        """Nothing follows it."""

    def stop_signal(self) -> int:
        return self.signum

    def at_once(self) -> bool:
        """A second signal rises where the process is waited for, which ends it."""
        return False
