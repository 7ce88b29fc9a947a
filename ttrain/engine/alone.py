"""Run a stage outside of a pipeline, in a process of its own: a user's task, or a gate."""

import os
from collections.abc import Sequence
from pathlib import Path

from ttrain.config import Runtime, Settings
from ttrain.config.loading import Override, settings_of_task
from ttrain.config.runtime import TaskRuntime
from ttrain.core.files import PRIVATE_FILE, JsonDict, JsonObject, exclusive, write_json
from ttrain.engine import launch, processes
from ttrain.engine.display import Display
from ttrain.engine.stop_request import StopRequest
from ttrain.errors import Interrupted, TTrainError, UsageError
from ttrain.store.layout import JOB
from ttrain.tasks import RUNNABLE, Stage

WORK, LOCK, LOG = Path("run", "work"), Path("run", "lock"), Path("run", "log.txt")


def split_runtime(overrides: Sequence[Override]) -> tuple[Runtime, list[Override]]:
    """Split the overrides into (runtime settings, other overrides). Raises UsageError for several machines."""
    own = [override for override in overrides if override.key.partition(".")[0] == "runtime"]
    runtime = settings_of_task(TaskRuntime, own).runtime
    if runtime.nodes > 1:
        raise UsageError(f"runtime.nodes is {runtime.nodes}, but a task trains on one machine; set runtime.nodes=1")
    return runtime, [override for override in overrides if override not in own]


def run_alone(stage: Stage, settings: JsonObject, runtime: Runtime, out: Path, why: str, display: Display) -> JsonDict:
    """Run the stage with `out` as its output; returns its figures. `why` is shown.

    An earlier attempt in `out` is continued; "was_finished" says whether nothing was left to do.
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
        exclusive(out / LOCK, lambda: display.say(f"  another process trains in {out}; waiting for that one")),
        stop.catching_signals(),
    ):
        with exclusive(work.with_name(f"{work.name}.process.lock")):
            pass  # a killed run's process may live for another 0.2 s
        launch.remove_earlier_results(work)
        spec: JsonDict = {
            "stage": next(name for name, each in RUNNABLE.items() if each.module == stage.module),
            "uses_ranks": True,
            "settings": settings,
            "runtime": runtime.model_dump(mode="json"),
            "output": str(out),
            **{name: {} for name in ("inputs", "files", "groups")},  # only stages of a pipeline have these
            **{name: [] for name in ("weights", "reuse")},
        }
        write_json(work / JOB, spec, PRIVATE_FILE)
        display(stage.name, "started", {"why": why})
        os.environ.setdefault("HF_HUB_OFFLINE", "0")  # a task may need the Hub
        try:
            figures = processes.run(stage, Settings(runtime=runtime), work, out / LOG, report, stop)
        except TTrainError as error:
            message = f"{error}; the same command continues it" if isinstance(error, Interrupted) else str(error)
            display(stage.name, "failed", {"error": message})
            error.shown = True
            raise
    return {"was_finished": figures.get("resumed_from_step") == figures.get("steps", 0), **figures}
