"""The `ttrain train` commands: train one stage of the pipeline, or a user's task."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ttrain.cli.options import (
    AsJson,
    Files,
    SettingsOptions,
    StageOptions,
    command_group,
    old_spelling,
    task_settings,
    with_option_groups,
)
from ttrain.core.files import PRIVATE_FILE, exclusive, write_json
from ttrain.core.terminal import console, outlast_output, print_json, table
from ttrain.core.text import format_duration, format_value
from ttrain.errors import Interrupted, StageFailed, TTrainError, UsageError
from ttrain.store.layout import MANIFEST, usable_home

if TYPE_CHECKING:
    from ttrain.config import Runtime
    from ttrain.config.loading import Override
    from ttrain.pipeline.processes import StageObserver
    from ttrain.pipeline.progress_display import Display
    from ttrain.stages import Stage


TASK_HELP = "name of an installed task, such as regression, or module:Class"

FIGURES = ("steps", "epochs", "loss", "validation_loss", "rows", "parameters", "precision", "device", "train_seconds")


class _TrainGroup(TyperGroup):
    """Takes the name of a task where a group expects a command; the old spellings are commands that are not listed:
    `train STAGE`, `train task NAME`, and `--task NAME` at any position."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self.commands = {**typer.main.get_group(_stages_app()).commands, **self.commands}
        names = [number for number, word in enumerate(args) if word == "--task" or word.startswith("--task=")]
        if names and args[0] not in self.commands:
            at = names[0]
            _, equals, name = args[at].partition("=")
            other_args = [*args[:at], *args[at + 1 :]] if equals else [*args[:at], *args[at + 2 :]]
            args = ["task", *([name] if equals else args[at + 1 : at + 2]), *other_args]
            old_spelling("ttrain train NAME")
        elif args and args[0] == "task":
            old_spelling("ttrain train NAME")
        elif args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["task", *args]
        return super().parse_args(ctx, args)


train_app = command_group(
    cls=_TrainGroup,
    help="Train a task of your own: `ttrain train NAME`, an installed task or module:Class.",
    epilog="Examples:  ttrain train regression hidden=128 --out regression\n\n"
    "ttrain train mytask:MyTask optim.lr=1e-3 --out mine\n\n"
    "ttrain train mytask:MyTask optim.lr=5e-4 --allow optim.lr --out mine\n\nOptions:  ttrain train task --help",
)


@train_app.callback()
def train_options() -> None:
    """Train a task of your own: `ttrain train NAME`, an installed task or module:Class."""


def _stages_app() -> typer.Typer:
    """`ttrain train STAGE` of all stages; made when it is used: their table loads all settings, which takes 0.15 s."""
    from ttrain.config.training import TRAINING_STAGES, TrainingStage

    app = typer.Typer()

    def add_command(row: TrainingStage) -> None:
        @with_option_groups
        def train_stage(given: SettingsOptions, options: StageOptions) -> None:
            old_spelling(f"ttrain stage run {row.name}")
            run_stage(row.name, given, options)

        example = f"Example:  ttrain train {row.name} {row.example}"
        app.command(row.name, hidden=True, help=row.help or f"Train {row.label}.", epilog=example.rstrip())(train_stage)

    app.callback()(lambda: None)  # or an app of one stage would be that stage's command
    for row in TRAINING_STAGES.values():
        add_command(row)
    return app


@train_app.command(
    "task",
    epilog="Examples:  ttrain train regression\n\n"
    "ttrain train mytask:MyTask hidden=128 optim.lr=1e-3 runtime.threads=1 --out mine\n\n"
    "ttrain train mytask:MyTask hidden=128 optim.lr=5e-4 --allow optim.lr --out mine",
)
def train_task(
    name: Annotated[str | None, typer.Argument(help=TASK_HELP)] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="settings of the task, or runtime.*, as key=value", metavar="[KEY=VALUE]..."),
    ] = None,
    config: Files = None,
    out: Annotated[Path | None, typer.Option(help="where model, checkpoints and curves go; else under TTRAIN_HOME")] = None,
    allow: Annotated[list[str] | None, typer.Option(help="a setting that may differ from the checkpoint's")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a task of your own (docs/tasks.md); the same command continues a stopped training."""
    from ttrain.pipeline.progress_display import Display
    from ttrain.train import task

    outlast_output()
    if name is None or "=" in name:
        raise UsageError(f"`ttrain train` needs the name of a task, and got none; the tasks are {task.describe_tasks()}")
    task_overrides = task_settings(overrides, config)
    with closing(Display(console(stderr=as_json))) as display:
        summary = train(name, task_overrides, out, allow or (), display)
    if as_json:
        print_json(summary)
        return
    _print_summary(summary, format_duration(summary["train_seconds"]))


def run_stage(stage: str, given: SettingsOptions, options: StageOptions) -> None:
    """Run one stage alone, without Prefect; its inputs are those of the current plan."""
    from ttrain.flows import api
    from ttrain.flows.run import run_one_stage

    outlast_output()
    usable_home()
    loaded, extend = given.load(), options.extend
    planned = api.plan("full", loaded.settings, extend=extend)
    screen = console(stderr=options.as_json)
    artifact, state = run_one_stage(
        stage, loaded.settings, planned.store, planned.stages, screen, force=options.force, extend=extend
    )
    if options.as_json:
        path, key = str(artifact.path), artifact.key
        print_json({"stage": stage, "state": state, "key": key, "path": path, "result": artifact.result})


def _print_summary(summary: dict[str, Any], took: str) -> None:
    """Print the outcome of a task, and what to do next."""
    out = Path(summary["out"])
    table(("figure", "value"), [(key, format_value(summary[key])) for key in FIGURES if summary.get(key) is not None])
    print("next:")
    print(f"  the weights, by PyTorch names: {out / WEIGHTS}")
    print(f"  curves {out / METRICS}, log {out / LOG}")
    print(f"  train with another setting: ttrain train {summary['task']} KEY=VALUE --out ANOTHER")
    if summary["was_finished"]:
        print(f"it was already finished at step {summary['steps']}; nothing was trained")
    else:
        print(f"done in {took}")


WEIGHTS, METRICS, LOG = "model.safetensors", "run/metrics.jsonl", "run/log.txt"

WORK, LOCK = Path("run", "work"), Path("run", "lock")


def train(
    name: str, overrides: Sequence[Override], output: Path | None, allow: Sequence[str], display: Display
) -> dict[str, Any]:
    """Train the task, or continue where the same command was stopped; returns a summary.

    The task's own settings are checked in its process, where it is imported. Raises UsageError for invalid ones.
    """
    from ttrain.stages import TASK
    from ttrain.train import task

    point = task.find_task(name)
    runtime, task_overrides = split_runtime(overrides)
    out = (output or usable_home() / "tasks" / name.replace(":", ".")).absolute()
    config = {"task": name, "given": task_overrides, "allow": list(allow)}
    figures = run_alone(TASK, name, config, runtime, out, f"{point.value} in {out}", display)
    return {"task": name, "out": str(out), **figures}


def split_runtime(overrides: Sequence[Override]) -> tuple[Runtime, list[Override]]:
    """Split the overrides into (runtime settings, other overrides). Raises UsageError for several machines."""
    from ttrain.config.loading import merge
    from ttrain.config.runtime import TaskRuntime

    runtime = merge(TaskRuntime, [override for override in overrides if _is_runtime(override)])[0].runtime
    if runtime.nodes > 1:
        raise UsageError(f"runtime.nodes is {runtime.nodes}, but a task trains on one machine; set runtime.nodes=1")
    return runtime, [override for override in overrides if not _is_runtime(override)]


def run_alone(
    stage: Stage, name: str, config: Mapping[str, Any], runtime: Runtime, out: Path, why: str, display: Display
) -> dict[str, Any]:
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
        spec: dict[str, Any] = {
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
        display.started(name, why)
        try:
            figures = _run(replace(stage, name=name), runtime, work, out / LOG, DisplayObserver(display, stop_request))
        except TTrainError as error:
            display.failed(name, f"{error}; the same command continues it" if isinstance(error, Interrupted) else str(error))
            error.shown = True
            raise
    return {"was_finished": figures["resumed_from_step"] == figures["steps"], **figures}


def check_output(out: Path) -> None:
    """Raise UsageError if `out` must not be written: in an artifact, or over files that are not a training's."""
    from ttrain.pipeline.stage_worker import JOB

    if any((above / MANIFEST).exists() for above in (out, *out.parents)):
        raise UsageError(f"--out is {out}, which holds an artifact of a pipeline; name another directory")
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out is {out}, which is a file; name a directory")
    if out.exists() and not (out / WORK / JOB).exists() and any(out.iterdir()):
        raise UsageError(f"--out is {out}, which holds other files; name an empty directory, or one of an earlier training")


def _is_runtime(override: Override) -> bool:
    return override.key == "runtime" or override.key.startswith("runtime.")


def _run(stage: Stage, runtime: Runtime, work: Path, log_path: Path, observer: StageObserver) -> dict[str, Any]:
    """Run the process of the task. No fork server: it would load the libraries of language models, and be used once."""
    from ttrain.config import Settings
    from ttrain.pipeline import processes, stage_worker

    os.environ.setdefault("HF_HUB_OFFLINE", "0")  # a task may need the Hub
    settings = Settings(runtime=runtime.model_copy(update={"fork_server": False}))
    try:
        return processes.run(stage, settings, work, log_path, observer)
    except StageFailed:
        outcome = stage_worker.read(work)
        if outcome and outcome.get("kind") == UsageError.__name__:
            raise UsageError(outcome["error"]) from None
        raise
