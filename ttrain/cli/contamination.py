"""The `ttrain data contamination` command: find evaluation items in training shards."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttrain.cli.options import AsJson
from ttrain.core.terminal import bar, escaped, print_json, table
from ttrain.errors import UsageError
from ttrain.store.layout import home

if TYPE_CHECKING:
    from ttrain.data.contamination import EvaluationItem, OverlapCheck, OverlapRule
    from ttrain.data.sharding import Pool
    from ttrain.store.artifacts import ArtifactStore


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
        list[str] | None,
        typer.Option(help="a suite, or JSONL with items; without it the records held out beside the shards"),
    ] = None,
    overlap_bytes: Annotated[
        int, typer.Option(min=24, help="shortest common part that counts, in bytes of UTF-8 letters")
    ] = 32,
    overlap_share: Annotated[
        float, typer.Option(min=0.01, max=1, help="share of an item that a document must contain to count")
    ] = 0.5,
    tokenizer: Annotated[Path | None, typer.Option(help="its directory; without it, found by digest")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="processes; without it the cores")] = None,
    as_json: AsJson = False,
) -> None:
    """Look for the items of evaluations in training shards, whatever their case and punctuation.

    With shards.decontaminate, the pipeline does this and leaves such documents out.
    """
    from ttrain.data.contamination import OverlapRule
    from ttrain.data.sharding import Processes
    from ttrain.store.artifacts import ArtifactStore

    rule = OverlapRule(overlap_bytes, overlap_share)
    with Processes(workers or os.cpu_count() or 1) as pool, bar("searching", "shards") as progress:
        report = scan_directories(
            shards, tuple(items or ()), rule, tokenizer=tokenizer, store=ArtifactStore(home()), pool=pool, progress=progress
        )
    if as_json:
        print_json(report)
        return
    table(*report_table(report))
    shown = [
        (
            item["where"],
            f"{item['share']:.0%}",
            f"{occurrence['file']} record {occurrence['record']}",
            escaped(occurrence["begins"][:40]),
        )
        for item in report["items"][:SHOWN_ITEMS]
        for occurrence in item["places"][:1]
    ]
    if shown:
        table(("item", "share", "found in", "which begins"), shown)
    documents = report["documents"]
    print(f"{documents:,} training documents contain an item; a common part has at least {overlap_bytes} bytes of letters")


def scan_directories(
    directories: Sequence[Path],
    item_sources: tuple[str, ...],
    rule: OverlapRule,
    *,
    tokenizer: Path | None,
    store: ArtifactStore,
    pool: Pool,
    progress: Callable[[int], None],
) -> dict[str, Any]:
    """Scan all training shards of the directories. `item_sources`: suites or files of items; none: the held-out records.

    `progress` is called with the number of finished shards. Raises UsageError where there are no shards or no items.
    """
    from ttrain.data import contamination, inspect
    from ttrain.data.shards import ShardSet
    from ttrain.pipeline.input_files import evaluation_files

    shard_directories = [
        shard_directory for directory in directories for shard_directory in _training_directories(directory)
    ]
    against = (
        contamination.overlap_check(evaluation_files(item_sources, "--items"), rule, remove=False)
        if item_sources
        else _heldout(shard_directories, rule)
    )
    tasks, places = [], []
    for shard_directory in shard_directories:
        encoder = inspect.encoder_of(shard_directory, tokenizer, store)
        first = 0
        shards = ShardSet(shard_directory, encoder.digest)
        shards.verify()
        for shard in shards.index["shards"]:
            tasks.append((str(shard_directory / shard["file"]), str(encoder.directory), against.texts, rule))
            places.append(({"shards": str(shard_directory), "file": shard["file"]}, first))
            first += shard["rows"]
    scans = []
    with contextlib.closing(pool.map(contamination.scan, iter(tasks))) as results:
        for number, ((location, first), scanned) in enumerate(zip(places, results, strict=True), 1):
            numbered = [occurrence._replace(record=first + occurrence.record) for occurrence in scanned.matches]
            scans.append((location, scanned._replace(matches=numbered)))  # as `ttrain data inspect --records` numbers them
            progress(number)
    return contamination.report(against, scans)


def report_table(report: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(header, rows) of the table of tasks."""
    header = ("task", "items", "in training", "share", "touched", "too short", "not read")
    return header, [
        (
            name,
            *(f"{task[figure]:,}" for figure in ("items", "overlapping")),
            f"{task['share']:.1%}",
            *(f"{task[figure]:,}" for figure in ("touched", "too_short", "left_out")),
        )
        for name, task in report["tasks"].items()
    ]


def _training_directories(directory: Path) -> list[Path]:
    """The sets of shards that a model is trained on."""
    from ttrain.data import inspect

    return [shard_directory for name, shard_directory in inspect.parts_of(directory).items() if name != "heldout"]


def _heldout(shard_directories: Sequence[Path], rule: OverlapRule) -> OverlapCheck:
    """The records that were held out beside these shards, as items. Raises UsageError where there are none."""
    from ttrain.data import contamination, inspect
    from ttrain.data.contamination import OverlapCheck
    from ttrain.data.shards import ShardSet

    items: list[EvaluationItem] = []
    for shard_directory in shard_directories:
        heldout = shard_directory.parent / "heldout"
        if inspect.holds_shards(heldout):
            for shard in ShardSet(heldout).index["shards"]:
                items += contamination.read_items(str(heldout / shard["records"]), "heldout")[0]
    if not items:
        raise UsageError("no records were held out beside these shards; name what to look for with --items")
    return OverlapCheck(tuple(items), rule, remove=False, left_out={})
