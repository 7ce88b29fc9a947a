"""Look at the first rows of files: what they are, and whether a data set can be made of them."""

import itertools
import shlex
from collections import Counter
from collections.abc import Sequence

from ttrain.config.data import Reading
from ttrain.core.files import JsonDict
from ttrain.core.text import first_of
from ttrain.data import json_rows, locations, records, streams
from ttrain.data.records import Kind, Rejected
from ttrain.errors import CannotRead, DataError, UsageError

ROWS, FILES = 20, 20  # of a file, and of a data set
MOST = 0.5  # share of bad rows that no good file has
SHOWN_KEYS = 8
NAMES = {"documents": "a document", "chats": "a chat", "pairs": "a pair of answers"}
DATASETS = {"documents": "pretrain", "chats": "sft", "pairs": "dpo"}


def read(location: str, reading: Reading, tally: json_rows.Tally) -> list[json_rows.Row]:
    """The JSON objects among the first rows of a file; the tally counts the others.

    A `.txt` file is one row, without its text. Raises DataError for another format.
    """
    if locations.is_text(location):
        tally.rows += 1
        return [(location, 1, {reading.text_field: "..."})]
    limit = reading.max_line_bytes
    with streams.noting_faults(location):
        lines = itertools.islice(
            json_rows.numbered_lines(location, limit, reading.text_field), ROWS
        )
        return list(json_rows.parsed(lines, location, tally, limit))


def kind_of(rows: Sequence[json_rows.Row]) -> Kind | None:
    """What most of the rows are, by their keys."""
    kinds = Counter(records.kind_of_row(values) for _, _, values in rows)
    return kinds.most_common(1)[0][0] if kinds else None


def kind_of_file(location: str, reading: Reading) -> Kind | None:
    """What most of the first rows of a file are. Raises DataError for an unreadable file."""
    return kind_of(read(location, reading, json_rows.Tally()))


def check(setting: str, kind: Kind, files: Sequence[str], reading: Reading) -> None:
    """Raise UsageError for files that cannot be what their setting needs.

    They have another format, only rows of something else, or a few rows, mostly bad or none.
    """
    # Hours may pass until the stage counts its rows.
    tally = json_rows.Tally()
    local = [location for location in files if not locations.is_remote(location)][:FILES]
    for location in local:
        try:
            rows = read(location, reading, tally)
        except CannotRead:
            raise
        except DataError as error:
            raise UsageError(f"{setting}: {error}") from None
        if rows and not any(_may_be(values, kind, reading.text_field) for _, _, values in rows):
            raise UsageError(
                f"{setting} needs {kind}, but {_problem(setting, kind, rows, reading.text_field)}"
            )
        list(records.accepted(rows, records.parser_of(kind, reading.text_field), tally))
    bad = tally.rejected.total()
    are_all_read = local and len(local) == len(files) and tally.rows < ROWS
    if are_all_read and (not tally.rows or bad > tally.rows * max(MOST, reading.rejected_fraction)):
        found = (
            f"{bad} of {tally.rows} rows are bad, such as {tally.first_rejected[0]}"
            if bad
            else "which has no rows"
        )
        raise UsageError(
            f"{setting} is {', '.join(local)}, {found}; correct it, or name a file with good rows"
        )


def _may_be(row: JsonDict, kind: Kind, text_field: str) -> bool:
    if kind == "documents":
        return any(key in row for key in records.document_keys(text_field))
    is_bad_pair = kind == "pairs" and not row.keys().isdisjoint(("chosen", "rejected", "label"))
    return is_bad_pair or records.kind_of_row(row) == kind or not why_bad(row, kind, text_field)


def _problem(setting: str, kind: Kind, rows: Sequence[json_rows.Row], text_field: str) -> str:
    location, line, first = rows[0]
    keys = first_of(first, SHOWN_KEYS) or "no keys"
    found = kind_of(rows)
    if (
        found
        and found != kind
        and not all(why_bad(values, found, text_field) for _, _, values in rows)
    ):
        part = "_heldout" if setting.endswith("_heldout") else ""
        fix = shlex.quote(f"data.{DATASETS[found]}{part}={location}")
        return f"{location}:{line} is {NAMES[found]} (keys: {keys}); write {fix}"
    fix = f"write rows with {records.expected_fields(kind, text_field)}"
    texts = {key: len(value) for key, value in first.items() if isinstance(value, str)}
    if kind == "documents" and texts:
        fix = f"set reading.text_field={shlex.quote(max(texts, key=texts.__getitem__))}, or {fix}"
    return f"{location}:{line} is none: {why_bad(first, kind, text_field)} (keys: {keys}); {fix}"


def why_bad(row: JsonDict, kind: Kind, text_field: str) -> str:
    """Why a row is not good; "" for a good one."""
    parsed = records.parser_of(kind, text_field)(row)
    return parsed.reason if isinstance(parsed, Rejected) else ""
