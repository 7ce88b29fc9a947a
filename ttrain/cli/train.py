"""The `ttrain train` command, which trains a user's task, and `ttrain doctor`, which checks that training works."""

from __future__ import annotations

import os
import shlex
import time
import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Exit

from ttrain.cli.options import (
    Allow,
    AsJson,
    Files,
    Output,
    SettingsOptions,
    Table,
    app,
    argument,
    check_no_artifact,
    command,
    option,
    task_settings,
)
from ttrain.core.files import PRIVATE_FILE, JsonDict, JsonObject, exclusive, write_json
from ttrain.core.terminal import console, escaped, outlast_output, print_json, print_spans
from ttrain.core.text import format_duration, format_value
from ttrain.errors import Interrupted, StageFailed, TTrainError, UsageError
from ttrain.store import references
from ttrain.store.layout import usable_home

if TYPE_CHECKING:
    from ttrain.config import Runtime
    from ttrain.config.loading import Override
    from ttrain.doctor.parts import Finding
    from ttrain.pipeline.processes import StageObserver
    from ttrain.pipeline.progress_display import Display
    from ttrain.stages import Stage


TASK_HELP = "name of an installed task, such as regression, or module:Class"

FIGURES = ("steps", "epochs", "loss", "validation_loss", "rows", "parameters", "precision", "device", "train_seconds")


@command(
    app,
    "Examples:  ttrain train regression hidden=128 --out regression\n\n"
    "ttrain train mytask:MyTask optim.lr=1e-3 runtime.threads=1 --out mine\n\n"
    "ttrain train mytask:MyTask optim.lr=5e-4 --allow optim.lr --out mine",
    "Train",
)
def train(
    name: Annotated[str | None, argument(TASK_HELP, metavar="TASK")] = None,
    overrides: Annotated[
        list[str] | None,
        argument("settings of the task, or runtime.*, as key=value", metavar="KEY=VALUE"),
    ] = None,
    config: Files = None,
    out: Annotated[Path | None, option("where model, checkpoints and curves go; else under TTRAIN_HOME")] = None,
    allow: Allow = None,
    as_json: AsJson = False,
) -> Output:
    """Train a task of your own (docs/tasks.md); the same command continues a stopped training."""
    from ttrain.pipeline.progress_display import Display
    from ttrain.train import task

    outlast_output()
    if name is None or "=" in name:
        raise UsageError(f"`ttrain train` needs the name of a task, and got none; the tasks are {task.describe_tasks()}")
    if Path(name).suffix in (".yaml", ".yml"):
        file = shlex.quote(name)
        raise UsageError(f"'{name}' is a file of settings, not a task; write `ttrain pipeline run full -c {file}`")
    task_overrides = task_settings(overrides, config)
    with closing(Display(console(stderr=as_json))) as display:
        summary = train_task(name, task_overrides, out, allow or (), display)
    rows = [(key, format_value(summary[key])) for key in FIGURES if summary.get(key) is not None]
    end = f"done in {format_duration(summary['train_seconds'])}"
    if summary["was_finished"]:
        end = f"it was already finished at step {summary['steps']}; nothing was trained"
    lines = [
        f"the weights, by PyTorch names: {Path(summary['out'], 'model.safetensors')}",
        f"curves {Path(summary['out'], 'run/metrics.jsonl')}, log {Path(summary['out'], LOG)}",
    ]
    return Output(summary, [Table(("metric", "value"), rows), *lines, end])


LOG = "run/log.txt"

WORK, LOCK = Path("run", "work"), Path("run", "lock")


def train_task(
    name: str, overrides: Sequence[Override], output: Path | None, allow: Sequence[str], display: Display
) -> JsonDict:
    """Train the task, or continue where the same command was stopped; returns a summary.

    The task's own settings are checked in its process, where it is imported. Raises UsageError for invalid ones.
    """
    from ttrain.stages import TASK
    from ttrain.train import task

    point = task.find_task(name)
    runtime, task_overrides = split_runtime(overrides)
    out = output_of(name, output)
    config = {"task": name, "given": task_overrides, "allow": list(allow)}
    figures = run_alone(TASK, name, config, runtime, out, f"{point.value} in {out}", display)
    return {"task": name, "out": str(out), **figures}


def output_of(name: str, output: Path | None) -> Path:
    """Where a task trains: `output`, else a directory of its own in the home."""
    return (output or usable_home() / "tasks" / name.replace(":", ".")).absolute()


def split_runtime(overrides: Sequence[Override]) -> tuple[Runtime, list[Override]]:
    """Split the overrides into (runtime settings, other overrides). Raises UsageError for several machines."""
    from ttrain.config.loading import merge, with_types
    from ttrain.config.runtime import TaskRuntime

    own = [override for override in overrides if _is_runtime(override)]
    runtime = merge(TaskRuntime, with_types(TaskRuntime, own))[0].runtime
    if runtime.nodes > 1:
        raise UsageError(f"runtime.nodes is {runtime.nodes}, but a task trains on one machine; set runtime.nodes=1")
    return runtime, [override for override in overrides if not _is_runtime(override)]


def run_alone(
    stage: Stage, name: str, config: JsonObject, runtime: Runtime, out: Path, why: str, display: Display
) -> JsonDict:
    """Run a stage outside of a pipeline, in its own process, with `out` as its output; returns its figures.

    An earlier attempt in `out` is continued; "was_finished" says whether nothing was left to do. `name` and `why` are
    shown. Raises UsageError if `out` holds something else.
    """
    from ttrain.pipeline import launch
    from ttrain.pipeline.progress_display import DisplayObserver
    from ttrain.pipeline.stage_worker import JOB
    from ttrain.pipeline.stop_request import StopRequest

    check_output(out)
    work = out / WORK
    work.mkdir(parents=True, exist_ok=True)
    stop_request = StopRequest(display.say, "the training saves its state")
    with (
        exclusive(out / LOCK, lambda: display.say(f"  another process trains in {out}; waiting for that one")),
        stop_request.catching_signals(),
    ):
        with exclusive(work.with_name(f"{work.name}.process.lock")):
            pass  # a killed run's process may live for another 0.2 s
        launch.remove_earlier_results(work)
        spec: JsonDict = {
            "stage": stage.name,
            "uses_ranks": True,
            "config": config,
            "runtime": runtime.model_dump(mode="json"),
            "output": str(out),
            "start_from": None,
            **{name: {} for name in ("inputs", "files", "versions", "groups")},  # only stages of a pipeline have these
            **{name: [] for name in ("weights", "reuse")},
        }
        write_json(work / JOB, spec, PRIVATE_FILE)
        display.log_level = runtime.log_level
        display.started(name, why)
        observer = DisplayObserver(display, stop_request, runtime.log_level)
        try:
            figures = _run(replace(stage, name=name), runtime, work, out / LOG, observer)
        except TTrainError as error:
            display.failed(name, f"{error}; the same command continues it" if isinstance(error, Interrupted) else str(error))
            error.shown = True
            raise
    return {"was_finished": figures["resumed_from_step"] == figures["steps"], **figures}


def check_output(out: Path) -> None:
    """Raise UsageError if `out` must not be written: in an artifact, or over files that are not a training's."""
    check_no_artifact(out)
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out is {out}, which is a file; name a directory")
    if out.exists() and not (out / WORK).is_dir() and any(out.iterdir()):
        raise UsageError(f"--out is {out}, which holds other files; name an empty directory, or one of an earlier training")


def _is_runtime(override: Override) -> bool:
    return override.key == "runtime" or override.key.startswith("runtime.")


def _run(stage: Stage, runtime: Runtime, work: Path, log_path: Path, observer: StageObserver) -> JsonDict:
    """Run the process of the task."""
    from ttrain.config import Settings
    from ttrain.pipeline import processes, stage_worker

    os.environ.setdefault("HF_HUB_OFFLINE", "0")  # a task may need the Hub
    try:
        return processes.run(stage, Settings(runtime=runtime), work, log_path, observer)
    except StageFailed:
        outcome = stage_worker.read(work)
        if outcome and outcome.get("kind") == UsageError.__name__:
            raise UsageError(outcome["error"]) from None
        raise


READ_BY_C = ("GLIBC_", "GOMP_")  # variables of a stage's process that are read when OpenMP is loaded, or a rank starts
NAME_WIDTH = 22


@command(
    app,
    "Examples:  ttrain doctor\n\nttrain doctor --stage sft sft.epochs=3 --json",
    "Train",
)
def doctor(
    settings_options: SettingsOptions,
    stage: Annotated[
        str | None, option("the training stage to check, such as sft; default: the first", metavar="STAGE")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check, before a long run, that training works and fits: with these settings and data, on this machine."""
    from ttrain import api
    from ttrain.config.training import TRAININGS
    from ttrain.pipeline.processes import environment_of

    began = time.monotonic()
    loaded = settings_options.load()
    examined = stage or loaded.settings.trainings[0]
    if examined not in TRAININGS:
        raise references.unknown("training stage", examined, TRAININGS)
    for name, value in environment_of(loaded.settings).items():
        if name.startswith(READ_BY_C):
            os.environ.setdefault(name, value)
    plan = api.plan("full", loaded.settings)
    from ttrain.doctor.run import examine  # loads torch, which now finds the variables

    findings: dict[str, Finding] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for name, finding in examine(examined, plan):
            findings[name] = finding
            if not as_json:
                _print(name, finding)
    failures = [name for name, finding in findings.items() if not finding.ok]
    if as_json:
        checks = [{"name": name, **finding.to_json()} for name, finding in findings.items()]
        print_json({"checks": checks, "estimate": plan.estimate.to_json()})
    else:
        for example in filter(None, (finding.example for finding in findings.values())):
            print(f"\na row of {examined}; the tokens that are trained on are marked:")
            print_spans(example)
            print()
        for line in (*plan.estimate.lines(), *plan.estimate.remarks()):
            print(line)
        verdict = f"{len(failures)} of {len(findings)} checks are not ok: {', '.join(failures)}"
        if not failures:
            verdict = f"all {len(findings)} checks are ok"
        print(f"{examined}: {verdict}, in {time.monotonic() - began:.0f} s")
    if failures:
        raise Exit(1)


def _print(name: str, finding: Finding) -> None:
    from rich.text import Text

    mark = ("ok  ", "green") if finding.ok else ("BAD ", "bold red")
    line = finding.measured if finding.ok else f"{finding.measured}; fix: {finding.fix}"
    console().print(Text.assemble(mark, f"{name:{NAME_WIDTH}}{escaped(line)}"), soft_wrap=True)
