"""Validate files: count what sharding would keep, skip and reject, with the same reader and parser, without encoding."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ttrain.config import Reading
from ttrain.data import blocks, chat_shapes, records
from ttrain.data.assembly import DUPLICATE, is_first
from ttrain.data.blocks import QUARANTINED_ROWS, Block, BlockRecipe
from ttrain.data.records import FIRST_REJECTED, Tally
from ttrain.data.report import Report, count_letters
from ttrain.data.sharding import Pool
from ttrain.errors import DataError, UsageError

LOOKED_AT = 100  # good rows whose keys decide the kind
BLOCK_BYTES = 8 << 20  # what one worker takes at a time


def kind_of(location: str, max_line_bytes: int) -> str | None:
    """ "chats" or "documents", by the keys of most of the first good rows; None if there is no good row.

    Raises DataError for a file that cannot be read.
    """
    rows = itertools.islice(records.records([location], Tally(), max_line_bytes), LOOKED_AT)
    first = [value for _, _, value in rows]
    chats = sum(map(chat_shapes.is_chat, first))
    return ("chats" if 2 * chats > len(first) else "documents") if first else None


def kind_of_all(locations: Sequence[str], max_line_bytes: int) -> str:
    """The kind of all files. Raises UsageError if they differ."""
    by_kind: dict[str, str] = {}
    for location in locations:
        kind = kind_of(location, max_line_bytes)
        if kind:
            by_kind.setdefault(kind, location)
    if len(by_kind) > 1:
        raise UsageError(
            f"{by_kind['chats']} holds chats but {by_kind['documents']} documents; shard them apart, or set --kind"
        )
    return next(iter(by_kind), "documents")


def validate(
    locations: Sequence[str],
    reading: Reading,
    *,
    pool: Pool,
    kind: str | None = None,
    measured: bool = False,
    quarantine: Callable[[dict[str, Any]], object] | None = None,
    progress: Callable[[int], None] = lambda size: None,
) -> list[Report]:
    """A report on each file; a row that equals an earlier one in any file is skipped as "duplicate".

    `kind` None: by the keys of each file's rows. `measured`: with lengths and scripts. `quarantine` receives the bad rows,
    `progress` the bytes read so far. Memory use is some blocks, and 16 bytes a row (56 for a moment at the end).
    """
    reports = {location: Report(location, measured=measured) for location in locations}
    tasks = _tasks(reports.values(), kind, reading, QUARANTINED_ROWS if quarantine else FIRST_REJECTED)
    with contextlib.closing(pool.map(examine, tasks)) as results:
        for block in results:
            reports[block.file].add(block, quarantine)
            progress(sum(report.bytes for report in reports.values()))
    for report in reports.values():
        report.check(reading.rejected_fraction, reading.text_field)
    _mark_duplicates(list(reports.values()), deduplicate=reading.deduplicate)
    return list(reports.values())


def examine(block: Block, recipe: BlockRecipe, listed: int, measured: bool) -> Report:
    """The report on a block, with the first `listed` bad rows."""
    report = Report(block.location, recipe.kind, measured)
    rejected, hashes, texts = report.rejected, list[bytes](), list[str]()
    tally = Tally(quarantine=lambda row: rejected.append(row) if len(rejected) < listed else None)
    data = b""
    try:
        data = blocks.read(block, recipe.max_line_bytes)
        for record in blocks.records(data, block, recipe, tally):
            hashes.append(records.content_hash(record))
            if measured:
                texts.append(blocks.text_of(record))
    except DataError as error:
        report.error = str(error)
    except OSError as error:
        report.error = f"cannot read {block.location}: {error.strerror}"
    tally.quarantine, tally.first_rejected = None, []
    report.tally = tally
    report.keys.append(np.frombuffer(b"".join(hashes), ">u8").astype(np.uint64).reshape(-1, 2))
    report.sizes.append(np.array([len(text.encode("utf-8")) for text in texts], np.int64))
    report.letters = count_letters(texts)
    report.bytes, report.lines = len(data), data.count(b"\n") + (data[-1:] not in (b"", b"\n"))
    return report


def _tasks(
    reports: Iterable[Report], kind: str | None, reading: Reading, listed: int
) -> Iterator[tuple[Block, BlockRecipe, int, bool]]:
    """The blocks of every file. An error in a file ends that file only."""
    limit = reading.max_line_bytes
    for number, report in enumerate(reports):
        try:
            report.kind = kind or kind_of(report.file, limit) or "documents"
            recipe = BlockRecipe(
                report.kind, reading.text_field, 0.0, limit, tokenizer="", tokenizer_digest="", template="", code=""
            )
            for block in blocks.cut(report.file, number, BLOCK_BYTES, recipe):
                yield block, recipe, listed, report.measured
        except DataError as error:
            report.error = str(error)


def _mark_duplicates(reports: Sequence[Report], *, deduplicate: bool) -> None:
    table = np.concatenate([np.zeros((0, 2), np.uint64), *(keys for report in reports for keys in report.keys)])
    repeated = ~is_first(table)
    start = 0
    for report in reports:
        end = start + sum(map(len, report.keys))
        report.duplicates = int(repeated[start:end].sum())
        report.keys.clear()
        if deduplicate:
            report.tally.leave_out(DUPLICATE, report.duplicates)
        start = end
