"""`ttrain train`: one training alone, a stage of the pipeline or a task of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ttrain.cli.options import AsJson, Extend, Files, Force, Overrides, Profiles, load_settings, plan_of, task_settings
from ttrain.core.terminal import console, print_json, table

TASK_HELP = "name of an installed task, such as regression, or module:Class"
FIGURES = ("steps", "epochs", "loss", "validation_loss", "rows", "parameters", "precision", "device", "train_seconds")


class _TrainGroup(TyperGroup):
    """`--task NAME ...` is `task NAME ...`, wherever it stands: a group would take a setting after it for a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        names = [number for number, word in enumerate(args) if word == "--task" or word.startswith("--task=")]
        if names and args[0] not in self.commands:
            at = names[0]
            _, equals, name = args[at].partition("=")
            rest = [*args[:at], *args[at + 1 :]] if equals else [*args[:at], *args[at + 2 :]]
            args = ["task", *([name] if equals else args[at + 1 : at + 2]), *rest]
        return super().parse_args(ctx, args)


train_app = typer.Typer(
    cls=_TrainGroup,
    no_args_is_help=True,
    help="Train one stage alone, or a task of your own.",
    epilog="Examples:  ttrain train sft sft.optim.lr=2e-4\n\nttrain train --task regression hidden=128 --out regression",
)


@train_app.callback()
def train_options(
    task: Annotated[str | None, typer.Option("--task", help=f"{TASK_HELP}; the same as `train task`")] = None,
) -> None:
    """Stated for the help; the group itself reads it."""


@train_app.command("pretrain", epilog="Example:  ttrain train pretrain pretrain.tokens=2_000_000 --profile small")
def train_pretrain(
    overrides: Overrides = None, config: Files = None, profile: Profiles = None, extend: Extend = False,
    force: Force = False, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Train a new model, or that of pretrain.start_from, on documents. Needs tokenizer and shards of the documents."""
    run_stage("pretrain", overrides, config, profile, extend=extend, force=force, as_json=as_json)


@train_app.command("sft", epilog="Example:  ttrain train sft sft.optim.lr=2e-4 sft.epochs=2")
def train_sft(
    overrides: Overrides = None, config: Files = None, profile: Profiles = None, extend: Extend = False,
    force: Force = False, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Fine-tune the pretrained model, or that of sft.start_from, on chats. Needs that model and the shards of the chats."""
    run_stage("sft", overrides, config, profile, extend=extend, force=force, as_json=as_json)


@train_app.command("lora", epilog="Example:  ttrain train lora lora.rank=8 -c mine.yaml")
def train_lora(
    overrides: Overrides = None, config: Files = None, profile: Profiles = None, extend: Extend = False,
    force: Force = False, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Train an adapter for the fine-tuned model, or for that of lora.start_from, on chats of a domain. Needs that model and
    the shards of the domain."""
    run_stage("lora", overrides, config, profile, extend=extend, force=force, as_json=as_json)


@train_app.command(
    "task",
    epilog="Examples:  ttrain train --task regression\n\n"
    "ttrain train --task mytask:MyTask hidden=128 optim.lr=1e-3 runtime.threads=1 --out mine\n\n"
    "ttrain train --task mytask:MyTask hidden=128 optim.lr=5e-4 --allow optim.lr --out mine",
)
def train_task(
    name: Annotated[str | None, typer.Argument(help=TASK_HELP, show_default=False)] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="settings of the task, or runtime.*, as key=value", metavar="[KEY=VALUE]...", show_default=False
        ),
    ] = None,
    config: Files = None,
    out: Annotated[Path | None, typer.Option(help="where model, checkpoints and curves go; else under TTRAIN_HOME")] = None,
    allow: Annotated[list[str] | None, typer.Option(help="a setting that may differ from the checkpoint's")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a task of your own (docs/tasks.md); the same command continues what was stopped."""
    from ttrain.cli import train_task as from_task
    from ttrain.core.standard_streams import outlast_output
    from ttrain.errors import UsageError
    from ttrain.pipeline.progress_display import Display
    from ttrain.reports import summary as report
    from ttrain.train import task_registry

    outlast_output()
    if name is None or "=" in name:
        raise UsageError(f"--task names no task; the tasks are {task_registry.listed()}")
    given = task_settings(overrides, config)
    display = Display(console(stderr=as_json))
    try:
        summary = from_task.train(name, given, out, allow or (), display)
    finally:
        display.close()
    if as_json:
        print_json(summary)
        return
    _print_summary(summary, report.seconds(summary["train_seconds"]))


def run_stage(
    stage: str,
    overrides: list[str] | None,
    config: list[Path] | None,
    profile: list[str] | None,
    *,
    extend: bool,
    force: bool,
    as_json: bool = False,
) -> None:
    """Run one stage alone, without Prefect; its inputs are those that the present plan names."""
    from flows.engine import run_one_stage
    from ttrain.core.standard_streams import outlast_output
    from ttrain.store.layout import usable_home

    outlast_output()
    usable_home()
    loaded = load_settings(overrides, config, profile)
    store, stages = plan_of("full", loaded, extend=extend)
    screen = console(stderr=as_json)
    artifact, state = run_one_stage(stage, loaded.settings, store, stages, screen, force=force, extend=extend)
    if as_json:
        path, key = str(artifact.path), artifact.key
        print_json({"stage": stage, "state": state, "key": key, "path": path, "result": artifact.result})


def _print_summary(summary: dict[str, Any], took: str) -> None:
    """What became of a task, and what to do next."""
    from ttrain.cli.train_task import LOG, METRICS, WEIGHTS

    out = Path(summary["out"])
    table(("what", "value"), [(key, _shown(summary[key])) for key in FIGURES if summary.get(key) is not None])
    print("next:")
    print(f"  the weights, by PyTorch names: {out / WEIGHTS}")
    print(f"  curves {out / METRICS}, log {out / LOG}")
    print(f"  change one thing, elsewhere: ttrain train --task {summary['task']} KEY=VALUE --out ANOTHER")
    if summary["was_finished"]:
        print(f"it was finished already, at step {summary['steps']}; nothing was trained")
    else:
        print(f"done in {took}")


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
