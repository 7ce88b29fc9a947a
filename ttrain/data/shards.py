"""Shards: memory-mapped Arrow IPC streams of token ids; `index.json` beside them has counts, digests and the tokenizer.

Columns: `tokens: large_list<uint16 or uint32>`; of chats and pairs also `live: large_list<uint8>`, the loss mask, and of
pairs `branches: large_list<uint8>`, which part of the record a token belongs to (`ttrain.data.preferences`). The format is
the stream that `datasets.Dataset.from_file` opens. Opening a set reads its index only: a shard is mapped, and its offsets
are read, when one of its rows is requested.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ttrain.core.files import JsonDict, read_json, temporary_path, write_bytes, write_json
from ttrain.data.packing import Array, Flags, Ids, counted_up
from ttrain.errors import ArtifactError
from ttrain.store.integrity import home_of, verify_files

INDEX = "index.json"
FORMAT = 2
COUNTED = ("rows", "tokens", "live_tokens", "bytes")


@dataclass(frozen=True)
class Column:
    """Records one after the other: `tokens` and, for chats, `live`, for pairs `branches` too, all of length N.

    Record r is offsets[r] to offsets[r+1].
    """

    tokens: Ids
    offsets: Array
    live: Ids | None = None
    branches: Ids | None = None
    weights: Ids | None = None  # of each record, where any differs from 1

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lists(self) -> dict[str, Ids]:
        """The arrays of length N by their names."""
        named = {"tokens": self.tokens, "live": self.live, "branches": self.branches}
        return {name: values for name, values in named.items() if values is not None}

    def select(self, selected: Flags) -> Column:
        """The selected records alone; `selected` has one flag per record."""
        lengths = np.diff(self.offsets)
        flags = np.repeat(selected, lengths)
        lists = {name: values[flags] for name, values in self.lists.items()}
        weights = None if self.weights is None else self.weights[selected]
        return Column(offsets=offsets_of(lengths[selected]), weights=weights, **lists)


def concatenate(columns: Sequence[Column]) -> Column:
    """The records of several columns, one after the other, without their weights."""
    lists = {}
    for name in columns[0].lists:
        lists[name] = np.concatenate([column.lists[name] for column in columns])
    lengths = np.concatenate([np.diff(column.offsets) for column in columns])
    return Column(offsets=offsets_of(lengths), **lists)


class Ranges(NamedTuple):
    """Tokens of ranges of the stream of all records, of length N, and the P pieces of records that they consist of.

    A piece is the part of one record that lies in one range: number of the record, position of its first token in the
    stream, and tokens of the piece, which add up to N.
    """

    ids: Array
    numbers: Array
    firsts: Array
    counts: Array


def offsets_of(lengths: npt.ArrayLike) -> Array:
    """Where pieces of these lengths begin, one after the other, and where the last one ends."""
    return np.append(np.int64(0), np.cumsum(lengths, dtype=np.int64))


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """The smallest type that can hold every id."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def shard_of(name: str, column: Column, vocab_size: int) -> tuple[JsonDict, pa.Buffer]:
    """(entry for the index, bytes of the file) of a shard with this name."""
    arrays = {}
    for field, values in column.lists.items():
        dtype = token_dtype(vocab_size) if field == "tokens" else np.uint8
        narrow = arrow_array(values.astype(dtype, copy=False))
        arrays[field] = pa.LargeListArray.from_arrays(arrow_array(column.offsets), narrow)
    if column.weights is not None and (column.weights != 1).any():
        arrays["weight"] = arrow_array(column.weights.astype(np.float64, copy=False))
    batch = pa.record_batch([*arrays.values()], names=[*arrays])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data = sink.getvalue()
    rows, tokens = len(column), len(column.tokens)
    return {
        "file": name,
        "rows": rows,
        "tokens": tokens,
        "live_tokens": tokens - rows if column.live is None else int(column.live.sum()),
        **({"weighted": True} if "weight" in arrays else {}),
        "sha256": hashlib.sha256(data).hexdigest(),
    }, data


def write_shard(path: Path, column: Column, vocab_size: int) -> JsonDict:
    """Write one shard; returns its counts and digest."""
    entry, data = shard_of(path.name, column, vocab_size)
    write_bytes(path, data)
    return entry


def write_files(files: Sequence[tuple[Path, Any]]) -> None:
    """Write files atomically, in folders that it makes: under temporary names, fsynced, then renamed in their order.

    All are written before the first is synced, since each sync of a journalled file system also waits for other writers:
    when files were synced one by one, two workers were idle for a third of their time.
    """
    for path, _ in files:
        path.parent.mkdir(parents=True, exist_ok=True)
    temporary = [temporary_path(path) for path, _ in files]
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(path.open("wb")) for path in temporary]
        for file, (_, data) in zip(opened, files, strict=True):
            file.write(data)
            file.flush()
        for file in opened:
            os.fsync(file.fileno())
    for source, (target, _) in zip(temporary, files, strict=True):
        source.replace(target)


def read_shard(path: Path) -> Column:
    """The records of one shard, as views into the mapped file."""
    with path.open("rb") as file:  # pa.memory_map would ask for all of the file to be read ahead
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with pa.ipc.open_stream(pa.py_buffer(mapped)) as reader:
        batch = reader.read_next_batch()
    names = batch.schema.names
    lists = {name: _view(batch.column(name).values) for name in names if name != "weight"}
    weights = _view(batch.column("weight")) if "weight" in names else None
    return Column(offsets=_view(batch.column("tokens").offsets), weights=weights, **lists)


def write_index(
    directory: Path,
    *,
    kind: str,
    vocab_size: int,
    tokenizer: str,
    shards: Sequence[JsonDict],
    **extra_fields: object,
) -> JsonDict:
    """Write and return the index of a set. Each entry has file, rows, tokens, live_tokens, bytes, sha256, group."""
    totals = {name: sum(shard[name] for shard in shards) for name in COUNTED}
    index = {
        "format": FORMAT,
        "kind": kind,
        **totals,
        "vocab_size": vocab_size,
        "tokenizer": tokenizer,
        "shards": list(shards),
        **extra_fields,
    }
    write_json(directory / INDEX, index)
    return index


def arrow_array(values: Ids) -> pa.Array:
    """An Arrow array that shares the memory of the numbers. `pa.array` would import pandas, 0.3 s in every worker."""
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, buffer])


def _view(array: pa.Array) -> Ids:
    """A numpy view of an Arrow array. `np.asarray` would import pandas."""
    values = np.frombuffer(array.buffers()[1] or b"", str(array.type))
    return values[array.offset : array.offset + len(array)]


class ShardSet:
    """All records of a directory of shards, memory-mapped and read on demand.

    weights    of each source if they are mixed by weight; else empty
    """

    def __init__(
        self, directory: Path, tokenizer: str | None = None, *, group: int | None = None
    ) -> None:
        """Raises ArtifactError if the index is missing or the shards were made with another tokenizer."""
        index = read_json(directory / INDEX)
        if not isinstance(index, dict) or index.get("format") != FORMAT:
            raise ArtifactError(
                f"{directory} holds no shards: {INDEX} is missing, damaged or of another version"
            )
        if tokenizer is not None and index["tokenizer"] != tokenizer:
            raise ArtifactError(
                f"the shards in {directory} were made with the tokenizer {index['tokenizer'][:12]}, "
                f"not with {tokenizer[:12]}; make them again"
            )
        self.directory, self.index = directory, index
        self.weights: list[float] = index.get("weights", [])
        self._group = group
        self.entries = [
            shard for shard in index["shards"] if group is None or shard["group"] == group
        ]
        self._columns: dict[int, Column] = {}
        self._first_row = offsets_of([shard["rows"] for shard in self.entries])
        self._first_token = offsets_of([shard["tokens"] for shard in self.entries])
        self.tokens = int(self._first_token[-1])

    def __len__(self) -> int:
        return int(self._first_row[-1])

    def group(self, number: int) -> ShardSet:
        """The shards of one weighted source alone."""
        return ShardSet(self.directory, group=number)

    @cached_property
    def row_weights(self) -> Ids | None:
        """Weight of each record, where any differs from 1; else no shard is read."""
        if not any(shard.get("weighted") for shard in self.entries):
            return None
        weights = (
            np.ones(len(each)) if each.weights is None else each.weights for each in self.columns()
        )
        return np.concatenate([*weights])

    @cached_property
    def lengths(self) -> Array:
        """Tokens of each record; reads the offsets of every shard."""
        return np.concatenate(
            [self._first_row[:0], *(np.diff(column.offsets) for column in self.columns())]
        )

    @cached_property
    def starts(self) -> Array:
        """Position of each record's first token in the stream of all records, and the end of the last."""
        return offsets_of(self.lengths)

    @cached_property
    def numbers(self) -> Array:
        """Number of each record in the whole set, over all groups."""
        shards = self.index["shards"]
        is_of_group = [self._group is None or shard["group"] == self._group for shard in shards]
        return np.flatnonzero(np.repeat(is_of_group, [shard["rows"] for shard in shards]))

    def row(self, number: int) -> tuple[Ids, ...]:
        """Views of one record: its ids, of chats and pairs its loss mask, of pairs the branches."""
        which = int(np.searchsorted(self._first_row, number, side="right")) - 1
        [column] = self.columns([which])
        local = number - int(self._first_row[which])
        start, end = column.offsets[local : local + 2].tolist()
        return tuple(values[start:end] for values in column.lists.values())

    def columns(self, numbers: Sequence[int] | None = None) -> list[Column]:
        """The records of these shards, or of all of them, in order.

        The bytes of a shard are compared with the index, which was verified before, when it is first requested.
        Raises DamagedFile.
        """
        numbers = range(len(self.entries)) if numbers is None else numbers
        paths = {
            number: self.directory / self.entries[number]["file"]
            for number in numbers
            if number not in self._columns
        }
        if paths:
            digests = [
                (path, str(self.entries[number]["sha256"])) for number, path in paths.items()
            ]
            verify_files(digests, home_of(self.directory.parent))
            self._columns.update({number: read_shard(path) for number, path in paths.items()})
        return [self._columns[number] for number in numbers]

    def stream(self, start: int, end: int) -> Array:
        """Tokens `start` to `end` of all records, one after the other."""
        return self.ranges(np.array([start]), np.array([end])).ids

    def ranges(self, starts: Array, ends: Array) -> Ranges:
        """Tokens `starts[i]` to `ends[i]` of the stream of all records, range by range."""
        bounds = self._first_token
        first_shard = bounds.searchsorted(starts, "right") - 1
        spread = np.maximum(0, bounds.searchsorted(ends) - first_shard)
        shards = counted_up(first_shard, spread)
        low, high = (
            np.maximum(starts.repeat(spread), bounds[shards]),
            np.minimum(ends.repeat(spread), bounds[shards + 1]),
        )
        filled = high > low
        shards, low, high = shards[filled], low[filled], high[filled]
        # Neighbours in one shard are read together.
        borders = [*np.flatnonzero(np.diff(shards, prepend=-1)).tolist(), len(shards)]
        parts = [
            self._in_shard(int(shards[first]), low[first:end], high[first:end])
            for first, end in itertools.pairwise(borders)
        ]
        columns = (
            zip(*parts, strict=True) if parts else [[np.zeros(0, np.int64)]] * len(Ranges._fields)
        )
        return Ranges(*map(np.concatenate, columns))

    def _in_shard(self, shard: int, low: Array, high: Array) -> Ranges:
        """Ranges of the stream that all lie in this shard."""
        [column] = self.columns([shard])
        first_token = self._first_token[shard]
        low, high = low - first_token, high - first_token
        ids = np.concatenate(
            [
                column.tokens[start:end]
                for start, end in zip(low.tolist(), high.tolist(), strict=True)
            ]
        )
        first = column.offsets.searchsorted(low, "right") - 1
        pieces = column.offsets.searchsorted(high) - first
        records = counted_up(first, pieces)
        firsts = column.offsets[records]
        counts = np.minimum(column.offsets[records + 1], high.repeat(pieces)) - np.maximum(
            firsts, low.repeat(pieces)
        )
        return Ranges(
            ids.astype(np.int64), records + self._first_row[shard], firsts + first_token, counts
        )
