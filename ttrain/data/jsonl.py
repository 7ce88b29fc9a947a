"""JSON Lines in, records out; every bad line is counted, kept aside with `file:line` and reason, and never a traceback.

Only `\\n` ends a line (a carriage return before it is white space to JSON, and U+2028 is an ordinary character). Memory is
bounded by one line of `reading.max_line_bytes` and a piece of 1 MiB, whatever the file.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import orjson

from ttrain.core import redact
from ttrain.data.tools import kind_of
from ttrain.errors import DataError

KEYS_LOOKED_AT, KEYS_OF_A_ROW = 1000, 100
REASONS, OTHER_REASONS = 100, "other reasons"  # what is told apart, since a reason may name what differs in every row
FIRST_REJECTED = 5
EXCERPT_CHARACTERS = 200
TOO_LONG = "line longer than reading.max_line_bytes={}; raise it, or split the text"
NULS = "not valid JSON: NUL bytes alone, as a crash of the machine that wrote them leaves; write the line again"
NOT_UTF8 = "not valid UTF-8; write the row again as UTF-8, or convert the file with iconv"
Row = tuple[int, dict[str, Any]]


@dataclass
class Tally:
    """What became of the rows: rows = kept + skipped + rejected, each by a named rule."""

    rows: int = 0
    kept: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    keys_seen: Counter[str] = field(default_factory=Counter)
    first_rejected: list[str] = field(default_factory=list)
    quarantine: Callable[[dict[str, Any]], None] | None = None

    def reject(self, path: str, line: int, reason: str, raw: bytes = b"") -> None:
        """Count a bad row and pass it to the quarantine."""
        self._count(reason, 1)
        if len(self.first_rejected) < FIRST_REJECTED:
            self.first_rejected.append(f"{redact.url(path)}:{line}: {reason}")
        if self.quarantine:
            row: dict[str, Any] = {"file": redact.url(path), "line": line, "reason": reason}
            if raw:
                row["text"] = raw[: 4 * EXCERPT_CHARACTERS].decode("utf-8", "replace")[:EXCERPT_CHARACTERS]
            self.quarantine(row)

    def _count(self, reason: str, rows: int) -> None:
        self.rejected[reason if reason in self.rejected or len(self.rejected) < REASONS else OTHER_REASONS] += rows

    def see(self, row: dict[str, Any]) -> None:
        """Note the keys of one of the first rows."""
        if self.rows <= KEYS_LOOKED_AT:
            self.keys_seen.update(key[:40] for key in islice(row, KEYS_OF_A_ROW))

    def leave_out(self, rule: str, rows: int) -> None:
        """Move rows that were kept to those skipped by a rule."""
        if rows:
            self.kept -= rows
            self.skipped[rule] += rows

    def add(self, other: Tally) -> None:
        """Count another part's rows too."""
        self.rows, self.kept = self.rows + other.rows, self.kept + other.kept
        self.skipped.update(other.skipped)
        for reason, rows in other.rejected.items():
            self._count(reason, rows)
        self.keys_seen.update(other.keys_seen)
        self.first_rejected = (self.first_rejected + other.first_rejected)[:FIRST_REJECTED]

    def to_json(self) -> dict[str, Any]:
        """Counts for the manifest and the summary."""
        found = {"rows": self.rows, "kept": self.kept, "skipped": dict(self.skipped), "rejected": dict(self.rejected)}
        return {**found, "first_rejected": self.first_rejected} if self.first_rejected else found

    def check(self, setting: str, limit: float, wanted: str, prefix: str = "reading.") -> None:
        """Raise DataError where nothing was kept, or where more than the share `limit` of the rows is bad.

        `prefix` stands before the name of the setting that says `limit`.
        """
        seen = ", ".join(key for key, _ in self.keys_seen.most_common(8)) or "none"
        looked_for = f"ttrain looked for one JSON object a line, with {wanted}; keys seen: {seen}"
        bad = self.rejected.total()
        if bad > limit * self.rows:
            raise DataError(
                f"{setting}: {bad} of {self.rows} rows are bad, more than {prefix}rejected_fraction={limit}; "
                f"the first is {self.first_rejected[0]}. {looked_for}"
            )
        if not self.kept:
            skipped = "".join(f"; {count} skipped: {rule}" for rule, count in self.skipped.items())
            raise DataError(f"{setting}: no rows are left of {self.rows}{skipped}. {looked_for}")


def records(
    paths: Sequence[str], tally: Tally, max_line_bytes: int, text_field: str = "text"
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(path, line number from 1, JSON object) of every good line of every file; blank lines do not count as rows.

    The elements of a JSON array are lines, and a `.txt` file is one, with its text under `text_field`.
    Raises DataError for a file that is truncated, corrupt, unreadable, in another encoding or of another format.
    """
    from ttrain.data import parquet, streams

    for path in paths:
        numbered = (
            parquet.lines(path, 0, len(parquet.groups(path)))
            if streams.is_parquet(path)
            else lines(streams.json_lines(path, text_field), max_line_bytes)
        )
        for number, value in parsed(numbered, path, tally, max_line_bytes):
            yield path, number, value


def parsed(numbered: Iterable[tuple[int, bytes]], path: str, tally: Tally, max_line_bytes: int) -> Iterator[Row]:
    """(line number, JSON object) of the good lines."""
    loads = orjson.loads
    for number, line in numbered:
        if len(line) > max_line_bytes:
            tally.rows += 1
            tally.reject(path, number, TOO_LONG.format(max_line_bytes), line[:1000])
            continue
        try:
            value = loads(line)
        except orjson.JSONDecodeError as error:
            if not line.strip():
                continue
            tally.rows += 1
            tally.reject(path, number, _reason(line, str(error)), line)
            continue
        tally.rows += 1
        if not isinstance(value, dict):
            tally.reject(path, number, f"not a JSON object but {kind_of(value)}", line)
            continue
        tally.see(value)
        yield number, value


def lines(chunks: Iterable[bytes], max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line without its end). Of a line that is too long, the first max_line_bytes + 1 bytes, to tell so."""
    number, pending = 1, bytearray()
    for chunk in chunks:
        first, *rest = chunk.split(b"\n")
        pending += first[: max_line_bytes + 1 - len(pending)]
        if not rest:
            continue
        yield number, bytes(pending)
        number += 1
        last = rest.pop()
        for line in rest:
            yield number, line
            number += 1
        pending = bytearray(last)
    if pending:
        yield number, bytes(pending)


def _reason(line: bytes, error: str) -> str:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return NOT_UTF8
    if not line.strip(b"\0\r"):
        return NULS
    if line.startswith(BOM_UTF8):
        return "not valid JSON: a byte order mark, which may stand at the start of a file only"
    return f"not valid JSON: {error.split(': line')[0]}"
