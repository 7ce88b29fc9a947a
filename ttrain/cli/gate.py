"""The `ttrain gate` commands: a router that predicts which model has the least loss on a text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, cast

from ttrain.cli.options import (
    AsJson,
    Files,
    Output,
    Table,
    argument,
    command,
    command_group,
    option,
    task_settings,
)
from ttrain.cli.train import check_output
from ttrain.core import redact
from ttrain.core.files import JsonObject
from ttrain.core.terminal import console, outlast_output
from ttrain.core.text import counted
from ttrain.errors import UsageError
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import home
from ttrain.store.model_files import Reference

gate_app = command_group(
    "gate",
    "Use",
    help="Train a router over several finished models.",
    epilog="Example:  ttrain gate train --experts sft,lora --out gate",
)


@command(
    gate_app,
    "Examples:  ttrain gate train --experts sft,lora --out gate\n\n"
    "ttrain gate train --experts poems,./code-adapter,models:/mine-sft@champion --data "
    "mixed.jsonl --out gate hidden=128",
)
def gate_train(
    experts: Annotated[
        list[str],
        option(
            "models or adapters, as for `ttrain chat`, separated by commas: run, stage, "
            "name@alias, directory"
        ),
    ],
    out: Annotated[Path, option("directory of the gate")],
    overrides: Annotated[
        list[str] | None,
        argument("settings of the gate, or runtime.*, as key=value", metavar="KEY=VALUE"),
    ] = None,
    data: Annotated[
        list[str] | None,
        option(
            "records, as for `ttrain data check`; without it, those held out from the "
            "experts' own data"
        ),
    ] = None,
    config: Files = None,
    as_json: AsJson = False,
) -> Output:
    """Score the experts on records, and train a router to the one with the least loss.

    The same command continues a stopped scoring, and keeps the losses that it scored.
    """
    from ttrain.config import Gate, GateJob, as_tuple
    from ttrain.config.loading import settings_of_task
    from ttrain.data import existing, locations
    from ttrain.engine.display import Display
    from ttrain.engine.launch import run_alone, split_runtime
    from ttrain.inference import gate_files
    from ttrain.lineage.lookup import resolve_all
    from ttrain.tasks import GATE

    outlast_output()
    files = [name for option in data or () for name in cast("tuple[str, ...]", as_tuple(option))]
    names = [name.strip() for option in experts for name in option.split(",") if name.strip()]
    if len(names) < 2:
        raise UsageError(
            f"--experts names {', '.join(names) or 'none'}, but a gate picks one of at least two"
        )
    runtime, gate_overrides = split_runtime(task_settings(overrides, config))
    if runtime.devices > 1:
        raise UsageError(
            f"runtime.devices is {runtime.devices}, but a gate trains in one process; set "
            "runtime.devices=1"
        )
    settings = settings_of_task(Gate, gate_overrides)
    directory = out.absolute()
    check_output(directory)
    references = resolve_all(names)
    texts = locations.expand(files, "--data") if files else heldout_files(references)
    chosen = tuple(map(gate_files.expert_of, references))
    for expert in chosen:
        longest = existing.max_length(Path(expert.model) / existing.CONFIG)
        if longest is not None and settings.row_length > longest:
            raise UsageError(
                f"row_length is {settings.row_length} but the expert {expert.reference} takes "
                f"{longest} positions; "
                f"set row_length={longest} and stride={max(1, longest // 2)}"
            )
    job = GateJob(gate=settings, experts=chosen, data=tuple(texts)).model_dump(mode="json")
    why = f"{counted(len(references), 'expert')}, {counted(len(texts), 'file')}, in {directory}"
    with closing(Display(console(stderr=as_json))) as display:
        metrics = run_alone(GATE, job, runtime, directory, why, display)
    value = {
        "out": str(directory),
        "experts": job["experts"],
        "data": [redact.url(text) for text in texts],
        **metrics,
    }
    parts = routing_parts([expert.reference for expert in chosen], metrics["routing"])
    return Output(value, [*parts, f"talk through it: ttrain chat --gate {out}"])


def routing_parts(names: Sequence[str], metrics: JsonObject) -> list[str | Table]:
    """Each expert's loss and share, routing metrics, and a warning without a gain."""
    rows = [
        (
            name,
            f"{expert['loss']:.4f}",
            f"{expert['best_share']:.1%}",
            f"{expert['routed_share']:.1%}",
        )
        for name, expert in zip(names, metrics["experts"], strict=True)
    ]
    gain = (
        ""
        if metrics["gain"] is None
        else f"{metrics['gain']:.1%} of what the best choices would gain"
    )
    routing = [
        ("held-out records", f"{metrics['records']:,}", ""),
        (
            "routed to the best expert",
            f"{metrics['accuracy']:.1%}",
            f"always the most common: {metrics['majority_accuracy']:.1%}",
        ),
        ("bits per byte, routed", f"{metrics['loss_routed']:.4f}", gain),
        ("  always the one best expert", f"{metrics['loss_best_single']:.4f}", ""),
        ("  each by its best expert", f"{metrics['loss_oracle']:.4f}", ""),
    ]
    parts: list[str | Table] = [
        Table(("expert", "bits per byte", "best at", "routed to"), rows),
        Table(("metric", "value", ""), routing),
    ]
    if metrics["accuracy"] <= metrics["majority_accuracy"]:
        parts.append(
            "no more records reach their best expert than if all went to the most common "
            "one: no gain"
        )
    return parts


def heldout_files(experts: Sequence[Reference]) -> list[str]:
    """The records held out from each expert's training data. Raises UsageError if none."""
    store = ArtifactStore(home())
    files: dict[str, None] = {}
    for expert in experts:
        shards = store.input_of(expert.artifact, "shards")
        records = sorted((shards.path / "heldout").glob("*.jsonl")) if shards else []
        if not records:
            raise UsageError(
                f"{store.root} has no records held out from the data of {expert.text}; name "
                "files with --data"
            )
        files |= dict.fromkeys(map(str, records))
    return list(files)
