"""Blocks: some megabytes of one input file, encoded into one training shard and one held-out shard by any process.

The output depends on the block's bytes and the recipe alone, so one, two or forty workers write the same files, and a
block that exists already (from a run that was killed, or an artifact that lacks one file) is reused. The small
`run/blocks/<id>.json` is written last: without it the block does not exist.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from ttrain.core.files import read_json
from ttrain.core.hashing import digest_of
from ttrain.data import parquet, shards, streams
from ttrain.data import records as sources
from ttrain.data.chat import encode_chats, encode_preferences, refusal
from ttrain.data.chat_templates import Messages
from ttrain.data.encoder import Encoder
from ttrain.data.preferences import Preference
from ttrain.data.records import Tally
from ttrain.data.shards import Column
from ttrain.errors import CannotRead
from ttrain.store.integrity import home_of, is_intact

PARTS = ("train", "heldout")
BLOCKS = Path("run", "blocks")
SHIPPED_BYTES = 1 << 20
# Texts go to the encoder in groups of this size: a worker of 16 MiB blocks stays below 350 MB.
ENCODED_BYTES = 4_000_000
ENCODED_RECORDS = 20_000  # a million of one letter took 565 MB
UTF8_BOM = b"\xef\xbb\xbf"
BEYOND_LIMIT = "beyond reading.limit"


@dataclass(frozen=True)
class Block:
    """Bytes `start` to `end` of a file, decompressed (row groups, of parquet); `data` where they cannot be read again."""

    location: str
    file: int
    start: int
    end: int
    is_parquet: bool = False
    data: bytes | None = None


@dataclass(frozen=True)
class BlockRecipe:
    """All that determines the output for a block, besides its bytes."""

    kind: str  # "documents", "chats" or "pairs"
    text_field: str
    heldout_fraction: float
    max_line_bytes: int
    tokenizer: str  # directory
    tokenizer_digest: str
    template: str  # digest of the chat template
    code: str
    vocab_size: int = field(default=0, compare=False)
    seed: int = 0
    learn_reasoning: bool = True  # of chats and pairs
    keep_below: int | None = None  # reading.limit leaves out rows whose draw is not lower
    reuse: tuple[str, ...] = field(default=(), compare=False)  # outputs that may hold the block already

    @property
    def digest(self) -> str:
        """Digest of the recipe, independent of the path of the tokenizer."""
        return digest_of([self.digest_of_data, self.code])

    @property
    def digest_of_data(self) -> str:
        """The same digest without the code: shards keep their names if another version writes the same bytes."""
        names = ["kind", "text_field", "heldout_fraction", "max_line_bytes", "tokenizer_digest", "keep_below"]
        names += ["template"] if self.kind != "documents" else []
        names += [] if self.learn_reasoning else ["learn_reasoning"]
        seed = self.seed if self.keep_below is not None else 0
        return digest_of({**{name: getattr(self, name) for name in names}, "seed": seed})

    @property
    def parser(self) -> sources.Parser:
        parse = sources.parser_of(self.kind, self.text_field)
        return parse if self.learn_reasoning else sources.without_reasoning_loss(parse)


def cut(location: str, file: int, block_bytes: int, recipe: BlockRecipe) -> Iterator[Block]:
    """The blocks of a file: each ends with the first line that reaches `block_bytes`; the bytes alone decide."""
    with streams.noting_faults(location):
        if streams.is_parquet(location):
            yield from _cut_parquet(location, file, block_bytes)
        elif streams.is_plain(location):
            yield from _cut_plain(Path(location), file, block_bytes)
        else:
            yield from _cut_stream(location, file, block_bytes, recipe)


def _cut_plain(path: Path, file: int, block_bytes: int) -> Iterator[Block]:
    size, start = path.stat().st_size, 0
    with path.open("rb") as opened:
        while start < size:
            end = start + block_bytes
            opened.seek(end)
            while end < size and (chunk := opened.read(SHIPPED_BYTES)):
                newline = chunk.find(b"\n")
                end += newline + 1 if newline >= 0 else len(chunk)
                if newline >= 0:
                    break
            end = min(end, size)
            yield Block(str(path), file, start, end)
            start = end


def _cut_stream(location: str, file: int, block_bytes: int, recipe: BlockRecipe) -> Iterator[Block]:
    """Cut a decompressed stream into blocks that carry their bytes."""
    data, start = bytearray(), 0
    for chunk in streams.json_lines(location, recipe.text_field):
        searched = len(data)
        data += chunk
        while newline := 1 + data.find(b"\n", max(searched, block_bytes)):
            yield Block(location, file, start, start + newline, data=bytes(data[:newline]))
            del data[:newline]
            start, searched = start + newline, 0
    if data:
        yield Block(location, file, start, start + len(data), data=bytes(data))


def _cut_parquet(location: str, file: int, block_bytes: int) -> Iterator[Block]:
    first = size = 0
    groups = parquet.groups(location)
    for group, (_, group_bytes) in enumerate(groups):
        size += group_bytes
        if size >= block_bytes or group == len(groups) - 1:
            yield Block(location, file, first, group + 1, is_parquet=True)
            first, size = group + 1, 0


def read(block: Block) -> bytes:
    """The block as JSON lines. Raises DataError if it cannot be read."""
    if block.data is not None:
        return block.data
    with streams.noting_faults(block.location):
        if block.is_parquet:
            rows = parquet.lines(block.location, block.start, block.end)
            return b"\n".join(line for _, line in rows)
        with Path(block.location).open("rb") as opened:
            opened.seek(block.start)
            data = opened.read(block.end - block.start)
    if len(data) < block.end - block.start:
        raise CannotRead(f"{block.location} became shorter while it was read; run the same command again")
    return data.removeprefix(UTF8_BOM) if block.start == 0 else data


def draw(content_hash: bytes, seed: int) -> int:
    """A hash below 2**64 of a row, independent of its position: the rows with the lowest draws are a uniform sample."""
    return int.from_bytes(hashlib.blake2b(content_hash, digest_size=8, key=seed.to_bytes(8, "big")).digest(), "big")


def scan(block: Block, recipe: BlockRecipe) -> npt.NDArray[np.uint64]:
    """The draws of all good rows of a block, without encoding or writing anything."""
    rows = records(read(block), block, recipe, Tally())
    return np.array([draw(sources.content_hash(record), recipe.seed) for _, record in rows], np.uint64)


def make(block: Block, recipe: BlockRecipe, output: str) -> tuple[int, str, str, bool]:
    """Make the block's files under `output`, unless they exist there or in one of `recipe.reuse`.

    Returns (number of its file, id, the directory with its files, whether it was encoded now).
    """
    data = read(block)
    content = sources.hash_of(data).hex()
    identity, name = (
        hashlib.blake2b(f"{digest} {content}".encode(), digest_size=size).hexdigest()
        for digest, size in ((recipe.digest, 12), (recipe.digest_of_data, 8))
    )
    for directory in (output, *recipe.reuse):
        if is_built(Path(directory), identity):
            return block.file, identity, directory, False
    _make(data, block, recipe, Path(output), name, identity)
    return block.file, identity, output, True


def is_built(directory: Path, identity: str) -> bool:
    """Whether the directory has the complete block."""
    manifest = read_json(directory / BLOCKS / f"{identity}.json")
    if manifest is None:
        return False
    endings = ["rows", *(["rejected.jsonl"] if manifest["tally"]["rejected"] else [])]
    if not all((directory / BLOCKS / f"{identity}.{ending}").is_file() for ending in endings):
        return False
    files = (
        (file_of(directory, part_name, name), entry)
        for part_name in PARTS
        for name, entry in (manifest[part_name] or {}).get("files", {}).items()
    )
    return all(  # have the bytes that were written, so that no damaged shard goes into a new set
        path.is_file() and path.stat().st_size == entry["bytes"] and is_intact(path, entry["sha256"], home_of(directory))
        for path, entry in files
    )


def file_of(directory: Path, part_name: str, name: str) -> Path:
    """Path of a block's file: in its part, or in `run/blocks` if the part has only a selection of its rows."""
    path = directory / part_name / name
    return path if path.is_file() else directory / BLOCKS / f"{part_name}-{name}"


def records(data: bytes, block: Block, recipe: BlockRecipe, tally: Tally) -> Iterator[tuple[int, sources.Record]]:
    """(line in the block, record) of the good rows of a block's JSON lines; the tally counts the others."""
    pieces = (data[at : at + SHIPPED_BYTES] for at in range(0, len(data), SHIPPED_BYTES))
    lines = sources.lines(pieces, recipe.max_line_bytes)
    parsed = sources.parsed(lines, block.location, tally, recipe.max_line_bytes)
    accepted = sources.accepted(parsed, recipe.parser, tally)
    if recipe.kind == "documents" or not recipe.tokenizer:
        return accepted
    return _rendered(accepted, block, encoder_of(recipe.tokenizer), tally)


def _rendered(
    accepted: Iterable[tuple[int, sources.Record]], block: Block, encoder: Encoder, tally: Tally
) -> Iterator[tuple[int, sources.Record]]:
    """The chats that the chat template renders; the tally counts the others as rejected."""
    if encoder.template != "own":  # the templates of ttrain render every chat
        yield from accepted
        return
    for line, record in accepted:
        reasons = (refusal(encoder, messages) for messages in _conversations(record))
        if reason := next(filter(None, reasons), ""):
            tally.kept -= 1
            tally.reject(block.location, line, reason, orjson.dumps(record.to_json()))
        else:
            yield line, record


def _conversations(record: sources.Record) -> list[Messages]:
    """A chat, or of a preference pair the prompt with each answer."""
    if isinstance(record, Preference):
        return [(*record.prompt, *answer) for answer in (record.chosen, record.rejected) if answer]
    return [record.messages] if isinstance(record, sources.Conversation) else []


def _make(data: bytes, block: Block, recipe: BlockRecipe, output: Path, name: str, identity: str) -> None:
    encoder = encoder_of(recipe.tokenizer)
    bad_rows, rows = list[dict[str, Any]](), list[bytes]()
    tally = Tally(quarantine=bad_rows.append)
    threshold = round(recipe.heldout_fraction * 2**64)
    parts = {part_name: _ShardBuilder(encoder, recipe.kind, keep_text=part_name == "heldout") for part_name in PARTS}
    for line, record in records(data, block, recipe, tally):
        content_hash = sources.content_hash(record)
        if recipe.keep_below is not None and draw(content_hash, recipe.seed) >= recipe.keep_below:
            tally.leave_out(BEYOND_LIMIT, 1)
            continue
        heldout = int.from_bytes(content_hash[: sources.PLACE_BYTES], "big") < threshold
        size = len(text_of(record).encode("utf-8"))
        parts["heldout" if heldout else "train"].add(record, size)
        rows.append(content_hash + size.to_bytes(8, "big") + line.to_bytes(8, "big"))
    files: list[tuple[Path, Any]] = [(output / BLOCKS / f"{identity}.rows", b"".join(rows))]
    if tally.rejected:
        lines = b"".join(orjson.dumps(row) + b"\n" for row in bad_rows)
        files.append((output / BLOCKS / f"{identity}.rejected.jsonl", lines))
    manifest = {
        "encoder": encoder.kind,
        "lines": tally.lines,
        "tally": {**tally.to_json(), "keys_seen": dict(tally.keys_seen)},
        "threshold": threshold,
        **{part_name: parts[part_name].files(output / part_name, name, files) for part_name in PARTS},
    }
    files.append((output / BLOCKS / f"{identity}.json", json.dumps(manifest).encode()))  # the last one makes the block exist
    shards.write_files(files)


@lru_cache(maxsize=2)
def encoder_of(directory: str) -> Encoder:
    """The encoder of a tokenizer, opened once per process."""
    return Encoder(Path(directory))


def encode_records(encoder: Encoder, kind: str, records: Sequence[sources.Record]) -> Column:
    """Encode documents with their begin and end tokens, or chats and pairs with their loss mask."""
    if kind == "pairs":
        preferences = [record for record in records if isinstance(record, Preference)]
        return _column(encode_preferences(encoder, [(pair.prompt, pair.chosen, pair.rejected) for pair in preferences]))
    if kind == "chats":
        return _column(
            encode_chats(encoder, [record.messages for record in records if isinstance(record, sources.Conversation)])
        )
    ids, offsets = encoder.encode_flat([record.text for record in records if isinstance(record, sources.TextDocument)])
    offsets = offsets + 2 * np.arange(len(offsets))
    tokens = np.empty(offsets[-1], shards.token_dtype(len(encoder)))
    inside = np.ones(len(tokens), np.bool_)
    inside[offsets[:-1]] = inside[offsets[1:] - 1] = False
    tokens[inside] = ids
    tokens[offsets[:-1]], tokens[offsets[1:] - 1] = encoder.bos_id, encoder.eos_id
    return Column(tokens, offsets)


def _column(encoded: Sequence[tuple[npt.NDArray[Any], ...]]) -> Column:
    """The records, each as its ids, loss mask and, of pairs, branches."""
    offsets = shards.offsets_of([len(arrays[0]) for arrays in encoded])
    ids, live, *branches = (np.concatenate(arrays) for arrays in zip(*encoded, strict=True))
    return Column(ids, offsets, live, *branches)


def text_of(record: sources.Record) -> str:
    """The whole text of a record."""
    return record.text if isinstance(record, sources.TextDocument) else "".join(turn.content for turn in record.messages)


class _ShardBuilder:
    """Collects the records of one shard and encodes them in groups."""

    def __init__(self, encoder: Encoder, kind: str, *, keep_text: bool) -> None:
        self._encoder, self._kind, self._keep_text = encoder, kind, keep_text
        self._pending: list[sources.Record] = []
        self._pending_bytes = self._bytes = 0
        self._done: list[Column] = []
        self._weights: list[float] = []
        self._lines: list[bytes] = []

    def add(self, record: sources.Record, size: int) -> None:
        """Add a record whose text has `size` bytes."""
        self._pending.append(record)
        self._weights.append(record.weight)
        self._pending_bytes, self._bytes = self._pending_bytes + size, self._bytes + size
        if self._keep_text:
            self._lines.append(orjson.dumps(record.to_json()) + b"\n")
        if self._pending_bytes >= ENCODED_BYTES or len(self._pending) >= ENCODED_RECORDS:
            self._encode()

    def files(self, directory: Path, name: str, files: list[tuple[Path, Any]]) -> dict[str, Any] | None:
        """Add the shard, and the held-out records as text, to `files`; returns its entry, or None if there is no record."""
        self._encode()
        if not self._done:
            return None
        column = concatenate(self._done)
        if not self._keep_text and any(weight != 1 for weight in self._weights):  # what is held out is not drawn
            column = replace(column, weights=np.array(self._weights))
        entry, data = shards.shard_of(f"{name}.arrow", column, len(self._encoder))
        added: list[tuple[Path, Any]] = [(directory / entry["file"], data)]
        if self._keep_text:
            entry["records"] = f"{name}.jsonl"
            added.append((directory / entry["records"], b"".join(self._lines)))
        files += added
        checks = {path.name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for path, data in added[1:]}
        checks[entry["file"]] = {"bytes": len(data), "sha256": entry["sha256"]}
        return {**entry, "bytes": self._bytes, "files": checks}

    def _encode(self) -> None:
        if not self._pending:
            return
        self._done.append(encode_records(self._encoder, self._kind, self._pending))
        self._pending, self._pending_bytes = [], 0


def concatenate(columns: Sequence[Column]) -> Column:
    """Concatenate the records of several columns."""
    lengths = np.concatenate([np.diff(column.offsets) for column in columns])
    masks = [[column.live for column in columns], [column.branches for column in columns]]
    return Column(
        np.concatenate([column.tokens for column in columns]),
        shards.offsets_of(lengths),
        *(None if mask[0] is None else np.concatenate([flags for flags in mask if flags is not None]) for mask in masks),
    )
