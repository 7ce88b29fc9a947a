"""Small data: documents, chats, a tokenizer, shards, rows without files."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ttrain.core.files import write_json
from ttrain.data import tokenizer
from ttrain.data.chat import encode_chat
from ttrain.data.chat_templates import Message
from ttrain.data.encoder import Encoder
from ttrain.data.packing import Array, Batch, Rows
from ttrain.data.shards import Column, write_index, write_shard

VOCAB = 61
LINES = (
    "The quick brown fox jumps over the lazy dog.",
    "A list is a sequence of items; a tuple is one that cannot change.",
    "Return the number of elements in the container.",
    "Grüße an 東京 und 🙂, said the byte to the character.",
    "def add(a, b):\n    return a + b\n",
    "Nothing is learnt where nothing is masked in.",
)


def documents(count: int, seed: int = 0) -> list[str]:
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(LINES, size=generator.integers(1, 10))) for _ in range(count)]


def chats(count: int, seed: int = 0) -> list[tuple[Message, ...]]:
    generator = np.random.default_rng(seed)
    pairs = [map(str, generator.choice(LINES, size=2)) for _ in range(count)]
    return [(Message("user", question), Message("assistant", answer)) for question, answer in pairs]


def make_tokenizer(directory: Path) -> Encoder:
    """The smallest that trains: 256 bytes, the special tokens and a few merges."""
    tokenizer.save(tokenizer.train(LINES, 300), directory)
    return Encoder(directory)


def write_shards(
    directory: Path,
    records: Sequence[tuple[Sequence[int], Sequence[bool]]],
    *,
    kind: str,
    vocab_size: int = VOCAB,
    tokenizer: str = "t",
    tokens_per_shard: int = 10**6,
    groups: Sequence[int] = (),
    weights: Sequence[float] = (),
) -> dict[str, Any]:
    """A set of shards with these (ids, live) records; returns the index.

    A shard ends with the record that fills it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    entries: list[dict[str, Any]] = []
    live = None
    start = 0
    for end in range(1, len(records) + 1):
        rows = [np.asarray(ids) for ids, _ in records[start:end]]
        offsets = np.cumsum([0, *map(len, rows)])
        if offsets[-1] < tokens_per_shard and end < len(records):
            continue
        if kind == "chats":
            live = np.concatenate([np.asarray(mask, np.uint8) for _, mask in records[start:end]])
        column = Column(np.concatenate(rows), offsets, live)
        entry = write_shard(directory / f"{len(entries):016x}.arrow", column, vocab_size)
        group = groups[len(entries)] if groups else 0
        entries.append({**entry, "bytes": 2 * int(offsets[-1]), "group": group})
        start = end
    more = {"tokenizer": tokenizer, **({"weights": list(weights)} if weights else {})}
    return write_index(directory, kind=kind, vocab_size=vocab_size, shards=entries, **more)


def make_shards(directory: Path, encoder: Encoder, kind: str, train: int) -> None:
    for seed, (part, count) in enumerate((("train", train), ("heldout", 12))):
        if kind == "documents":
            texts = documents(count, seed)
            rows = [([encoder.bos_id, *ids, encoder.eos_id], ()) for ids in encoder.encode(texts)]
            records: list[dict[str, Any]] = [{"text": text} for text in texts]
        else:
            talks = chats(count, seed)
            rows = [encode_chat(encoder, messages) for messages in talks]
            records = [{"messages": [vars(message) for message in messages]} for messages in talks]
        common = {"vocab_size": len(encoder), "tokenizer": encoder.digest, "tokens_per_shard": 4096}
        index = write_shards(directory / part, rows, kind=kind, **common)
        lines = iter([json.dumps(record) + "\n" for record in records])
        for shard in index["shards"]:
            shard["records"] = shard["file"].replace(".arrow", ".jsonl")
            text = "".join(itertools.islice(lines, shard["rows"]))
            (directory / part / shard["records"]).write_text(text)
        write_json(directory / part / "index.json", index)


class NumberedRows(Rows):
    """Row n is random tokens under the seed n, in two segments, some labels masked."""

    pad_id = 0

    def __init__(
        self, count: int, row_length: int = 16, live: Sequence[int] = (), vocab: int = VOCAB
    ) -> None:
        self.count = count
        self.row_length = row_length
        self.vocab = vocab
        self._live = live  # live tokens of each row; without them about two thirds

    def __len__(self) -> int:
        return self.count

    def fill(self, rows: Array, batch: Batch, lines: Array) -> None:
        T = self.row_length
        for row, line in zip(rows.tolist(), lines.tolist(), strict=True):
            generator = np.random.default_rng(row)
            ids = generator.integers(9, self.vocab, T + 1)
            border = int(generator.integers(1, T))
            live = generator.random(T) < 2 / 3
            if self._live:
                live = np.arange(T) < self._live[row]
            batch.input_ids_BT[line] = ids[:-1]
            batch.labels_BT[line] = np.where(live, ids[1:], -100)
            batch.positions_BT[line] = np.concatenate([np.arange(border), np.arange(T - border)])
            batch.segments_BT[line] = np.arange(T) >= border

    def counts(self) -> dict[str, int | float]:
        return {"rows": self.count}
