"""`ttrain data contamination`: what sets of shards have in common with items of evaluations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ttrain.data import contamination, inspect
from ttrain.data.contamination import Against, Item, Rule
from ttrain.data.sharding import Pool
from ttrain.data.shards import ShardSet
from ttrain.errors import UsageError
from ttrain.pipeline.input_files import evaluation_files
from ttrain.store.artifacts import Store


def of_directories(
    directories: Sequence[Path],
    named: tuple[str, ...],
    rule: Rule,
    *,
    tokenizer: Path | None,
    store: Store,
    pool: Pool,
    progress: Callable[[int], None],
) -> dict[str, Any]:
    """The report of all training shards there. `named`: suites or files of items; none: what is held out there.

    `progress` is told how many shards are done. Raises UsageError where there are no shards or no items.
    """
    parts = [part for directory in directories for part in _trained(directory)]
    against = (
        contamination.against(evaluation_files(named, "--items"), rule, remove=False) if named else _heldout(parts, rule)
    )
    tasks, places = [], []
    for part in parts:
        encoder = inspect.encoder_of(part, tokenizer, store)
        first = 0
        shards = ShardSet(part, encoder.digest)
        shards.verify()
        for shard in shards.index["shards"]:
            tasks.append((str(part / shard["file"]), str(encoder.directory), against.texts, rule))
            places.append(({"shards": str(part), "file": shard["file"]}, first))
            first += shard["rows"]
    found = []
    with contextlib.closing(pool.map(contamination.scan, iter(tasks))) as results:
        for number, ((where, first), scanned) in enumerate(zip(places, results, strict=True), 1):
            numbered = [place._replace(record=first + place.record) for place in scanned.places]
            found.append((where, scanned._replace(places=numbered)))  # as `ttrain data inspect --records` numbers them
            progress(number)
    return contamination.report(against, found)


def table(report: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(header, rows) of the tasks."""
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


def _trained(directory: Path) -> list[Path]:
    """The sets of shards that a model learns from."""
    return [part for name, part in inspect.parts_of(directory).items() if name != "heldout"]


def _heldout(parts: Sequence[Path], rule: Rule) -> Against:
    """The records that were held out beside these shards, as items. Raises UsageError where there are none."""
    items: list[Item] = []
    for part in parts:
        heldout = part.parent / "heldout"
        if inspect.holds_shards(heldout):
            for shard in ShardSet(heldout).index["shards"]:
                items += contamination.read_items(str(heldout / shard["records"]), "heldout")[0]
    if not items:
        raise UsageError("nothing was held out beside these shards; name what to look for with --items")
    return Against(tuple(items), rule, remove=False, left_out={})
