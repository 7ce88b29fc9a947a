"""Shards: Arrow IPC files of token ids, memory-mapped; `index.json` beside them holds counts, digests and the tokenizer.

Columns: `tokens: large_list<uint16 or uint32>`, for chats also `live: large_list<bool-as-uint8>`, the loss mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ttrain.digests import sha256_file
from ttrain.errors import ArtifactError
from ttrain.store import read_json, write_json

INDEX = "index.json"
ROWS_PER_BATCH = 2048


class ShardWriter:
    """Writes one set of shards into a directory; `close()` writes the index last. Memory: one record batch."""

    def __init__(self, directory: Path, *, kind: str, vocab_size: int, tokenizer: str, tokens_per_shard: int) -> None:
        self.directory = directory
        self.kind, self.vocab_size, self.tokenizer = kind, vocab_size, tokenizer
        self.tokens_per_shard = tokens_per_shard
        self.rows = self.tokens = self.bytes = self.live = 0
        self._dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
        fields = [pa.field("tokens", pa.large_list(pa.from_numpy_dtype(self._dtype)))]
        if kind == "chats":
            fields.append(pa.field("live", pa.large_list(pa.uint8())))
        self._schema = pa.schema(fields)
        self._shards: list[dict[str, Any]] = []
        self._batch: list[tuple[Sequence[int], Sequence[bool]]] = []
        self._writer: Any = None
        self._in_shard = 0
        directory.mkdir(parents=True, exist_ok=True)

    def add(self, ids: Sequence[int], live: Sequence[bool] = (), *, text_bytes: int) -> None:
        """Append one record; `live` marks the tokens that are targets (chats only)."""
        self._batch.append((ids, live))
        self.rows, self.tokens, self.bytes = self.rows + 1, self.tokens + len(ids), self.bytes + text_bytes
        self.live += sum(live) if self.kind == "chats" else len(ids) - 1
        self._in_shard += len(ids)
        if len(self._batch) >= ROWS_PER_BATCH or self._in_shard >= self.tokens_per_shard:
            self._flush()
            if self._in_shard >= self.tokens_per_shard:
                self._end_shard()

    def close(self) -> dict[str, Any]:
        """Finish the last shard and write the index; returns it."""
        self._flush()
        self._end_shard()
        index = {
            "kind": self.kind,
            "rows": self.rows,
            "tokens": self.tokens,
            "live_tokens": self.live,
            "bytes": self.bytes,
            "vocab_size": self.vocab_size,
            "tokenizer": self.tokenizer,
            "shards": self._shards,
        }
        write_json(self.directory / INDEX, index)
        return index

    def _flush(self) -> None:
        if not self._batch:
            return
        if self._writer is None:
            name = f"shard-{len(self._shards):05d}.arrow"
            self._shards.append({"file": name, "rows": 0, "tokens": 0})
            self._writer = pa.ipc.new_file(str(self.directory / name), self._schema)
        columns = [_large_list([ids for ids, _ in self._batch], self._dtype)]
        if self.kind == "chats":
            columns.append(_large_list([live for _, live in self._batch], np.uint8))
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        self._shards[-1]["rows"] += len(self._batch)
        self._shards[-1]["tokens"] += sum(len(ids) for ids, _ in self._batch)
        self._batch = []

    def _end_shard(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._shards[-1]["sha256"] = sha256_file(self.directory / self._shards[-1]["file"])
            self._writer, self._in_shard = None, 0


def _large_list(rows: list[Any], dtype: Any) -> pa.Array:
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    values = np.concatenate([np.asarray(row, dtype=dtype) for row in rows]) if rows else np.zeros(0, dtype)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))


@dataclass(frozen=True)
class _Block:
    """One record batch of a shard, as views into the mapped file."""

    tokens: npt.NDArray[Any]
    live: npt.NDArray[Any] | None
    starts: npt.NDArray[np.int64]


class ShardSet:
    """All records of a directory of shards, memory-mapped; nothing is read until it is asked for."""

    def __init__(self, directory: Path, tokenizer: str | None = None) -> None:
        """Raises ArtifactError where the index is missing or the shards were made with another tokenizer."""
        index = read_json(directory / INDEX)
        if not isinstance(index, dict):
            raise ArtifactError(f"{directory} holds no shards: {INDEX} is missing or damaged")
        if tokenizer is not None and index["tokenizer"] != tokenizer:
            raise ArtifactError(
                f"the shards in {directory} were made with the tokenizer {index['tokenizer'][:12]}, "
                f"not with {tokenizer[:12]}"
            )
        self.index: dict[str, Any] = index
        self._blocks: list[_Block] = []
        lengths: list[npt.NDArray[np.int64]] = []
        for shard in index["shards"]:
            reader = pa.ipc.open_file(pa.memory_map(str(directory / shard["file"])))
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                tokens = batch.column("tokens")
                offsets = np.asarray(tokens.offsets, dtype=np.int64)
                live = np.asarray(batch.column("live").values) if index["kind"] == "chats" else None
                self._blocks.append(_Block(np.asarray(tokens.values), live, offsets))
                lengths.append(np.diff(offsets))
        self.lengths = np.concatenate(lengths) if lengths else np.zeros(0, np.int64)
        self._first_row = np.cumsum([0, *(len(block.starts) - 1 for block in self._blocks)])
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])

    def __len__(self) -> int:
        return len(self.lengths)

    def row(self, number: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
        """(ids, live) of one record, as views."""
        which = int(np.searchsorted(self._first_row, number, side="right")) - 1
        block = self._blocks[which]
        local = number - self._first_row[which]
        start, end = block.starts[local], block.starts[local + 1]
        return block.tokens[start:end], None if block.live is None else block.live[start:end]

    def stream(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Tokens `start` to `end` of all records, one after the other."""
        pieces = []
        row = int(np.searchsorted(self.starts, start, side="right")) - 1
        which = int(np.searchsorted(self._first_row, row, side="right")) - 1
        while start < end:
            block = self._blocks[which]
            block_start = int(self.starts[self._first_row[which]])
            low = start - block_start + int(block.starts[0])
            high = min(end - block_start + int(block.starts[0]), int(block.starts[-1]))
            pieces.append(block.tokens[low:high])
            start += high - low
            which += 1
        return np.concatenate(pieces).astype(np.int64) if pieces else np.zeros(0, np.int64)
