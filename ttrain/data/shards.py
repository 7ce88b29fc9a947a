"""Shards: memory-mapped Arrow IPC streams of token ids, and an `index.json` with counts.

Columns: `tokens: large_list<uint16 or uint32>`; of chats and pairs `live: large_list<uint8>`, the
loss mask; of pairs `branches: large_list<uint8>` (parts of `ttrain.data.preferences`).
`datasets.Dataset.from_file` opens the format. Opening a set reads its index only.
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
    """Records in arrays of length N; record r is offsets[r] to offsets[r+1]."""

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
        """The selected records; `selected` has one flag per record."""
        lengths = np.diff(self.offsets)
        flags = np.repeat(selected, lengths)
        return Column(
            offsets=offsets_of(lengths[selected]),
            weights=None if self.weights is None else self.weights[selected],
            **{name: values[flags] for name, values in self.lists.items()},
        )


def concatenate(columns: Sequence[Column]) -> Column:
    """The records of several columns, without their weights."""
    lists = zip(*(column.lists.values() for column in columns), strict=True)
    lengths = [np.diff(column.offsets) for column in columns]
    return Column(
        offsets=offsets_of(np.concatenate(lengths)),
        **dict(zip(columns[0].lists, map(np.concatenate, lists), strict=True)),
    )


class Ranges(NamedTuple):
    """N tokens of ranges of the stream of all records, in P pieces of one record and range each.

    ids        tokens, of shape [N]
    numbers    the piece's record, of shape [P]
    firsts     position of that record's first token in the stream
    counts     tokens of the piece
    """

    ids: Array
    numbers: Array
    firsts: Array
    counts: Array


def offsets_of(lengths: npt.ArrayLike) -> Array:
    """Where consecutive pieces of these lengths begin, and where the last one ends."""
    return np.append(np.int64(0), np.cumsum(lengths, dtype=np.int64))


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """The smallest type that can hold every id."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def shard_of(name: str, column: Column, vocab_size: int) -> tuple[JsonDict, pa.Buffer]:
    """(entry for the index, bytes of the file) of a shard with this name."""
    arrays = {}
    for field, values in column.lists.items():
        dtype = token_dtype(vocab_size) if field == "tokens" else np.uint8
        arrays[field] = pa.LargeListArray.from_arrays(
            arrow_array(column.offsets), arrow_array(values.astype(dtype, copy=False))
        )
    if column.weights is not None and (column.weights != 1).any():
        arrays["weight"] = arrow_array(column.weights.astype(np.float64, copy=False))
    batch = pa.record_batch([*arrays.values()], names=[*arrays])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data = sink.getvalue()
    return {
        "file": name,
        "rows": len(column),
        "tokens": len(column.tokens),
        "live_tokens": len(column.tokens) - len(column)
        if column.live is None
        else int(column.live.sum()),
        **({"weighted": True} if "weight" in arrays else {}),
        "sha256": hashlib.sha256(data).hexdigest(),
    }, data


def write_shard(path: Path, column: Column, vocab_size: int) -> JsonDict:
    """Write one shard; returns its counts and digest."""
    entry, data = shard_of(path.name, column, vocab_size)
    write_bytes(path, data)
    return entry


def write_files(files: Sequence[tuple[Path, Any]]) -> None:
    """Write files atomically, in folders that it makes, and rename them in their order."""
    for path, _ in files:
        path.parent.mkdir(parents=True, exist_ok=True)
    # All are written before the first is synced, since each sync of a journalled file system also
    # waits for other writers: synced one by one, two workers were idle for a third of their time.
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
    """Write and return the index of a set."""
    index = {
        "format": FORMAT,
        "kind": kind,
        **{name: sum(shard[name] for shard in shards) for name in COUNTED},
        "vocab_size": vocab_size,
        "tokenizer": tokenizer,
        "shards": list(shards),
        **extra_fields,
    }
    write_json(directory / INDEX, index)
    return index


def arrow_array(values: Ids) -> pa.Array:
    """An Arrow array that shares the memory of the numbers."""
    # `pa.array`, and np.asarray of one, would import pandas: 0.3 s in every worker.
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, buffer])


def _view(array: pa.Array) -> Ids:
    values = np.frombuffer(array.buffers()[1] or b"", str(array.type))
    return values[array.offset : array.offset + len(array)]


class ShardSet:
    """All records of a directory of shards, memory-mapped and read on demand.

    weights    of each source if they are mixed by weight; else empty
    """

    def __init__(
        self, directory: Path, tokenizer: str | None = None, *, group: int | None = None
    ) -> None:
        """Raises ArtifactError for a missing index or another tokenizer."""
        index = read_json(directory / INDEX)
        if not isinstance(index, dict) or index.get("format") != FORMAT:
            raise ArtifactError(
                f"{directory} holds no shards: {INDEX} is missing, damaged or of another version"
            )
        if tokenizer is not None and index["tokenizer"] != tokenizer:
            raise ArtifactError(
                f"the shards in {directory} were made with the tokenizer "
                f"{index['tokenizer'][:12]}, not with {tokenizer[:12]}; make them again"
            )
        self.directory = directory
        self.index = index
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
        """Weight of each record, or None if all are 1; then no shard is read."""
        if not any(shard.get("weighted") for shard in self.entries):
            return None
        return np.concatenate(
            [
                np.ones(len(column)) if column.weights is None else column.weights
                for column in self.columns()
            ]
        )

    @cached_property
    def lengths(self) -> Array:
        """Tokens of each record; reads the offsets of every shard."""
        return np.concatenate(
            [self._first_row[:0], *(np.diff(column.offsets) for column in self.columns())]
        )

    @cached_property
    def starts(self) -> Array:
        """Position of each record's first token in the stream, and the end of the last."""
        return offsets_of(self.lengths)

    @cached_property
    def numbers(self) -> Array:
        """Number of each record in the whole set, over all groups."""
        shards = self.index["shards"]
        is_of_group = [self._group is None or shard["group"] == self._group for shard in shards]
        return np.flatnonzero(np.repeat(is_of_group, [shard["rows"] for shard in shards]))

    def row(self, number: int) -> tuple[Ids, ...]:
        """Views of a record's ids, of chats and pairs also masks, of pairs branches."""
        which = int(np.searchsorted(self._first_row, number, side="right")) - 1
        [column] = self.columns([which])
        local = number - int(self._first_row[which])
        start, end = column.offsets[local : local + 2].tolist()
        return tuple(values[start:end] for values in column.lists.values())

    def columns(self, numbers: Sequence[int] | None = None) -> list[Column]:
        """The records of these shards, or of all, in order; each is verified when first read.

        Raises DamagedFile.
        """
        numbers = range(len(self.entries)) if numbers is None else numbers
        missing = [number for number in numbers if number not in self._columns]
        if missing:
            files = [
                (self.directory / entry["file"], str(entry["sha256"]))
                for entry in map(self.entries.__getitem__, missing)
            ]
            verify_files(files, home_of(self.directory.parent))
            self._columns |= zip(missing, [read_shard(path) for path, _ in files], strict=True)
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
        low = np.maximum(starts.repeat(spread), bounds[shards])
        high = np.minimum(ends.repeat(spread), bounds[shards + 1])
        shards, low, high = np.stack([shards, low, high])[:, high > low]
        # Neighbours in one shard are read together.
        borders = [*np.flatnonzero(np.diff(shards, prepend=-1)).tolist(), len(shards)]
        parts = [
            self._in_shard(int(shards[first]), low[first:end], high[first:end])
            for first, end in itertools.pairwise(borders)
        ]
        nothing = [np.zeros(0, np.int64)] * len(Ranges._fields)
        return Ranges(*map(np.concatenate, zip(nothing, *parts, strict=True)))

    def _in_shard(self, shard: int, low: Array, high: Array) -> Ranges:
        [column] = self.columns([shard])
        first_token = self._first_token[shard]
        low = low - first_token
        high = high - first_token
        spans = map(slice, low.tolist(), high.tolist())
        ids = np.concatenate([column.tokens[span] for span in spans])
        first = column.offsets.searchsorted(low, "right") - 1
        pieces = column.offsets.searchsorted(high) - first
        records = counted_up(first, pieces)
        firsts = column.offsets[records]
        ends = np.minimum(column.offsets[records + 1], high.repeat(pieces))
        return Ranges(
            ids.astype(np.int64),
            records + self._first_row[shard],
            firsts + first_token,
            ends - np.maximum(firsts, low.repeat(pieces)),
        )
