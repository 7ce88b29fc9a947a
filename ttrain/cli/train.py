"""The `ttrain train` command, which trains a user's task, and `ttrain doctor`, which checks that training works."""

from __future__ import annotations

import os
import shlex
import time
import warnings
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
from ttrain.core.terminal import console, escaped, outlast_output, print_json, print_spans
from ttrain.core.text import format_duration, format_value
from ttrain.errors import UsageError
from ttrain.store import references
from ttrain.store.layout import usable_home

if TYPE_CHECKING:
    from ttrain.doctor.parts import Finding


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
    from ttrain.engine.alone import run_alone, split_runtime
    from ttrain.engine.display import Display
    from ttrain.tasks import TASK
    from ttrain.train import task

    outlast_output()
    if name is None or "=" in name:
        raise UsageError(f"`ttrain train` needs the name of a task, and got none; the tasks are {task.describe_tasks()}")
    if Path(name).suffix in (".yaml", ".yml"):
        file = shlex.quote(name)
        raise UsageError(f"'{name}' is a file of settings, not a task; write `ttrain pipeline run full -c {file}`")
    runtime, task_overrides = split_runtime(task_settings(overrides, config))
    point = task.find_task(name)
    directory = (out or usable_home() / "tasks" / name.replace(":", ".")).absolute()
    check_output(directory)
    settings = {"task": name, "given": task_overrides, "allow": list(allow or ())}
    with closing(Display(console(stderr=as_json))) as display:
        why = f"{point.value} in {directory}"
        metrics = run_alone(replace(TASK, name=name), settings, runtime, directory, why, display)
    summary = {"task": name, "out": str(directory), **metrics}
    rows = [(key, format_value(summary[key])) for key in FIGURES if summary.get(key) is not None]
    end = f"done in {format_duration(summary['train_seconds'])}"
    if summary["was_finished"]:
        end = f"it was already finished at step {summary['steps']}; nothing was trained"
    lines = [
        f"the weights, by PyTorch names: {directory / 'model.safetensors'}",
        f"curves {directory / 'run/metrics.jsonl'}, log {directory / 'run/log.txt'}",
    ]
    return Output(summary, [Table(("metric", "value"), rows), *lines, end])


def check_output(out: Path) -> None:
    """Raise UsageError if `out` must not be written: in an artifact, or over files that are not a training's."""
    from ttrain.engine.alone import WORK

    check_no_artifact(out)
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out is {out}, which is a file; name a directory")
    if out.exists() and not (out / WORK).is_dir() and any(out.iterdir()):
        raise UsageError(f"--out is {out}, which holds other files; name an empty directory, or one of an earlier training")


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
    from ttrain.engine.processes import environment_of

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
