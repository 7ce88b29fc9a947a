"""Shards: Arrow IPC streams of token ids, memory-mapped; `index.json` beside them holds counts, digests and the tokenizer.

Columns: `tokens: large_list<uint16 or uint32>`, for chats also `live: large_list<uint8>`, the loss mask. The stream format
is the one that `datasets.Dataset.from_file` opens. Opening a set reads its index and nothing else: a shard is mapped, and
its offsets are read, when one of its rows is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ttrain.digests import sha256_file
from ttrain.errors import ArtifactError
from ttrain.store import read_json, write_json

INDEX = "index.json"
FORMAT = 2
COUNTED = ("rows", "tokens", "live_tokens", "bytes")
Ids = npt.NDArray[Any]
Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Column:
    """Records one after the other: `tokens` and, for chats, `live` of length N; record r is offsets[r] to offsets[r+1]."""

    tokens: Ids
    offsets: Offsets
    live: Ids | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def select(self, wanted: npt.NDArray[np.bool_]) -> Column:
        """The wanted records alone; `wanted` has one flag a record."""
        lengths = np.diff(self.offsets)
        flags = np.repeat(wanted, lengths)
        offsets = np.concatenate([[0], np.cumsum(lengths[wanted])]).astype(np.int64)
        return Column(self.tokens[flags], offsets, None if self.live is None else self.live[flags])


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """The smallest that holds every id."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def write_shard(path: Path, column: Column, vocab_size: int) -> dict[str, Any]:
    """Write one shard: under a temporary name, fsynced, renamed. Returns its counts and digest."""
    dtype = token_dtype(vocab_size)
    arrays, fields = [_large_list(column.offsets, column.tokens.astype(dtype))], ["tokens"]
    if column.live is not None:
        arrays.append(_large_list(column.offsets, column.live.astype(np.uint8)))
        fields.append("live")
    batch = pa.record_batch(arrays, names=fields)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        with pa.ipc.new_stream(file, batch.schema) as writer:
            writer.write_batch(batch)
        file.flush()
        os.fsync(file.fileno())
    digest = sha256_file(temporary)
    temporary.replace(path)
    rows, tokens = len(column), len(column.tokens)
    live = tokens - rows if column.live is None else int(column.live.sum())
    return {"file": path.name, "rows": rows, "tokens": tokens, "live_tokens": live, "sha256": digest}


def read_shard(path: Path) -> Column:
    """The records of one shard, as views into the mapped file. Raises ArtifactError where it is damaged."""
    try:
        with pa.ipc.open_stream(pa.memory_map(str(path))) as reader:
            batch = reader.read_next_batch()
    except (OSError, pa.ArrowInvalid, StopIteration) as error:
        raise ArtifactError(f"the shard {path} is damaged: {error}; make it again") from None
    tokens = batch.column("tokens")
    live = np.asarray(batch.column("live").values) if "live" in batch.schema.names else None
    return Column(np.asarray(tokens.values), np.asarray(tokens.offsets, dtype=np.int64), live)


def write_index(
    directory: Path, *, kind: str, vocab_size: int, tokenizer: str, shards: Sequence[dict[str, Any]], **more: object
) -> dict[str, Any]:
    """Write what makes shards a set; returns it. Each entry has file, rows, tokens, live_tokens, bytes, sha256, group."""
    totals = {name: sum(shard[name] for shard in shards) for name in COUNTED}
    index = {
        "format": FORMAT,
        "kind": kind,
        **totals,
        "vocab_size": vocab_size,
        "tokenizer": tokenizer,
        "shards": list(shards),
        **more,
    }
    write_json(directory / INDEX, index)
    return index


def _large_list(offsets: Offsets, values: Ids) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))


class ShardSet:
    """All records of a directory of shards, memory-mapped; nothing is read until it is asked for."""

    def __init__(self, directory: Path, tokenizer: str | None = None, *, group: int | None = None) -> None:
        """Raises ArtifactError where the index is missing or the shards were made with another tokenizer."""
        index = read_json(directory / INDEX)
        if not isinstance(index, dict) or index.get("format") != FORMAT:
            raise ArtifactError(f"{directory} holds no shards: {INDEX} is missing, damaged or of another version")
        if tokenizer is not None and index["tokenizer"] != tokenizer:
            raise ArtifactError(
                f"the shards in {directory} were made with the tokenizer {index['tokenizer'][:12]}, "
                f"not with {tokenizer[:12]}; make them again with `ttrain data shard --tokenizer`"
            )
        self.directory, self.index = directory, index
        self._shards = [shard for shard in index["shards"] if group is None or shard["group"] == group]
        self._columns: list[Column | None] = [None] * len(self._shards)
        self._first_row = np.cumsum([0, *(shard["rows"] for shard in self._shards)])
        self._first_token = np.cumsum([0, *(shard["tokens"] for shard in self._shards)])
        self.tokens = int(self._first_token[-1])

    def __len__(self) -> int:
        return int(self._first_row[-1])

    def group(self, number: int) -> ShardSet:
        """The shards of one weighted source alone."""
        return ShardSet(self.directory, group=number)

    @property
    def weights(self) -> list[float]:
        """Weight of each source, where they are mixed by weight; else empty."""
        return list(self.index.get("weights") or ())

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each record; reads the offsets of every shard."""
        found = [np.diff(self._column(number).offsets) for number in range(len(self._shards))]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """Place of each record's first token in the stream of all; one more than there are records."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])

    def row(self, number: int) -> tuple[Ids, Ids | None]:
        """(ids, live) of one record, as views."""
        which = int(np.searchsorted(self._first_row, number, side="right")) - 1
        column = self._column(which)
        local = number - int(self._first_row[which])
        start, end = column.offsets[local], column.offsets[local + 1]
        return column.tokens[start:end], None if column.live is None else column.live[start:end]

    def columns(self) -> list[Column]:
        """Every shard's records, in order."""
        return [self._column(number) for number in range(len(self._shards))]

    def stream(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Tokens `start` to `end` of all records, one after the other."""
        pieces = [column.tokens[low:high] for column, low, high, _, _ in self._spans(start, end)]
        return np.concatenate(pieces).astype(np.int64) if pieces else np.zeros(0, np.int64)

    def document_starts(self, start: int, end: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(number, place of the first token) of the record at each place of the stream from `start` to `end`."""
        numbers, firsts = [], []
        for column, low, high, first_row, first_token in self._spans(start, end):
            record = np.searchsorted(column.offsets, np.arange(low, high), side="right") - 1
            numbers.append(record + first_row)
            firsts.append(column.offsets[record] + first_token)
        if not numbers:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        return np.concatenate(numbers), np.concatenate(firsts)

    def _spans(self, start: int, end: int) -> list[tuple[Column, int, int, int, int]]:
        """(records, first and last token in them, number of their first record, place of their first token) of a range."""
        found = []
        which = int(np.searchsorted(self._first_token, start, side="right")) - 1
        while start < end:
            first = int(self._first_token[which])
            high = min(end, int(self._first_token[which + 1]))
            if high > start:
                found.append((self._column(which), start - first, high - first, int(self._first_row[which]), first))
            start, which = max(start, high), which + 1
        return found

    def _column(self, number: int) -> Column:
        column = self._columns[number]
        if column is None:
            shard = self._shards[number]
            column = read_shard(self.directory / shard["file"])
            if len(column) != shard["rows"] or len(column.tokens) != shard["tokens"]:
                raise ArtifactError(f"the shard {self.directory / shard['file']} is not the one that {INDEX} describes")
            self._columns[number] = column
        return column
