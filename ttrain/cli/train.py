"""The commands `ttrain train` for a user's task, and `ttrain doctor`."""

import os
import time
import warnings
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ttrain.cli.options import (
    Allow,
    AsJson,
    Files,
    Output,
    SettingsOptions,
    Table,
    app,
    argument,
    command,
    option,
    task_settings,
)
from ttrain.core.terminal import console, outlast_output, print_escaped
from ttrain.core.text import format_duration, format_value
from ttrain.errors import UsageError
from ttrain.store.layout import MANIFEST, usable_home

if TYPE_CHECKING:
    from ttrain.config import Settings

TASK_HELP = "name of an installed task, such as regression, or module:Class"

READ_BY_C = ("GLIBC_", "GOMP_")  # variables that are read when OpenMP is loaded, or a rank starts
NAME_WIDTH = 22
FIGURES = (
    "steps",
    "epochs",
    "loss",
    "validation_loss",
    "rows",
    "parameters",
    "precision",
    "device",
    "train_seconds",
)


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
    out: Annotated[
        Path | None, option("where model, checkpoints and curves go; else under TTRAIN_HOME")
    ] = None,
    allow: Allow = None,
    as_json: AsJson = False,
) -> Output:
    """Train a task of your own (docs/tasks.md); the same command continues a stopped training."""
    from ttrain.engine.display import Display
    from ttrain.engine.launch import run_alone, split_runtime
    from ttrain.tasks import TASK
    from ttrain.train import task

    outlast_output()
    if name is None or "=" in name:
        raise UsageError(
            "`ttrain train` needs the name of a task, and got none; the tasks are "
            f"{task.describe_tasks()}"
        )
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
    end = (
        f"it was already finished at step {summary['steps']}; nothing was trained"
        if summary["was_finished"]
        else f"done in {format_duration(summary['train_seconds'])}"
    )
    lines = [
        f"the weights, by PyTorch names: {directory / 'model.safetensors'}",
        f"curves {directory / 'run/metrics.jsonl'}, log {directory / 'run/log.txt'}",
    ]
    return Output(summary, [Table(("metric", "value"), rows), *lines, end])


def check_output(out: Path) -> None:
    """Raise UsageError if `out` is in an artifact or holds files of something else."""
    from ttrain.engine.launch import WORK

    is_free = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    is_of_artifact = any((above / MANIFEST).exists() for above in (out, *out.parents))
    if is_of_artifact or not (is_free or (out / WORK).is_dir()):
        raise UsageError(
            f"--out is {out}, which holds other files; name an empty directory, or one of an "
            "earlier training"
        )


def prepare_to_train(settings: "Settings") -> None:
    """Set the variables that a stage's process has, before torch is loaded here."""
    from ttrain.engine.processes import environment_of

    for name, value in environment_of(settings).items():
        if name.startswith(READ_BY_C):
            os.environ.setdefault(name, value)


@command(app, "Examples:  ttrain doctor\n\nttrain doctor --stage sft sft.epochs=3 --json", "Train")
def doctor(
    settings_options: SettingsOptions,
    stage: Annotated[
        str | None,
        option("the training stage to check, such as sft; default: the first", metavar="STAGE"),
    ] = None,
    as_json: AsJson = False,
) -> Output:
    """Check before a long run that training works and fits, with these settings, data and machine.

    Missing tokenizer and shards are made first; of a few rows only with `reading.limit=2000`.
    """
    from ttrain import api
    from ttrain.doctor.inputs import missing_data
    from ttrain.engine.estimate import estimate
    from ttrain.engine.planner import alone
    from ttrain.flows.engine import RunOptions, run_pipeline

    began = time.monotonic()
    settings = settings_options.load().settings
    prepare_to_train(settings)
    plan = api.plan("full", settings)
    examined = stage or settings.trainings[0]
    for each in missing_data(examined, plan):
        run_pipeline(alone(each.stage.name, plan), console(stderr=as_json), RunOptions("none"))
        plan = api.plan("full", settings)
    from ttrain.doctor.run import examine  # loads torch, which now finds the variables

    warnings.simplefilter("ignore", FutureWarning)
    findings = {}
    for name, finding in examine(examined, plan):
        findings[name] = finding
        if not as_json:
            fix = "" if finding.ok else f"; fix: {finding.fix}"
            print_escaped(
                f"{'ok ' if finding.ok else 'BAD'} {name:{NAME_WIDTH}}{finding.measured}{fix}"
            )
    failures = [name for name, finding in findings.items() if not finding.ok]
    verdict = (
        f"{len(failures)} of {len(findings)} checks are not ok: {', '.join(failures)}"
        if failures
        else f"all {len(findings)} checks are ok"
    )
    last = f"{examined}: {verdict}, in {time.monotonic() - began:.0f} s"
    checks = [{"name": name, **finding.to_json()} for name, finding in findings.items()]
    estimated = estimate(plan)
    report = {"checks": checks, "estimate": estimated.to_json()}
    return Output(
        report, [*estimated.lines(), *estimated.remarks(), last], code=int(bool(failures))
    )
