"""Near-duplicate documents: MinHash proposes pairs, the exact Jaccard of their shingles decides, the earlier one stays.

A shingle is SHINGLE_BYTES of plain text (`overlap.plain`) at any byte: four to five English words or eight Chinese
characters, so that one rule serves both, and a text without spaces too. A document shorter than that is one shingle; one
without letters has none and is never a near-duplicate. A document is dropped for one that is kept and stands before it,
never for one that was dropped, so that no chain of small edits joins two different texts.

Bands of MinHash values (https://arxiv.org/abs/2107.06499, appendix A, does the same) are stored as one number each, 84 bytes
a document at a threshold of 0.8. Exact up to equal 64-bit hashes of different shingles.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ttrain.core.hashing import digest_of
from ttrain.data import overlap, shards
from ttrain.data.overlap import Bytes, Hashes, Places

NEAR_DUPLICATE = "near-duplicate"  # the rule's name in the counts
SHINGLE_BYTES = 24  # eight Chinese characters, or four to five English words
WORD_BYTES = 8
# Odd numbers without a pattern: of the golden ratio, and of splitmix64 (https://doi.org/10.1145/2660193.2660195).
FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
FORMAT = 2  # of sketches: another one where the values of a text change
VALUES = 128  # MinHash values of a document
MOST_MISSED = 0.002  # of the pairs that are exactly as similar as the threshold
MOST_IN_BAND = 64  # kept documents of a band to compare with: ten thousand that are alike must not cost their square
MOST_COMPARED = 16  # documents that one is compared with exactly, those with most bands in common first
SLICE = 1 << 15  # shingles at a time, so that intermediate values stay in the cache
DIGEST_BYTES = 16

Flags = npt.NDArray[np.bool_]
Values = npt.NDArray[np.uint32]
Owners = npt.NDArray[np.int32]  # numbers of documents, in order


@dataclass(frozen=True)
class SimilarityRule:
    """The Jaccard similarity from which a document is a near-duplicate, and the bands of MinHash values that find it."""

    threshold: float

    @property
    def rows(self) -> int:
        """Values of a band: the most with which at most MOST_MISSED of the pairs at the threshold share no band."""
        fitting = (rows for rows in range(16, 1, -1) if (1 - self.threshold**rows) ** (VALUES // rows) <= MOST_MISSED)
        return next(fitting, 2)

    @property
    def bands(self) -> int:
        return VALUES // self.rows


class NearDuplicate(NamedTuple):
    """A document that is dropped, the one that stays for it, and their similarity; both by position in one order."""

    position: int
    original: int
    jaccard: float


def shingles_of(plain: bytes) -> Hashes:
    """Sorted distinct hashes of the shingles of a plain text."""
    hashes = _shingle_hashes(np.frombuffer(_padded(plain), np.uint8))
    hashes.sort()  # in place: for 20 MB of text np.unique takes 0.8 GB more, and five times as long
    distinct = np.ones(len(hashes), np.bool_)
    distinct[1:] = hashes[1:] != hashes[:-1]
    return hashes if distinct.all() else hashes[distinct]


def _padded(plain: bytes) -> bytes:
    """The text, filled up to one shingle with zeros, which no plain text has; a text without letters has none."""
    return plain and plain.ljust(SHINGLE_BYTES, b"\0")


def _shingle_hashes(data: Bytes) -> Hashes:
    """The hash of the SHINGLE_BYTES at each position, slice by slice: a text of 20 MB has 160 MB of them."""
    hashes = np.empty(max(0, len(data) - SHINGLE_BYTES + 1), np.uint64)
    for start in range(0, len(hashes), SLICE):
        hashes[start : start + SLICE] = _hashes(data[start : start + SLICE + SHINGLE_BYTES - 1])
    return hashes


def _hashes(data: Bytes) -> Hashes:
    """Hash the SHINGLE_BYTES at each position: a sum of three products, of which the high bits are used."""
    word_values: Hashes = np.ndarray(len(data) - WORD_BYTES + 1, "<u8", np.ascontiguousarray(data), strides=(1,))
    hashes = word_values[: -2 * WORD_BYTES] * np.uint64(FACTORS[0])
    hashes += word_values[WORD_BYTES:-WORD_BYTES] * np.uint64(FACTORS[1])
    hashes += word_values[2 * WORD_BYTES :] * np.uint64(FACTORS[2])
    return hashes


def jaccard(first: Hashes, second: Hashes) -> float:
    """Shingles that both have, as a share of those that one of them has."""
    small, large = sorted((first, second), key=len)
    if not len(small):
        return 0.0
    places = np.minimum(large.searchsorted(small), len(large) - 1)
    common = int((large[places] == small).sum())
    return common / (len(first) + len(second) - common)


def sketches_of(texts: Sequence[bytes], rule: SimilarityRule) -> Values:
    """The key of each band of each plain text, of shape [bands, texts]."""
    padded = [_padded(text) for text in texts]
    flat = _shingle_hashes(np.frombuffer(b"".join(padded), np.uint8))
    inside, windows, start = np.zeros(len(flat), np.bool_), list[int](), 0
    for text in padded:
        windows.append(max(0, len(text) - SHINGLE_BYTES + 1))
        inside[start : start + windows[-1]] = True
        start += len(text)
    flat = flat[inside]  # frees those between texts before `owners` is made
    return _band_keys(flat, np.repeat(np.arange(len(texts), dtype=np.int32), windows), len(texts), rule)


def _mixed(hashes: Hashes) -> Values:
    """32 well mixed bits of each hash (the finalizer of splitmix64)."""
    mixed = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(FACTORS[1])
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(FACTORS[2])
    return (mixed >> np.uint64(32)).astype(np.uint32)


@cache
def _factors() -> tuple[Values, Values]:
    """An odd factor and a summand for each MinHash value."""
    drawn = np.frombuffer(hashlib.shake_128(b"ttrain near-duplicates").digest(8 * VALUES), "<u4").astype(np.uint32)
    return drawn[:VALUES] | np.uint32(1), drawn[VALUES:]


def _band_keys(hashes: Hashes, owners: Owners, documents: int, rule: SimilarityRule) -> Values:
    """The key of each band of MinHash values, of shape [bands, documents]."""
    used = rule.bands * rule.rows
    lowest = np.full((used, documents), 2**32 - 1, np.uint32)
    factors, summands = _factors()
    for start in range(0, len(hashes), SLICE):
        mixed, of = _mixed(hashes[start : start + SLICE]), owners[start : start + SLICE]
        firsts = np.flatnonzero(np.r_[True, of[1:] != of[:-1]])
        columns, value = of[firsts], np.empty_like(mixed)
        for number in range(used):
            np.multiply(mixed, factors[number], out=value)
            value += summands[number]
            lowest[number, columns] = np.minimum(lowest[number, columns], np.minimum.reduceat(value, firsts))
    bands = lowest.reshape(rule.bands, rule.rows, documents).astype(np.uint64)
    weights = np.uint64(FACTORS[0]) * (2 * np.arange(rule.rows, dtype=np.uint64) + np.uint64(1))
    keys: Hashes = (bands * weights[None, :, None]).sum(axis=1, dtype=np.uint64)
    return (keys >> np.uint64(32)).astype(np.uint32)


# Sketches of shards, in files


def sketch_name(sha256: str, tokenizer_digest: str, rule: SimilarityRule) -> str:
    """The name of the file with a shard's sketches; the shard's bytes, its tokenizer and the rule determine them."""
    return f"{digest_of([FORMAT, sha256, tokenizer_digest, rule.bands, rule.rows])[:24]}.near"


def sketches_of_shard(shard: str, tokenizer: str, rule: SimilarityRule, paths: Sequence[str]) -> Values:
    """The sketches of a shard that was encoded with the tokenizer in that directory: from the first of these files that
    has them undamaged, else made and written to the first."""
    column = shards.read_shard(Path(shard))
    for path in map(Path, paths):
        data = path.read_bytes() if path.is_file() else b""
        if len(data) == DIGEST_BYTES + 4 * rule.bands * len(column) and _digest(data[DIGEST_BYTES:]) == data[:DIGEST_BYTES]:
            return np.frombuffer(data, "<u4", offset=DIGEST_BYTES).reshape(rule.bands, len(column))
    token_bytes = overlap.token_bytes_of(tokenizer)
    parts = [np.zeros((rule.bands, 0), np.uint32)]
    for first, last in overlap.chunks(column):
        texts = overlap.records(column, token_bytes, first, last)
        parts.append(sketches_of([text.replace(b" ", b"") for text in texts], rule))
    sketches = np.concatenate(parts, axis=1)
    write_sketches(Path(paths[0]), sketches)
    return sketches


def write_sketches(path: Path, sketches: Values) -> None:
    """Write sketches to a file, with a digest before them."""
    data = sketches.astype("<u4").tobytes()
    shards.write_files([(path, _digest(data) + data)])


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def shingles_in(column: shards.Column, record: int, tokenizer: str) -> Hashes:
    """The shingles of one record of a shard."""
    (text,) = overlap.records(column, overlap.token_bytes_of(tokenizer), record, record + 1)
    return shingles_of(text.replace(b" ", b""))


# Which documents are dropped


class Candidates(NamedTuple):
    """Documents that share a band with another: their positions, in order, and the numbers of the bands of each."""

    positions: Places
    firsts: Places
    bands: Places


def candidates(sketches: Values, present: Flags, droppable: Flags) -> Candidates:
    """Find the documents that share a band with another, where one of both may be dropped.

    Memory: some 40 bytes a document, and 16 for each band that a document shares.
    """
    eligible = np.flatnonzero(present)
    positions, bands, number = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    for band_keys in sketches if len(eligible) else ():
        keys = band_keys[eligible]
        order = keys.argsort(kind="stable")
        starts = np.flatnonzero(np.r_[True, keys[order][1:] != keys[order][:-1]])
        sizes = np.diff(np.append(starts, len(order)))
        shared = (sizes > 1) & np.logical_or.reduceat(droppable[eligible[order]], starts)
        members = np.repeat(shared, sizes)
        positions.append(eligible[order[members]])
        bands.append(number + np.repeat(np.arange(int(shared.sum())), sizes[shared]))
        number += int(shared.sum())
    at, of = np.concatenate(positions), np.concatenate(bands)
    order = at.argsort(kind="stable")
    distinct, firsts = np.unique(at[order], return_index=True)
    return Candidates(distinct, np.append(firsts, len(at)), of[order])


def confirm(
    pairs: Candidates, droppable: Flags, shingles: Callable[[int], Hashes], rule: SimilarityRule
) -> list[NearDuplicate]:
    """Compare candidates exactly with those kept before them, in order; return those that are dropped."""
    originals: dict[int, list[int]] = {}
    dropped = []

    def compared(position: int, bands: Sequence[int]) -> NearDuplicate | None:
        """With the first kept document, of those with most bands in common, that is as similar as the threshold."""
        shared = Counter(original for band in bands for original in originals.get(band, ()))
        if not shared:
            return None
        hashes = shingles(position)
        for original in sorted(shared, key=lambda original: (-shared[original], original))[:MOST_COMPARED]:
            if (similarity := jaccard(hashes, shingles(original))) >= rule.threshold:
                return NearDuplicate(position, original, similarity)
        return None

    for number, position in enumerate(pairs.positions.tolist()):
        bands = pairs.bands[pairs.firsts[number] : pairs.firsts[number + 1]].tolist()
        if droppable[position] and (near := compared(position, bands)):
            dropped.append(near)
            continue
        for band in bands:
            if len(members := originals.setdefault(band, [])) < MOST_IN_BAND:
                members.append(position)
    return dropped
