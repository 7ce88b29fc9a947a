"""`ttrain gate`: a router over several finished models, which knows for a text which of them has the least loss."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from ttrain.cli.options import AsJson, Files, task_settings
from ttrain.core.terminal import console, escaped, print_json, table

gate_app = typer.Typer(
    no_args_is_help=True,
    help="Train a router over several finished models, and look at it.",
    epilog="Example:  ttrain gate train --experts sft,lora --out gate",
)
Directory = Annotated[Path, typer.Argument(help="what --out named", metavar="GATE", show_default=False)]


@gate_app.command(
    "train",
    epilog="Examples:  ttrain gate train --experts sft,lora --out gate\n\n"
    "ttrain gate train --experts poems,./code-adapter,models:/mine-sft@champion --data mixed.jsonl --out gate hidden=128",
)
def gate_train(
    experts: Annotated[
        list[str],
        typer.Option(
            help="models or adapters, as of `ttrain chat`, between commas: run, stage, name@alias, directory",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="directory of the gate", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="settings of the gate, or runtime.*, as key=value", metavar="[KEY=VALUE]...", show_default=False
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="records, as of `ttrain data shard`; without it, those held out from the experts' own data"),
    ] = None,
    config: Files = None,
    allow: Annotated[list[str] | None, typer.Option(help="a setting that may differ from the checkpoint's")] = None,
    as_json: AsJson = False,
) -> None:
    """Score the experts on records and train a router on which has the least loss; the experts stay as they are.

    The same command continues what was stopped.
    """
    from ttrain.cli import gate_training
    from ttrain.config import as_tuple
    from ttrain.core.standard_streams import outlast_output
    from ttrain.pipeline.progress_display import Display
    from ttrain.reports import summary as report

    outlast_output()
    files = [name for option in data or () for name in cast("tuple[str, ...]", as_tuple(option))]
    display = Display(console(stderr=as_json))
    try:
        summary = gate_training.train(experts, files, task_settings(overrides, config), out, allow or (), display)
    finally:
        display.close()
    if as_json:
        print_json(summary)
        return
    _print_experts([expert["reference"] for expert in summary["experts"]], summary["routing"])
    _print_figures(summary["routing"])
    took = report.seconds(summary["train_seconds"])
    print(f"next:\n  talk through it: ttrain chat --gate {out}\n  ask it: ttrain gate route {out} 'a text'")
    print("it was finished already; nothing was trained" if summary["was_finished"] else f"trained in {took}")


@gate_app.command("show", epilog="Example:  ttrain gate show gate")
def gate_show(directory: Directory, as_json: AsJson = False) -> None:
    """Show the experts, whether each is still the one that the gate knows, and how well the gate routes."""
    from ttrain.inference import gate_files as files

    gate = files.read(directory)
    changes = [files.change(expert) for expert in gate.experts]
    if as_json:
        experts = [{**expert.model_dump(), "change": change} for expert, change in zip(gate.experts, changes, strict=True)]
        print_json({"path": str(directory.absolute()), "experts": experts, "settings": gate.settings.model_dump(mode="json"),
                    "routing": gate.figures})  # fmt: skip
        return
    rows = [
        (number, expert.reference, files.digest(expert), expert.adapter or expert.model, change or "as it was")
        for number, (expert, change) in enumerate(zip(gate.experts, changes, strict=True))
    ]
    table(("expert", "named", "weights", "lies in", "state"), rows)
    _print_experts([expert.reference for expert in gate.experts], gate.figures)
    _print_figures(gate.figures)


@gate_app.command(
    "route",
    epilog="Examples:  ttrain gate route gate 'What is a tuple?'\n\ncat questions.txt | ttrain gate route gate - --json",
)
def gate_route(
    directory: Directory,
    text: Annotated[str, typer.Argument(help="the text; -: each line of standard input is one", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Say which expert a text goes to, and with which probability."""
    from ttrain.inference.gate_router import OpenedGate

    gate = OpenedGate(directory)
    texts = [line.rstrip("\n") for line in sys.stdin] if text == "-" else [text]
    routed = [(one, *gate.route(one)) for one in texts]
    names = [expert.reference for expert in gate.experts]
    if as_json:
        print_json([
            {"text": one, "expert": number, "reference": names[number], "probabilities": probabilities}
            for one, number, probabilities in routed
        ])  # fmt: skip
        return
    for one, number, probabilities in routed:
        print(f"{escaped(names[number])}  {probabilities[number]:.0%}  {escaped(one)}")


def _print_experts(names: list[str], figures: Mapping[str, Any]) -> None:
    rows = [
        (name, f"{expert['loss']:.4f}", f"{expert['best_share']:.1%}", f"{expert['routed_share']:.1%}")
        for name, expert in zip(names, figures["experts"], strict=True)
    ]
    table(("expert", figures["unit"], "best at", "routed to"), rows)


def _print_figures(figures: Mapping[str, Any]) -> None:
    gain = "" if figures["gain"] is None else f"{figures['gain']:.1%} of what the best choices would gain"
    rows = [
        ("held-out records", f"{figures['records']:,}", ""),
        (
            "routed to the best expert",
            f"{figures['accuracy']:.1%}",
            f"always the commonest: {figures['majority_accuracy']:.1%}",
        ),
        (f"{figures['unit']}, routed", f"{figures['loss_routed']:.4f}", gain),
        ("  always the one best expert", f"{figures['loss_best_single']:.4f}", ""),
        ("  each by its best expert", f"{figures['loss_oracle']:.4f}", ""),
    ]
    table(("what", "value", ""), rows)
    if figures["accuracy"] <= figures["majority_accuracy"]:
        print(
            "no more records reach their best expert than if all went to the commonest: this gate is not worth its experts"
        )
