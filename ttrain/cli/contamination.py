"""`ttrain data contamination`: which items of evaluations stand in training shards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ttrain.cli.options import AsJson

SHOWN_ITEMS = 10


def add_contamination(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "contamination",
        epilog="Examples:  ttrain data contamination shards --items poems.jsonl\n\n"
        "ttrain data contamination $(ttrain artifacts path shards-pretrain) --items suite.yaml --json",
    )(contamination)


def contamination(
    shards: Annotated[list[Path], typer.Argument(help="shards, directories with train/ in them, or artifacts")],
    items: Annotated[
        list[str] | None, typer.Option(help="a suite, or JSONL with items; without it what is held out beside the shards")
    ] = None,
    overlap_bytes: Annotated[int, typer.Option(min=24, help="letters in UTF-8 from which on a part counts")] = 32,
    overlap_share: Annotated[float, typer.Option(min=0.01, max=1, help="of an item, that makes a document hold it")] = 0.5,
    tokenizer: Annotated[Path | None, typer.Option(help="its directory; without it, found by digest")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="processes; without it the cores")] = None,
    as_json: AsJson = False,
) -> None:
    """Look for the items of evaluations in training shards, whatever their case and punctuation.

    shards.decontaminate has the pipeline do it, and leaves such documents out.
    """
    from ttrain.cli import contamination_scan
    from ttrain.core.terminal import bar, escaped, print_json, table
    from ttrain.data.contamination import Rule
    from ttrain.data.worker_pools import Processes
    from ttrain.store.artifacts import Store
    from ttrain.store.layout import home

    rule = Rule(overlap_bytes, overlap_share)
    with Processes(workers or os.cpu_count() or 1) as pool, bar("searching", "shards") as progress:
        found = contamination_scan.of_directories(
            shards, tuple(items or ()), rule, tokenizer=tokenizer, store=Store(home()), pool=pool, progress=progress
        )
    if as_json:
        print_json(found)
        return
    table(*contamination_scan.table(found))
    shown = [
        (item["where"], f"{item['share']:.0%}", f"{place['file']} record {place['record']}", escaped(place["begins"][:40]))
        for item in found["items"][:SHOWN_ITEMS]
        for place in item["places"][:1]
    ]
    if shown:
        table(("item", "share", "stands in", "which begins"), shown)
    print(
        f"{found['documents']:,} training documents hold one; a part in common has at least {overlap_bytes} bytes of letters"
    )
