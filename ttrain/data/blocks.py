"""Blocks: some megabytes of an input file, encoded into a training and a held-out shard.

The block's bytes and the recipe alone decide the output, so any number of workers writes the same
files, and a block that exists is reused. It is the directory `run/blocks/<id>`; its `block.json`
is written last: without it the block does not exist.
"""

import codecs
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import orjson

from ttrain.core.files import JsonDict, read_json
from ttrain.core.hashing import digest_of
from ttrain.data import json_rows, locations, shards, streams
from ttrain.data import records as sources
from ttrain.data.chat import encode_chats, encode_preferences, refusal
from ttrain.data.encoder import Encoder
from ttrain.data.packing import Flags, Ids, Words
from ttrain.data.preferences import Preference
from ttrain.data.shards import Column
from ttrain.errors import CannotRead
from ttrain.store.integrity import home_of, is_intact

Table = Words  # of rows: hash, hash, bytes of text, line of the block

PARTS = ("train", "heldout")
BLOCKS = Path("run", "blocks")
MANIFEST, ROWS, BAD_ROWS, HELDOUT_RECORDS = "block.json", "rows", "rejected.jsonl", "heldout.jsonl"
# Texts go to the encoder in groups of this size: a worker of 16 MiB blocks stays below 350 MB.
ENCODED_BYTES = 4_000_000
RECORD_BYTES = 200  # of a record, without its text: a million of one letter took 565 MB at once
BEYOND_LIMIT = "beyond reading.limit"


@dataclass(frozen=True)
class DataFile:
    """An input file: its location, and the number of its weighted source."""

    location: str
    group: int = 0

    @property
    def name(self) -> str:
        """The name for reports."""
        return locations.name(self.location)


# "train" and, if the user names such files, "heldout"
FilesByRole = Mapping[str, Sequence[DataFile]]


@dataclass(frozen=True)
class Block:
    """Bytes `start` to `end` of a file, decompressed; of parquet, row groups."""

    location: str
    file: int
    start: int
    end: int
    is_parquet: bool = False
    data: bytes | None = None  # where the bytes cannot be read again


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
    # Outputs that may hold the block already.
    reuse: tuple[str, ...] = field(default=(), compare=False)

    @property
    def digest(self) -> str:
        """Digest of the recipe, independent of the path of the tokenizer."""
        return digest_of([self.digest_of_data, self.code])

    @property
    def digest_of_data(self) -> str:
        """The digest without the code: another version may write the same bytes."""
        names = [
            "kind",
            "text_field",
            "heldout_fraction",
            "max_line_bytes",
            "tokenizer_digest",
            "keep_below",
        ]
        names += ["template"] if self.kind != "documents" else []
        names += [] if self.learn_reasoning else ["learn_reasoning"]
        values = {name: getattr(self, name) for name in names}
        return digest_of({**values, "seed": 0 if self.keep_below is None else self.seed})

    @property
    def parser(self) -> sources.Parser:
        """The parser of rows; rejects chats that the tokenizer's own template refuses."""
        parse = sources.parser_of(self.kind, self.text_field)
        if self.kind == "documents":
            return parse
        encoder = encoder_of(self.tokenizer)

        def parse_chat(row: JsonDict) -> sources.Record | sources.Skipped | sources.Rejected:
            record = parse(row)
            if not isinstance(record, sources.Conversation | Preference):
                return record
            conversations = (
                [record.messages]
                if isinstance(record, sources.Conversation)
                else [
                    (*record.prompt, *answer)
                    for answer in (record.chosen, record.rejected)
                    if answer
                ]
            )
            refusals = (refusal(encoder, messages) for messages in conversations)
            # The templates of ttrain render every chat.
            if encoder.template == "own" and (reason := next(filter(None, refusals), "")):
                return sources.Rejected(reason)
            return record if self.learn_reasoning else sources.without_reasoning_loss(record)

        return parse_chat


def cut(location: str, file: int, block_bytes: int, recipe: BlockRecipe) -> Iterator[Block]:
    """The blocks of a file; each ends with the first line that reaches `block_bytes`."""
    start = 0
    with streams.noting_faults(location):
        if streams.is_parquet(location):
            size = 0
            groups = streams.row_groups(location)
            for end, (_, group_bytes) in enumerate(groups, start=1):
                size += group_bytes
                if size >= block_bytes or end == len(groups):
                    yield Block(location, file, start, end, is_parquet=True)
                    start = end
                    size = 0
        elif streams.is_plain(location):
            path = Path(location)
            size = path.stat().st_size
            with path.open("rb") as opened:
                while start < size:
                    opened.seek(start + block_bytes)
                    opened.readline()
                    end = min(opened.tell(), size)
                    yield Block(str(path), file, start, end)
                    start = end
        else:
            data = bytearray()
            for chunk in streams.json_lines(location, recipe.text_field):
                data += chunk
                while newline := 1 + data.find(b"\n", block_bytes):
                    yield Block(location, file, start, start + newline, data=bytes(data[:newline]))
                    del data[:newline]
                    start += newline
            if data:
                yield Block(location, file, start, start + len(data), data=bytes(data))


def read(block: Block) -> bytes:
    """The block as JSON lines. Raises DataError if it cannot be read."""
    if block.data is not None:
        return block.data
    with streams.noting_faults(block.location):
        if block.is_parquet:
            rows = streams.parquet_lines(block.location, block.start, block.end)
            return b"\n".join(line for _, line in rows)
        with Path(block.location).open("rb") as opened:
            opened.seek(block.start)
            data = opened.read(block.end - block.start)
    if len(data) < block.end - block.start:
        raise CannotRead(
            f"{block.location} became shorter while it was read; run the same command again"
        )
    return data.removeprefix(codecs.BOM_UTF8) if block.start == 0 else data


def draw(content_hash: bytes, seed: int) -> int:
    """A hash below 2**64 of a row's content; the lowest draws are a uniform sample."""
    hashed = hashlib.blake2b(content_hash, digest_size=8, key=seed.to_bytes(8, "big"))
    return int.from_bytes(hashed.digest(), "big")


def scan(block: Block, recipe: BlockRecipe) -> Words:
    """The draws of all good rows of a block; encodes and writes nothing."""
    rows = records(read(block), block, recipe, json_rows.Tally())
    return np.array(
        [draw(sources.content_hash(record), recipe.seed) for _, record in rows], np.uint64
    )


def make(block: Block, recipe: BlockRecipe, output: Path) -> tuple[int, Path, bool]:
    """Make the block under `output`, unless it is there or in one of `recipe.reuse`.

    Returns (number of its file, its directory, whether it was encoded now).
    """
    data = read(block)
    content = sources.hash_of(data).hex()
    identity = _digest(recipe.digest, content, size=12)
    for parent in (output, *map(Path, recipe.reuse)):
        directory = parent / BLOCKS / identity
        if is_built(directory):
            return block.file, directory, False
    directory = output / BLOCKS / identity
    _make(data, block, recipe, directory, _digest(recipe.digest_of_data, content, size=8))
    return block.file, directory, True


def table_of(data: bytes, columns: int = 4) -> Table:
    """Rows of numbers of 8 bytes each, the highest byte first."""
    return np.frombuffer(data, ">u8").astype(np.uint64).reshape(-1, columns)


def _digest(recipe: str, content: str, *, size: int) -> str:
    return hashlib.blake2b(f"{recipe} {content}".encode(), digest_size=size).hexdigest()


def is_built(directory: Path) -> bool:
    """Whether the block is there with the bytes that were written."""
    manifest = read_json(directory / MANIFEST)
    home = home_of(directory.parents[2])
    return manifest is not None and all(
        is_intact(directory / name, sha, home) for name, sha in manifest["files"].items()
    )


def records(
    data: bytes, block: Block, recipe: BlockRecipe, tally: json_rows.Tally
) -> Iterator[tuple[int, sources.Record]]:
    """(line in the block, record) of the good rows; the tally counts the others."""
    lines = json_rows.lines([data], recipe.max_line_bytes)
    parsed = json_rows.parsed(lines, block.location, tally, recipe.max_line_bytes)
    return sources.accepted(parsed, recipe.parser, tally)


def _make(data: bytes, block: Block, recipe: BlockRecipe, directory: Path, name: str) -> None:
    encoder = encoder_of(recipe.tokenizer)
    lines: dict[str, list[bytes]] = {ROWS: [], BAD_ROWS: [], HELDOUT_RECORDS: []}
    tally = json_rows.Tally(
        quarantine=lambda row: lines[BAD_ROWS].append(orjson.dumps(row) + b"\n")
    )
    threshold = round(recipe.heldout_fraction * 2**64)
    weights: list[float] = []
    waiting: dict[str, list[sources.Record]] = {part_name: [] for part_name in PARTS}
    columns: dict[str, list[Column]] = {part_name: [] for part_name in PARTS}
    sizes: Counter[str] = Counter()
    waiting_bytes: Counter[str] = Counter()

    def encode(part_name: str) -> None:
        columns[part_name].append(encode_records(encoder, recipe.kind, waiting[part_name]))
        waiting[part_name].clear()
        waiting_bytes[part_name] = 0

    for line, record in records(data, block, recipe, tally):
        content_hash = sources.content_hash(record)
        if recipe.keep_below is not None and draw(content_hash, recipe.seed) >= recipe.keep_below:
            tally.leave_out(BEYOND_LIMIT, 1)
            continue
        size = len(text_of(record).encode("utf-8"))
        lines[ROWS].append(content_hash + size.to_bytes(8, "big") + line.to_bytes(8, "big"))
        part_name = "train"
        if int.from_bytes(content_hash[: sources.PLACE_BYTES], "big") < threshold:
            part_name = "heldout"
            lines[HELDOUT_RECORDS].append(orjson.dumps(record.to_json()) + b"\n")
        else:  # what is held out is not drawn
            weights.append(record.weight)
        waiting[part_name].append(record)
        sizes[part_name] += size
        waiting_bytes[part_name] += size + RECORD_BYTES
        if waiting_bytes[part_name] >= ENCODED_BYTES:
            encode(part_name)
    files = {file: b"".join(parts) for file, parts in lines.items()}
    manifest: JsonDict = {"tally": tally.counts(), "threshold": threshold, **dict.fromkeys(PARTS)}
    for part_name in PARTS:
        if waiting[part_name]:
            encode(part_name)
        if columns[part_name]:
            column = replace(
                shards.concatenate(columns[part_name]),
                weights=np.array(weights) if part_name == "train" else None,
            )
            entry, files[f"{part_name}.arrow"] = shards.shard_of(
                f"{name}.arrow", column, len(encoder)
            )
            manifest[part_name] = {**entry, "bytes": sizes[part_name]}
    manifest["files"] = {file: hashlib.sha256(data).hexdigest() for file, data in files.items()}
    files[MANIFEST] = json.dumps(manifest).encode()  # the last one makes the block exist
    shards.write_files([(directory / file, data) for file, data in files.items()])


@lru_cache(maxsize=2)
def encoder_of(directory: str) -> Encoder:
    """The encoder of a tokenizer, opened once per process."""
    return Encoder(Path(directory))


def encode_records(encoder: Encoder, kind: str, records: Sequence[sources.Record]) -> Column:
    """Encode documents with their begin and end tokens, chats and pairs with masks."""
    if kind == "pairs":
        sides = [
            (pair.prompt, pair.chosen, pair.rejected)
            for pair in records
            if isinstance(pair, Preference)
        ]
        return _column(encode_preferences(encoder, sides))
    if kind == "chats":
        chats = [chat.messages for chat in records if isinstance(chat, sources.Conversation)]
        return _column(encode_chats(encoder, chats))
    ids, offsets = encoder.encode_flat(list(map(text_of, records)))
    offsets = offsets + 2 * np.arange(len(offsets))
    tokens = np.full(offsets[-1], encoder.eos_id, shards.token_dtype(len(encoder)))
    inside = np.ones(len(tokens), np.bool_)
    inside[offsets[:-1]] = inside[offsets[1:] - 1] = False
    tokens[inside] = ids
    tokens[offsets[:-1]] = encoder.bos_id
    return Column(tokens, offsets)


def _column(encoded: Sequence[tuple[Ids, ...]]) -> Column:
    offsets = shards.offsets_of([len(arrays[0]) for arrays in encoded])
    ids, live, *branches = (np.concatenate(arrays) for arrays in zip(*encoded, strict=True))
    return Column(ids, offsets, live, *branches)


def text_of(record: sources.Record) -> str:
    """The whole text of a record."""
    return (
        record.text
        if isinstance(record, sources.TextDocument)
        else "".join(turn.content for turn in record.messages)
    )


@dataclass
class BuiltBlock:
    """A finished block: its directory, its manifest, and which of its rows are selected."""

    role: str
    file: int
    source: DataFile
    directory: Path
    encoded: bool
    manifest: JsonDict
    rows: Table
    lines_before: int  # of the file
    selected: Flags = field(default_factory=lambda: np.zeros(0, np.bool_))

    def shard(self, part_name: str) -> Path:
        """The file with the rows of a part, in their order."""
        return self.directory / f"{part_name}.arrow"

    @property
    def is_heldout(self) -> Flags:
        if (threshold := self.manifest["threshold"]) < 2**64:
            return self.rows[:, 0] < np.uint64(threshold)
        return np.ones(len(self.rows), np.bool_)

    def in_part(self, part_name: str) -> Flags:
        """A flag per row: whether it is in "train", or in "heldout"."""
        return self.is_heldout if part_name == "heldout" else ~self.is_heldout

    def line_of(self, row: int) -> int:
        """The line of a row in its file."""
        return self.lines_before + int(self.rows[row, 3])
