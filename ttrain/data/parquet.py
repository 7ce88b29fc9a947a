"""Parquet to JSON lines, in a child of `core.sandbox`: 355 bytes can unpack to 20 GB, and a damaged page can crash it.

Pages state their own number of values, so no figure of the footer shows beforehand how much memory a batch takes. The
child has a memory limit, and its output is bounded by the size of the file.
"""

from __future__ import annotations

import contextlib
import decimal
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import orjson

from ttrain.core.sandbox import BudgetExceeded, Sandbox, WorkFailed
from ttrain.data import locations, streams
from ttrain.data.tools import PARQUET_TYPE
from ttrain.errors import DataError

SECONDS, MEMORY_BYTES = 60.0, 2 << 30  # of a batch, which takes 10 ms and some megabytes
# Limit of a file's size as JSON. Text compresses to a tenth, and so do texts that a dictionary stores once.
OUTPUT_BYTES, OUTPUT_BYTES_PER_BYTE = 64 << 20, 100
ROW_BYTES = 64  # what a row counts for besides its JSON: a billion rows of one letter are work, too
PIECE_BYTES = 1 << 19
OPTIONS = orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_NON_STR_KEYS  # a map may have numbers as keys
FIX = "fetch it again, or write it as JSON Lines if its content is intended"


def groups(location: str) -> list[tuple[int, int]]:
    """(rows, bytes before compression) of every row group."""
    return [(rows, size) for piece in _request(location, None) for rows, size in orjson.loads(piece)]


def lines(location: str, first_group: int, last_group: int) -> Iterator[tuple[int, bytes]]:
    """(number from 1, JSON) of the rows of the groups `first_group` to `last_group`, the last one not included.

    Raises DataError for a file that is damaged, or unpacks to more than its size allows.
    """
    for first, rows in pieces(location, first_group, last_group):
        yield from enumerate(rows.split(b"\n"), start=first)


def pieces(location: str, first_group: int, last_group: int) -> Iterator[tuple[int, bytes]]:
    """(number of the first, rows as JSON lines without the last newline) of the same rows, in chunks."""
    with contextlib.closing(_request(location, (first_group, last_group))) as results:
        for result in results:
            first, _, rows = result.partition(b"\n")
            yield int(first), rows


def _request(location: str, chosen: tuple[int, int] | None) -> Generator[bytes]:
    directory = None if locations.is_remote(location) else str(Path.cwd())
    try:
        yield from SANDBOX.stream(orjson.dumps([location, directory, chosen, OUTPUT_BYTES]))
    except BudgetExceeded as error:
        raise DataError(f"{location} unpacks to too much data, or is corrupt: {error}; {FIX}") from None
    except WorkFailed as error:
        raise DataError(f"{location} is corrupt: {error}; fetch it again") from None


def answer(request: bytes) -> Iterator[bytes]:
    """In the child: the groups as one JSON list, or chunks of rows: the number of the first row, then one row per line."""
    location, directory, chosen, given_bytes = orjson.loads(request)
    if directory is not None:
        os.chdir(directory)
    if chosen is None:
        yield orjson.dumps(streams.parquet_groups(location))
        return
    with streams.open_stream(location) as stream:
        remaining_bytes = given_bytes + OUTPUT_BYTES_PER_BYTE * stream.seek(0, os.SEEK_END)
    rows, size, last = list[bytes](), 0, 0
    for last, values in streams.parquet_rows(location, *chosen):
        # A column that is null in a row stands for a key that it lacks; a row of nulls alone says what is null.
        row = values
        if None in values.values():
            row = {name: value for name, value in values.items() if value is not None} or values
        line = orjson.dumps(row, default=_as_json, option=OPTIONS)
        rows.append(line)
        size += len(line) + ROW_BYTES
        if size >= PIECE_BYTES:
            if size > remaining_bytes:
                raise DataError(
                    f"{location} unpacks to more than {OUTPUT_BYTES_PER_BYTE} times its size plus {given_bytes >> 20} MiB, "
                    f"at its row {last:,}; {FIX}"
                )
            yield _piece(last, rows)
            rows, size, remaining_bytes = [], 0, remaining_bytes - size
    if rows:
        yield _piece(last, rows)


def _piece(last: int, rows: list[bytes]) -> bytes:
    return b"%d\n%b" % (last - len(rows) + 1, b"\n".join(rows))


def _as_json(value: object) -> object:
    """A parquet value that JSON lacks: bytes in UTF-8 as text, a decimal as a number, others as their type."""
    if isinstance(value, bytes):
        with contextlib.suppress(UnicodeDecodeError):
            return value.decode("utf-8")
    if isinstance(value, decimal.Decimal):
        return orjson.Fragment(format(value, "f"))
    return {PARQUET_TYPE: type(value).__name__}


SANDBOX = Sandbox(
    answer,
    seconds=SECONDS,
    seconds_per_result=SECONDS,
    memory_bytes=MEMORY_BYTES,
    preloaded=("pyarrow.parquet",),
)
