"""Validate files: count what sharding would keep, skip and reject, with the same reader and parser, without encoding."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ttrain.config import Reading
from ttrain.core import redact
from ttrain.data import blocks, chat_shapes, records
from ttrain.data.assembly import DUPLICATE, is_first
from ttrain.data.blocks import QUARANTINED_ROWS, Block, BlockRecipe
from ttrain.data.records import FIRST_REJECTED, Tally
from ttrain.data.sharding import Pool
from ttrain.errors import DataError, UsageError

LOOKED_AT = 100  # good rows whose keys decide the kind
KEYS_SHOWN = 20
BLOCK_BYTES = 8 << 20  # what one worker takes at a time
Keys = npt.NDArray[np.uint64]


@dataclass
class Report:
    """Counts of one file's rows. `error` says why the file cannot be used; the counts are then those up to the error."""

    file: str
    kind: str = "documents"
    tally: Tally = field(default_factory=Tally)
    duplicates: int = 0
    error: str | None = None
    keys: list[Keys] = field(default_factory=list)  # 16 bytes of each kept row, in blocks of shape [rows, 2]

    @property
    def shown_file(self) -> str:
        """The file without the secrets of its URL."""
        return redact.url(self.file)

    def to_json(self) -> dict[str, Any]:
        """file, rows, kept, skipped, rejected, with rows = kept + skipped + rejected; and further fields."""
        figures = {"file": self.shown_file, **self.tally.to_json(), "duplicates": self.duplicates, "kind": self.kind}
        figures["keys_seen"] = dict(self.tally.keys_seen.most_common(KEYS_SHOWN))
        return {**figures, "error": self.error} if self.error else figures


@dataclass
class ExaminedBlock:
    """Counts, keys and rejected rows of one block."""

    file: int
    bytes: int
    lines: int
    tally: Tally
    keys: Keys
    rejected: list[dict[str, Any]]  # as many as were requested
    error: str | None = None


Examine = Callable[[Block, BlockRecipe, int], ExaminedBlock]


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


def examine(
    block: Block, recipe: BlockRecipe, listed: int, look: Callable[[records.Record], None] = lambda record: None
) -> ExaminedBlock:
    """Count the rows of a block, pass each good one to `look`, and return the first `listed` bad ones."""
    rejected: list[dict[str, Any]] = []
    tally = Tally(quarantine=lambda row: rejected.append(row) if len(rejected) < listed else None)
    hashes: list[bytes] = []
    error, data = None, b""
    try:
        data = blocks.read(block, recipe.max_line_bytes)
        for record in blocks.records(data, block, recipe, tally):
            hashes.append(records.content_hash(record))
            look(record)
    except DataError as wrong:
        error = str(wrong)
    except OSError as wrong:
        error = f"cannot read {block.location}: {wrong.strerror}"
    tally.quarantine, tally.first_rejected = None, []
    keys = np.frombuffer(b"".join(hashes), ">u8").astype(np.uint64).reshape(-1, 2)
    lines = data.count(b"\n") + (data[-1:] not in (b"", b"\n"))
    return ExaminedBlock(block.file, len(data), lines, tally, keys, rejected, error)


def validate(
    locations: Sequence[str],
    reading: Reading,
    *,
    pool: Pool,
    kind: str | None = None,
    quarantine: Callable[[dict[str, Any]], object] | None = None,
    progress: Callable[[int], None] = lambda size: None,
    examine: Examine = examine,
    each: Callable[[Report, ExaminedBlock], None] = lambda report, examined: None,
) -> list[Report]:
    """A report on each file; a row that equals an earlier one in any file is skipped as "duplicate".

    `kind` None: by the keys of each file's rows. `quarantine` receives the bad rows, `progress` the bytes read so far.
    Memory use is some blocks, and 16 bytes a row (56 for a moment at the end).
    """
    reports = [_start_report(location, kind, reading) for location in locations]
    listed = QUARANTINED_ROWS if quarantine else FIRST_REJECTED
    lines: Counter[int] = Counter()
    size = 0
    with contextlib.closing(pool.map(examine, _tasks(reports, reading, listed))) as results:
        for examined in results:
            report = reports[examined.file]
            _add_block(report, examined, lines[examined.file], quarantine)
            lines[examined.file] += examined.lines
            each(report, examined)
            size += examined.bytes
            progress(size)
    for report in reports:
        report.error = report.error or _file_error(report, reading)
    _mark_duplicates(reports, deduplicate=reading.deduplicate)
    return reports


def _start_report(location: str, kind: str | None, reading: Reading) -> Report:
    report = Report(location)
    try:
        report.kind = kind or kind_of(location, reading.max_line_bytes) or "documents"
    except DataError as error:
        report.error = str(error)
    return report


def _tasks(reports: Sequence[Report], reading: Reading, listed: int) -> Iterator[tuple[Block, BlockRecipe, int]]:
    """The blocks of every file. An error in a file ends that file only."""
    limit = reading.max_line_bytes
    for number, report in enumerate(reports):
        if report.error:
            continue
        recipe = BlockRecipe(
            report.kind, reading.text_field, 0.0, limit, tokenizer="", tokenizer_digest="", template="", code=""
        )
        try:
            for block in blocks.cut(report.file, number, BLOCK_BYTES, recipe):
                yield block, recipe, listed
        except DataError as error:
            report.error = str(error)


def _add_block(
    report: Report, examined: ExaminedBlock, lines_before: int, quarantine: Callable[[dict[str, Any]], object] | None
) -> None:
    report.tally.add(examined.tally)
    report.keys.append(examined.keys)
    report.error = report.error or examined.error
    for row in examined.rejected:
        row["line"] += lines_before
        if len(report.tally.first_rejected) < FIRST_REJECTED:
            report.tally.first_rejected.append(f"{report.shown_file}:{row['line']}: {row['reason']}")
        if quarantine:
            quarantine(row)
    unlisted_rows = examined.tally.rejected.total() - len(examined.rejected)
    if quarantine and unlisted_rows:
        quarantine(
            {"file": report.shown_file, "reason": f"{unlisted_rows} more bad rows of this block are counted but not listed"}
        )


def _file_error(report: Report, reading: Reading) -> str | None:
    """Why the file as a whole cannot be used."""
    if not report.tally.rows:
        return f"{report.shown_file}: no rows: it is empty, or holds nothing but blank lines"
    expected_fields = chat_shapes.CHAT_FIELDS if report.kind == "chats" else records.document_fields(reading.text_field)
    try:
        report.tally.check(report.shown_file, reading.rejected_fraction, expected_fields)
    except DataError as error:
        return str(error)
    return None


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
