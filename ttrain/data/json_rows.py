"""Read the rows of files, which are JSON objects, and count them by outcome."""

import contextlib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import orjson

from ttrain.core import redact
from ttrain.core.files import JsonDict
from ttrain.data import streams, tools
from ttrain.errors import DataError

MAX_LINE_BYTES = 32 << 20  # of a line, where no setting says it
TEXT = "text"  # the default of reading.text_field, with which the other keys are tried too
TURN_KEYS = frozenset({"messages", "conversations", "prompt", "chosen"})
TOO_DEEP = "the functions or the arguments of a call are nested too deeply"
KEYS_LOOKED_AT, KEYS_OF_A_ROW, KEY_CHARACTERS = 1000, 100, 40
# Distinct reasons and keys at most, since one may quote a value of its row.
MOST_NAMES, OTHERS = 100, "others"
FIRST_REJECTED = 5
COUNTS = (
    "rows",
    "kept",
    "skipped",
    "rejected",
    "keys_seen",
    "unread_keys",
    "lines",
    "with_reasoning",
)
EXCERPT_CHARACTERS = 200
TOO_LONG = "line longer than reading.max_line_bytes={}; raise it, or split the text"
NULS = (
    "not valid JSON: only NUL bytes, as a crash of the writing machine leaves; write the line again"
)
NOT_UTF8 = "not valid UTF-8; write the row again as UTF-8, or convert the file with iconv"

Row = tuple[str, int, JsonDict]  # path, number of the line, JSON object


@dataclass
class Tally:
    """Counts of rows: rows = kept + skipped (by rule) + rejected (by reason).

    keys_seen         of the first KEYS_LOOKED_AT rows, cut to KEY_CHARACTERS
    lines             rows and blank lines
    bad_rows          by location
    unread_keys       kept rows with text of an answer under a key that is not read, by key
    with_reasoning    kept rows with the reasoning of an answer
    """

    rows: int = 0
    kept: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    keys_seen: Counter[str] = field(default_factory=Counter)
    first_rejected: list[str] = field(default_factory=list)
    quarantine: Callable[[JsonDict], object] | None = None
    lines: int = 0
    bad_rows: Counter[str] = field(default_factory=Counter)
    unread_keys: Counter[str] = field(default_factory=Counter)
    with_reasoning: int = 0

    def reject(self, path: str, line: int, reason: str, row: bytes | JsonDict = b"") -> None:
        """Count a bad row and pass it to the quarantine."""
        count(self.rejected, {reason: 1})
        bad_row: JsonDict = {"file": redact.url(path), "line": line, "reason": reason}
        with contextlib.suppress(TypeError):  # a number beyond 64 bits, or nested too deeply
            raw = row if isinstance(row, bytes) else orjson.dumps(row)
            text = raw[: 4 * EXCERPT_CHARACTERS].decode("utf-8", "replace")
            bad_row["text"] = text[:EXCERPT_CHARACTERS]
        self.list_rejected(path, bad_row)

    def list_rejected(self, path: str, bad_row: JsonDict) -> None:
        """Keep the place of a bad row that is counted already, and quarantine it."""
        self.bad_rows[path] += 1
        if len(self.first_rejected) < FIRST_REJECTED:
            self.first_rejected.append("{file}:{line}: {reason}".format(**bad_row))
        if self.quarantine:
            self.quarantine(bad_row)

    def leave_out(self, rule: str, rows: int) -> None:
        """Count kept rows as skipped by a rule."""
        if rows:
            self.kept -= rows
            self.skipped[rule] += rows

    def add(self, tally: "Tally") -> None:
        """Add the counts of another tally, and its bad rows."""
        self.add_counts(tally.counts())
        self.bad_rows.update(tally.bad_rows)
        self.first_rejected = (self.first_rejected + tally.first_rejected)[:FIRST_REJECTED]

    def add_counts(self, counts: JsonDict) -> None:
        """Add what `counts` returned."""
        for name, value in counts.items():
            if isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)
            else:
                count(getattr(self, name), value)

    def counts(self) -> JsonDict:
        """All but the places of bad rows."""
        return {name: getattr(self, name) for name in COUNTS}

    def to_json(self) -> JsonDict:
        """Counts for the manifest and the summary."""
        more = {
            name: getattr(self, name)
            for name in ("first_rejected", "unread_keys", "with_reasoning")
        }
        return {
            "rows": self.rows,
            "kept": self.kept,
            "skipped": dict(self.skipped),
            "rejected": dict(self.rejected),
            **{name: value for name, value in more.items() if value},
        }

    def check(
        self,
        setting: str,
        limit: float,
        expected_fields: str,
        prefix: str = "reading.",
        *,
        may_be_empty: bool = False,
    ) -> None:
        """Raise DataError if more than the fraction `limit` of the rows is bad, or none was kept.

        `prefix` comes before the name of the setting of `limit`.
        """
        bad = self.rejected.total()
        if bad > limit * self.rows:
            raise DataError(
                f"{setting}: {bad} of {self.rows} rows are bad, "
                f"more than {prefix}rejected_fraction={limit}; "
                f"the first is {self.first_rejected[0]}. {self._looked_for(expected_fields)}",
                [location for location, rows in self.bad_rows.items() if rows > limit * self.rows],
            )
        if not (self.kept or may_be_empty):
            skipped = "".join(f"; {rows} skipped: {rule}" for rule, rows in self.skipped.items())
            advice = (
                f". {self._looked_for(expected_fields)}" if self.rejected or not self.rows else ""
            )
            raise DataError(f"{setting}: no rows are left of {self.rows}{skipped}{advice}")

    def _looked_for(self, expected_fields: str) -> str:
        keys_seen = ", ".join(key for key, _ in self.keys_seen.most_common(8)) or "none"
        return (
            f"ttrain looked for one JSON object a line, with {expected_fields}; "
            f"keys seen: {keys_seen}"
        )


def count(counts: Counter[str], more: Mapping[str, int]) -> None:
    """Add counts by name, of at most MOST_NAMES names."""
    for name, rows in more.items():
        counts[name if name in counts or len(counts) < MOST_NAMES else OTHERS] += rows


def read(
    paths: Sequence[str],
    tally: Tally,
    max_line_bytes: int,
    text_field: str = TEXT,
) -> Iterator[Row]:
    """(path, line number from 1, JSON object) of every good line of every file.

    Each element of a JSON array is a line; a `.txt` file is one line. Raises DataError for a file
    that is truncated, corrupt, unreadable or of another format.
    """
    for path in paths:
        with streams.noting_faults(path):
            yield from parsed(
                numbered_lines(path, max_line_bytes, text_field), path, tally, max_line_bytes
            )


def numbered_lines(path: str, max_line_bytes: int, text_field: str) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers from 1."""
    return (
        streams.parquet_lines(path, 0)
        if streams.is_parquet(path)
        else lines(streams.json_lines(path, text_field), max_line_bytes)
    )


def parsed(
    numbered: Iterable[tuple[int, bytes]],
    path: str,
    tally: Tally,
    max_line_bytes: int,
) -> Iterator[Row]:
    """(path, line number, JSON object) of the good lines."""
    number = 0
    for number, line in numbered:
        # Seen before an error of the parser, which takes six times as long as the rest.
        # And cut: a blank beginning does not make it a blank line.
        is_too_long = len(line) > max_line_bytes
        if not is_too_long and not line.strip():
            continue
        tally.rows += 1
        if is_too_long:
            tally.reject(path, number, TOO_LONG.format(max_line_bytes), line[:1000])
            continue
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            tally.reject(path, number, _reason(line, str(error)), line)
            continue
        if not isinstance(value, dict):
            tally.reject(path, number, f"not a JSON object but {tools.kind_of(value)}", line)
            continue
        # JSON of these becomes text. The search takes a chat 1 us a kB, and a document nothing.
        has_calls = not TURN_KEYS.isdisjoint(value) and (b"_call" in line or b'"tools"' in line)
        if has_calls or "tools" in value or "question" in value:
            try:
                value = tools.without_null_keys(line)
            except RecursionError:
                tally.reject(path, number, TOO_DEEP, line)
                continue
        if tally.rows <= KEYS_LOOKED_AT:
            keys = (key[:KEY_CHARACTERS] for key in islice(value, KEYS_OF_A_ROW))
            count(tally.keys_seen, dict.fromkeys(keys, 1))
        yield path, number, value
    tally.lines += number


def lines(chunks: Iterable[bytes], max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line without its end), cut to max_line_bytes + 1 bytes."""
    number = 1
    pending = b""
    for chunk in chunks:
        *whole, pending = (pending + chunk).split(b"\n")
        for line in whole:
            yield number, line[: max_line_bytes + 1]
            number += 1
        pending = pending[: max_line_bytes + 1]
    if pending:
        yield number, pending


def _reason(line: bytes, error: str) -> str:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return NOT_UTF8
    if not line.strip(b"\0\r"):
        return NULS
    if b"\0" in line[:4]:  # between the letters, as UTF-16 has them
        return NOT_UTF8
    if line.startswith(BOM_UTF8):
        return "not valid JSON: a byte order mark, which may stand at the start of a file only"
    return f"not valid JSON: {error.split(': line')[0]}"
