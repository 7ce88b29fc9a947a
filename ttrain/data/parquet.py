"""Read parquet rows as JSON Lines, some megabytes at a time."""

from __future__ import annotations

import contextlib
import decimal
from collections.abc import Iterator
from typing import Any

import orjson

from ttrain.data import remote, streams
from ttrain.data.tools import PARQUET_TYPE

BATCH_ROWS = 1024
BATCH_BYTES = 8 << 20
BUFFER_BYTES = 1 << 20  # a column is read by pages: 19 MB instead of 209 for a group of 200 MB
OPTIONS = orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_NON_STR_KEYS  # a map may have numbers as keys


def groups(location: str) -> list[tuple[int, int]]:
    """(rows, bytes before compression) of every row group."""
    with _opened(location) as file:
        return _groups_of(file)


def lines(location: str, first_group: int, last_group: int) -> Iterator[tuple[int, bytes]]:
    """(number from 1, JSON) of the rows of the groups `first_group` to `last_group`, without the last."""
    with _opened(location) as file:
        sizes = _groups_of(file)
        number = sum(rows for rows, _ in sizes[:first_group])
        for group in range(first_group, last_group):
            rows, group_bytes = sizes[group]
            row_bytes = max(1, group_bytes // max(1, rows))
            batch_rows = max(1, min(BATCH_ROWS, BATCH_BYTES // row_bytes))
            for batch in file.iter_batches(batch_rows, row_groups=[group], use_threads=False):
                # Asked for maps as objects, Arrow takes five times as long.
                maps = "lossy" if "map<" in str(batch.schema) else None
                for row in batch.to_pylist(maps_as_pydicts=maps):
                    number += 1
                    yield number, _as_line(row)


@contextlib.contextmanager
def _opened(location: str) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile

    with contextlib.ExitStack() as stack:
        source = streams.local_file(location) or stack.enter_context(remote.open_file(location))
        yield stack.enter_context(ParquetFile(source, buffer_size=BUFFER_BYTES, pre_buffer=False))


def _groups_of(file: Any) -> list[tuple[int, int]]:
    groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
    return [(group.num_rows, group.total_byte_size) for group in groups]


def _as_line(values: dict[str, Any]) -> bytes:
    """A column that is null stands for a key that the row lacks; a row of nulls says what is null."""
    row = values
    if None in values.values():
        row = {name: value for name, value in values.items() if value is not None} or values
    return orjson.dumps(row, default=_as_json, option=OPTIONS)


def _as_json(value: object) -> object:
    """A parquet value that JSON lacks: bytes in UTF-8 as text, a decimal as a number, others as their type."""
    if isinstance(value, bytes):
        with contextlib.suppress(UnicodeDecodeError):
            return value.decode("utf-8")
    if isinstance(value, decimal.Decimal):
        return orjson.Fragment(format(value, "f"))
    return {PARQUET_TYPE: type(value).__name__}
