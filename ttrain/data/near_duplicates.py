"""Near-duplicate documents: MinHash proposes pairs, the exact Jaccard of their shingles decides.

A document is dropped for one that is kept and precedes it, never for one that was dropped, so that
a chain of small edits does not join two different texts. A shingle is SHINGLE_BYTES of plain text
at any byte, with or without spaces; a shorter document is one shingle, one without letters none.

The sketch of a document is a number for each band of its MinHash values, as in
https://arxiv.org/abs/2107.06499, appendix A: 84 bytes at a threshold of 0.8. The sketches of a
shard are a file in `run/near`, named by the digests of shard, tokenizer and rule, and reused.
"""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from ttrain.core.files import JsonDict, write_bytes
from ttrain.core.hashing import digest_of
from ttrain.data import shards
from ttrain.data.blocks import PARTS, BlockRecipe, BuiltBlock, encoder_of
from ttrain.data.packing import Array, Flags, Words
from ttrain.data.plain_text import plain
from ttrain.data.pool import Pool

NEAR_DUPLICATE = "near-duplicate"  # the rule's name in the counts
FOLDER = Path("run", "near")
REPORT = Path("run", "near_duplicates.jsonl")
SHINGLE_BYTES = 24  # eight Chinese characters, or four to five English words
WORD_BYTES = 8
# Odd numbers without a pattern: of the golden ratio, and of splitmix64
# (https://doi.org/10.1145/2660193.2660195).
FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
FORMAT = 3  # of sketches: another one where the values of a text change
VALUES = 128  # MinHash values of a document
MOST_MISSED = 0.002  # of the pairs that are exactly as similar as the threshold
# Kept documents of a band to compare with: ten thousand alike must not cost their square.
MOST_IN_BAND = 64
# Documents that one is compared with exactly, those with most bands in common first.
MOST_COMPARED = 16
SLICE = 1 << 9  # shingles hashed at a time: all their values stay in the cache

Values = npt.NDArray[np.uint32]


class SketchedShard(NamedTuple):
    """A shard, and the ascending positions of its documents in the order of all."""

    path: Path
    sha256: str
    positions: Array


class NearDuplicate(NamedTuple):
    """A dropped document, the one that stays for it (both by position), and their Jaccard."""

    position: int
    original: int
    jaccard: float


def _hashes(text: bytes) -> Words:
    padded = text and text.ljust(SHINGLE_BYTES, b"\0")
    words: Words = np.ndarray(max(0, len(padded) - WORD_BYTES + 1), "<u8", padded, strides=(1,))
    hashes = words[: -2 * WORD_BYTES] * np.uint64(FACTORS[0])
    hashes += words[WORD_BYTES:-WORD_BYTES] * np.uint64(FACTORS[1])
    hashes += words[2 * WORD_BYTES :] * np.uint64(FACTORS[2])
    return hashes


def rows_of_bands(threshold: float) -> int:
    """MinHash values of a band: the most that miss at most MOST_MISSED pairs at the threshold."""
    fitting = (
        rows
        for rows in range(16, 1, -1)
        if (1 - threshold**rows) ** (VALUES // rows) <= MOST_MISSED
    )
    return next(fitting, 2)


def sketches_of(texts: Sequence[bytes], rows: int) -> Values:
    """The keys of the bands of plain texts, of shape [bands, texts]."""
    drawn = np.frombuffer(hashlib.shake_128(b"ttrain near-duplicates").digest(8 * VALUES), "<u4")
    columns = drawn.astype(np.uint32)[:, None]
    factors = columns[:VALUES] | np.uint32(1)  # odd
    summands = columns[VALUES:]
    lowest = np.full((len(texts), VALUES), 2**32 - 1, np.uint32)
    for number, text in enumerate(texts):
        mixed = _hashes(text)  # to 32 well mixed bits, by the finalizer of splitmix64
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(FACTORS[1])
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(FACTORS[2])
        bits = (mixed >> np.uint64(32)).astype(np.uint32)
        for start in range(0, len(bits), SLICE):
            values = factors * bits[None, start : start + SLICE] + summands
            np.minimum(lowest[number], values.min(axis=1), out=lowest[number])
    bands = lowest[:, : VALUES // rows * rows].reshape(len(texts), VALUES // rows, rows)
    weights = np.uint64(FACTORS[0]) * (2 * np.arange(rows, dtype=np.uint64) + np.uint64(1))
    keys: Words = (bands * weights).sum(axis=2, dtype=np.uint64)
    return (keys.T >> np.uint64(32)).astype(np.uint32)


def sketches_of_shard(
    shard: Path, tokenizer: str, rows: int, folders: Sequence[Path], name: str
) -> Values:
    """The sketches of a shard, read from the first folder that has them, or made and written."""
    column = shards.read_shard(shard)
    shape = (VALUES // rows, len(column))
    for file in (folder / name for folder in folders):
        if file.is_file() and file.stat().st_size == 4 * math.prod(shape):
            return np.fromfile(file, "<u4").reshape(shape)
    sketches = sketches_of([_plain(column, n, tokenizer) for n in range(len(column))], rows)
    shards.write_files([(folders[0] / name, sketches.astype("<u4").tobytes())])
    return sketches


def _plain(column: shards.Column, record: int, tokenizer: str) -> bytes:
    ids = column.tokens[column.offsets[record] : column.offsets[record + 1]]
    return plain(encoder_of(tokenizer).decode(ids.tolist()))


def near_duplicates(
    sketches: Values,
    present: Flags,
    droppable: Flags,
    shingles: Callable[[int], Words],
    threshold: float,
) -> list[NearDuplicate]:
    """Compare documents that share a band with those kept before; return those dropped."""
    # Only bands that another document shares, of which one may be dropped.
    shared = np.zeros(sketches.shape, np.bool_)
    eligible = np.flatnonzero(present)
    for number, keys in enumerate(sketches[:, eligible]):
        _, groups, sizes = np.unique(keys, return_inverse=True, return_counts=True)
        may_drop = np.bincount(groups, weights=droppable[eligible], minlength=len(sizes)) > 0
        shared[number, eligible] = ((sizes > 1) & may_drop)[groups]
    kept: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # by number and key of a band
    dropped: list[NearDuplicate] = []
    for position in np.flatnonzero(shared.any(axis=0)).tolist():
        numbers = np.flatnonzero(shared[:, position])
        bands = list(zip(numbers.tolist(), sketches[numbers, position].tolist(), strict=True))
        alike = Counter(n for band in bands if droppable[position] for n in kept[band])
        hashes = shingles(position) if alike else np.zeros(0, np.uint64)
        for _, original in sorted((-n, other) for other, n in alike.items())[:MOST_COMPARED]:
            others = shingles(original)
            common = len(np.intersect1d(hashes, others, assume_unique=True))
            jaccard = common / max(1, len(hashes) + len(others) - common)
            if jaccard >= threshold:
                dropped.append(NearDuplicate(position, original, jaccard))
                break
        else:
            for band in bands:
                if len(kept[band]) < MOST_IN_BAND:
                    kept[band].append(position)
    return dropped


class NearDuplicateSearch:
    """Finds near-duplicates among earlier sets and then blocks."""

    def __init__(
        self,
        output: Path,
        built_blocks: Sequence[BuiltBlock],
        recipe: BlockRecipe,
        threshold: float,
        earlier: Sequence[Path],
        pool: Pool,
    ) -> None:
        """Make the missing sketches of all shards, in any process."""
        self.output = output
        self.built_blocks = built_blocks
        self.recipe = recipe
        self.threshold = threshold
        self.shards: list[SketchedShard] = []
        rows = 0
        for directory in (origin / part_name for origin in earlier for part_name in PARTS):
            for entry in shards.ShardSet(directory, recipe.tokenizer_digest).entries:
                positions = np.arange(rows, rows + entry["rows"])
                self.shards.append(
                    SketchedShard(directory / entry["file"], entry["sha256"], positions)
                )
                rows += entry["rows"]
        self.old_rows = rows
        self.starts = rows + shards.offsets_of([len(block.rows) for block in built_blocks])
        for block, start in zip(built_blocks, self.starts.tolist(), strict=False):
            for part_name in PARTS:
                if entry := block.manifest[part_name]:
                    positions = start + np.flatnonzero(block.in_part(part_name))
                    self.shards.append(
                        SketchedShard(block.shard(part_name), entry["sha256"], positions)
                    )
        self._column = lru_cache(maxsize=64)(shards.read_shard)  # each has a file descriptor
        band_rows = rows_of_bands(threshold)
        bands = VALUES // band_rows
        self.sketches = np.zeros((bands, self.starts[-1]), np.uint32)
        self.shard_of = np.zeros(self.starts[-1], np.int64)  # the number of each document's shard
        folders = [folder / FOLDER for folder in (output, *map(Path, recipe.reuse), *earlier)]
        kind = [FORMAT, recipe.tokenizer_digest, bands, band_rows]
        names = [f"{digest_of([shard.sha256, *kind])[:24]}.near" for shard in self.shards]
        tasks = (
            (shard.path, recipe.tokenizer, band_rows, folders, name)
            for shard, name in zip(self.shards, names, strict=True)
        )
        for number, sketches in enumerate(pool.map(sketches_of_shard, tasks)):
            positions = self.shards[number].positions
            self.sketches[:, positions] = sketches
            self.shard_of[positions] = number
        for path in (output / FOLDER).glob("*"):
            if path.name not in names:
                path.unlink()

    def find(self, present: Flags, droppable: Flags) -> tuple[Flags, JsonDict]:
        """(whether each row of the blocks is a near-duplicate, counts); writes REPORT.

        Only `present` rows are originals, and of near-duplicates only `droppable` ones are dropped.
        """
        old = np.ones(self.old_rows, np.bool_)
        present = np.append(old, present)
        droppable = np.append(~old, droppable)
        dropped = near_duplicates(self.sketches, present, droppable, self.shingles, self.threshold)
        lines: list[bytes] = []
        for near in dropped:
            original = {
                "original": self._place(near.original),
                "similarity": round(near.jaccard, 4),
            }
            lines.append(orjson.dumps(self._place(near.position) | original) + b"\n")
        write_bytes(self.output / REPORT, b"".join(lines))
        flags = np.zeros_like(present)
        flags[[near.position for near in dropped]] = True
        return flags[self.old_rows :], {
            "threshold": self.threshold,
            "dropped": len(dropped),
            "of_earlier_sets": sum(near.original < self.old_rows for near in dropped),
        }

    def shingles(self, position: int) -> Words:
        """The distinct hashed shingles of the document at a position."""
        shard, record = self._stored(position)
        return np.unique(_hashes(_plain(self._column(shard.path), record, self.recipe.tokenizer)))

    def _stored(self, position: int) -> tuple[SketchedShard, int]:
        shard = self.shards[self.shard_of[position]]
        return shard, int(shard.positions.searchsorted(position))

    def _place(self, position: int) -> JsonDict:
        if position < self.old_rows:
            shard, record = self._stored(position)
            *_, stage, key, part_name, file = shard.path.parts
            return {"set": f"{stage}/{key}", "shard": f"{part_name}/{file}", "row": record}
        number = int(self.starts.searchsorted(position, "right")) - 1
        block = self.built_blocks[number]
        return {
            "file": block.source.name,
            "line": block.line_of(position - int(self.starts[number])),
        }
