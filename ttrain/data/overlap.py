"""Which of many short texts stand in a long one, in part or whole: seeds of 24 bytes, then the bytes themselves.

A part counts from `ngram` bytes on, or where it is all of the short text. Every such part has a seed, since the seeds of a
text lie so close that any `ngram` bytes hold one; and each hit of a seed is compared byte for byte, so none is reported that
is not there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ttrain.data.plain_text import Bytes

SEED_BYTES = 24  # eight Chinese characters, or four to five English words
WORD_BYTES = 8
SLICE_BYTES = 1 << 16  # hashed at a time, so that what is in between stays in the cache
FILTER_PER_SEED = 64  # places of the filter: one position in 64 passes it by chance
COARSE_BITS = 20  # of a filter before it that stays in the cache: 3.5 ns a byte where the large one alone took 9
# A seed at more places of the texts tells of none, such as an instruction before each question, and each record with that
# instruction would cost as many comparisons. Where a text stands in a record whole, the seeds beside it find it too. With 64
# places 652 chats of the quickstart seemed to hold three others of one instruction; up to 16 questions may share a passage.
MOST_ALIKE = 16
MOST_PLACES = 256  # of the rarest seed of a text that has only such ones, as many questions of one pattern: it is kept
FEWEST_LETTERS = 5  # different bytes of a seed: "hahaha" and "000000" stand everywhere
# Odd numbers without a pattern: of the golden ratio, and of splitmix64 (https://doi.org/10.1145/2660193.2660195).
FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
Places = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]


class Found(NamedTuple):
    """A record that holds parts of a text: how many of the text's bytes, and the longest part."""

    record: int
    text: int
    bytes: int
    longest: int


class Texts:
    """Plain texts, ready to be looked for. One that is shorter than a seed is never found."""

    def __init__(self, texts: Sequence[bytes], ngram: int) -> None:
        """`ngram` is at least SEED_BYTES."""
        assert ngram >= SEED_BYTES, f"parts of {ngram} bytes have no seed of {SEED_BYTES}"
        lengths = np.array([len(text) for text in texts], np.int64)
        self.lengths, self.needed = lengths, np.minimum(lengths, ngram)
        self._data = np.frombuffer(b"\0" + b"".join(text + b"\0" for text in texts), np.uint8)  # no plain text has a zero
        self._starts = 1 + np.concatenate([[0], np.cumsum(lengths + 1)])
        places = [
            _places(start, start + length - SEED_BYTES, max(1, needed - SEED_BYTES + 1))
            for start, length, needed in zip(self._starts.tolist(), lengths.tolist(), self.needed.tolist(), strict=False)
        ]
        at = np.concatenate([np.zeros(0, np.int64), *places]).astype(np.int64)
        hashes = [np.zeros(0, np.uint64)]
        kept = [np.zeros(0, np.int64)]
        for some in np.array_split(at, 1 + len(at) // SLICE_BYTES):
            windows = self._data[some[:, None] + np.arange(SEED_BYTES)]
            several = (np.diff(np.sort(windows, axis=1), axis=1) != 0).sum(axis=1) + 1 >= FEWEST_LETTERS
            kept.append(some[several])
            hashes.append(seeds(windows[several].reshape(-1))[::SEED_BYTES])
        self._sort(np.concatenate(hashes), np.concatenate(kept))

    def _sort(self, hashes: Hashes, at: Places) -> None:
        """Keep the seeds by their numbers, and two filters that most places of other texts do not pass."""
        order = np.argsort(hashes, kind="stable")
        hashes, at = hashes[order], at[order]
        alike = np.searchsorted(hashes, hashes, "right") - np.searchsorted(hashes, hashes)
        of = self._text_at(at)
        rarest = np.full(len(self.lengths), len(at) + 1)
        np.minimum.at(rarest, of, alike)
        kept = (alike <= MOST_ALIKE) | ((alike == rarest[of]) & (alike <= MOST_PLACES))
        self._hashes, self._at = hashes[kept], at[kept]
        bits = max(COARSE_BITS, int(np.ceil(np.log2(max(1, len(self._hashes)) * FILTER_PER_SEED))))
        self._shift = np.uint64(64 - bits)
        self._filter = np.zeros(1 << bits, np.bool_)
        self._filter[(self._hashes >> self._shift).view(np.int64)] = True
        self._coarse = self._filter.reshape(1 << COARSE_BITS, -1).any(axis=1)

    @property
    def searchable(self) -> npt.NDArray[np.bool_]:
        """Which of the texts have a seed."""
        found = np.zeros(len(self.lengths), np.bool_)
        found[self._text_at(self._at)] = True
        return found

    def find(self, data: Bytes, begins: Places) -> list[Found]:
        """What of the texts stands in the records that begin at these places of plain text."""
        here, there = self._hits(data)
        parts: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for place, at, length in self._parts(data, here, there):
            text = int(self._text_at(np.array([at]))[0])
            parts[int(np.searchsorted(begins, place, "right")) - 1, text].append((at, at + length))
        return [
            Found(record, text, _covered(spans), max(end - start for start, end in spans))
            for (record, text), spans in sorted(parts.items())
        ]

    def _text_at(self, places: Places) -> Places:
        found: Places = np.searchsorted(self._starts, places, "right") - 1
        return found

    def _hits(self, data: Bytes) -> tuple[Places, Places]:
        """(places of seeds in the data, places of the same bytes in the texts); one place may have many."""
        here, hashes = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
        for start in range(0, len(data) - SEED_BYTES + 1 if len(self._hashes) else 0, SLICE_BYTES):
            found = seeds(data[start : start + SLICE_BYTES + SEED_BYTES - 1])
            passed = np.flatnonzero(self._coarse.take((found >> np.uint64(64 - COARSE_BITS)).view(np.int64)))
            passed = passed[self._filter.take((found[passed] >> self._shift).view(np.int64))]
            here.append(passed + start)
            hashes.append(found[passed])
        place, wanted = np.concatenate(here), np.concatenate(hashes)
        first, last = np.searchsorted(self._hashes, wanted), np.searchsorted(self._hashes, wanted, "right")
        counts = last - first
        offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        place, there = np.repeat(place, counts), self._at[np.repeat(first, counts) + offsets]
        same = np.ones(len(place), np.bool_)
        for byte in range(SEED_BYTES):
            same &= data[place + byte] == self._data[there + byte]
        return place[same], there[same]

    def _parts(self, data: Bytes, here: Places, there: Places) -> Iterator[tuple[int, int, int]]:
        """(place in the data, place in the texts, length) of each part that is long enough, as long as it gets."""
        needed = self.needed[self._text_at(there)]
        most = int(needed.max(initial=0)) - SEED_BYTES
        before = _equal(data, self._data, here - 1, there - 1, -1, most)
        after = _equal(data, self._data, here + SEED_BYTES, there + SEED_BYTES, 1, most)
        enough = before + after + SEED_BYTES >= needed
        here, there = here[enough], there[enough]
        reached: dict[int, int] = {}
        for number in np.argsort(here, kind="stable").tolist():
            place, at = int(here[number]), int(there[number])
            if place < reached.get(place - at, 0):  # in a part that is known
                continue
            before_it = _run(data[:place][::-1], self._data[:at][::-1])
            length = before_it + _run(data[place:], self._data[at:])
            reached[place - at] = place - before_it + length
            yield place - before_it, at - before_it, length


def _places(first: int, last: int, step: int) -> Places:
    """Where the seeds of a text begin: the last one at its end, which may be all that tells it from others."""
    return np.unique(np.append(np.arange(first, last, step), [last] * (last >= first))).astype(np.int64)


def seeds(data: Bytes) -> Hashes:
    """A number for the SEED_BYTES that begin at each place: a sum of three products, of which the high bits are used."""
    if len(data) < SEED_BYTES:
        return np.zeros(0, np.uint64)
    words: Hashes = np.ndarray(len(data) - WORD_BYTES + 1, "<u8", np.ascontiguousarray(data), strides=(1,))
    found = words[: -2 * WORD_BYTES] * np.uint64(FACTORS[0])
    found += words[WORD_BYTES:-WORD_BYTES] * np.uint64(FACTORS[1])
    found += words[2 * WORD_BYTES :] * np.uint64(FACTORS[2])
    return found


def _equal(left: Bytes, right: Bytes, at_left: Places, at_right: Places, step: int, most: int) -> Places:
    """How many bytes of both are equal from these places on, in the direction of `step`; at most `most`."""
    length = np.zeros(len(at_left), np.int64)
    alive = np.arange(len(at_left))
    for distance in range(most):
        here, there = at_left[alive] + step * distance, at_right[alive] + step * distance
        inside = (here >= 0) & (here < len(left)) & (there >= 0) & (there < len(right))
        alive, here, there = alive[inside], here[inside], there[inside]
        alive = alive[left[here] == right[there]]
        if not len(alive):
            break
        length[alive] += 1
    return length


def _run(left: Bytes, right: Bytes) -> int:
    """How many bytes at the beginning are equal."""
    done, step = 0, 256
    size = min(len(left), len(right))
    while done < size:
        end = min(size, done + step)
        different = np.flatnonzero(left[done:end] != right[done:end])
        if len(different):
            return done + int(different[0])
        done, step = end, step * 2
    return size


def _covered(spans: list[tuple[int, int]]) -> int:
    """Bytes that lie in one of the spans."""
    total = end = 0
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total
