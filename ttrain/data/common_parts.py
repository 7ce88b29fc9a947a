"""Compare bytes around many pairs of places in two texts at once, a machine word at a time, and merge the parts in common.

Nothing here depends on what the texts are: a part is compared once, however often it is proposed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

WORD_BYTES = 8

MANY_BYTES = 1024  # compared for all pairs at once; longer parts are few, and compared one by one at some GB a second

CHUNK_BYTES = 1 << 16  # of a long part, so that intermediate values stay in the cache

ROUNDS = 32  # of looking for pairs that add nothing: one is enough for a text that repeats a period

Bytes = npt.NDArray[np.uint8]

Places = npt.NDArray[np.int64]

Words = npt.NDArray[np.uint64]


class Parts(NamedTuple):
    """Parts that a record has in common with the texts: the number of the record, and begin and end in the texts."""

    records: Places
    starts: Places
    ends: Places

    @classmethod
    def none(cls) -> Parts:
        return cls(*np.zeros((3, 0), np.int64))

    def maximal(self) -> Parts:
        """Those that no other part of the same record contains, each once, in the order of records and beginnings."""
        order = np.lexsort((-self.ends, self.starts, self.records))
        records, starts, ends = (values[order] for values in self)
        past = int(self.ends.max(initial=0)) + 1
        # The largest end of the parts that begin earlier, or in an earlier record.
        farthest = np.maximum.accumulate(records * past + ends)
        is_maximal = np.ones(len(order), np.bool_)
        is_maximal[1:] = (records * past + ends)[1:] > farthest[:-1]
        return Parts(records[is_maximal], starts[is_maximal], ends[is_maximal])


def merged(parts: list[Parts]) -> Parts:
    """All parts, without those that others contain."""
    return Parts(*(np.concatenate(values) for values in zip(Parts.none(), *parts, strict=True))).maximal()


def padded_words(data: Bytes, padding: int) -> Words:
    """The 8 bytes before each place of the data, and before the 8 places after it; `padding` stands around the data."""
    around = np.full(WORD_BYTES, padding, np.uint8)
    padded = np.concatenate([around, data, around])
    words: Words = np.ndarray(len(data) + WORD_BYTES + 1, "<u8", padded, strides=(1,))
    return words


class Comparison:
    """Data beside texts, whose bytes are compared. Both are padded, with different bytes, so that no place is outside."""

    def __init__(self, data: Bytes, texts: Bytes, text_words: Words) -> None:
        """`text_words` are the padded words of the texts with 0; no byte of the data is 255."""
        self.data, self.texts = data, texts
        self.data_words, self.text_words = padded_words(data, 255), text_words
        self._long: dict[int, tuple[int, int]] = {}  # {data place - text place: begin and end in the data} of the last one

    def equal_after(self, data_places: Places, text_places: Places, most: int | Places) -> Places:
        """Number of equal bytes from these places on; not compared further once `most` are, of all or of each."""
        return self._equal(data_places + WORD_BYTES, text_places + WORD_BYTES, WORD_BYTES, most)

    def equal_before(self, data_places: Places, text_places: Places, most: int | Places) -> Places:
        """Number of equal bytes before these places; not compared further once `most` are, of all or of each."""
        return self._equal(data_places, text_places, -WORD_BYTES, most)

    def _equal(self, data_at: Places, text_at: Places, step: int, most: int | Places) -> Places:
        length = np.zeros(len(data_at), np.int64)
        alive, limits = np.arange(len(data_at)), np.broadcast_to(most, len(data_at))
        for done in range(WORD_BYTES, int(limits.max(initial=0)) + WORD_BYTES, WORD_BYTES):
            different = self.data_words[data_at] ^ self.text_words[text_at]
            if step < 0:
                different = different.byteswap()
            # The bits below the lowest one that is set, by eight, are the equal bytes; all 64 if none is set.
            length[alive] += np.bitwise_count(~different & (different - np.uint64(1))).astype(np.int64) >> 3
            equal = (different == 0) & (done < limits)
            alive, limits, data_at, text_at = alive[equal], limits[equal], data_at[equal] + step, text_at[equal] + step
            if not len(alive):
                break
        return length

    def parts(self, records: Places, data_places: Places, text_places: Places) -> Parts:
        """The parts of these records that have these places of data and texts in common, each as long as it can be.

        Parts that lie within a part of the same record are left out, most without a comparison: where data repeat a
        period, one text place has a pair in each, and all of them but the last lie within the part of the first.
        """
        order = np.lexsort((data_places, text_places, records))
        records, data_at, text_at = records[order], data_places[order], text_places[order]
        parts = []
        for _ in range(ROUNDS):
            firsts = np.flatnonzero(is_first(records, text_at))
            sizes = np.diff(np.append(firsts, len(records)))
            # In the middle of the data the part is as long as anywhere, and where it is not, half of the rest is shorter.
            chosen = firsts + sizes // 2
            bytes_before, bytes_after = self._extents(data_at[chosen], text_at[chosen])
            parts.append(Parts(records[chosen], text_at[chosen] - bytes_before, text_at[chosen] + bytes_after))
            bytes_before, bytes_after = np.repeat(bytes_before, sizes), np.repeat(bytes_after, sizes)
            # A part that does not have the first byte beyond the chosen one's, on either side, lies within it.
            past = self.data_words[np.minimum(data_at + bytes_after, len(self.data)) + WORD_BYTES]
            ahead = self.data_words[np.maximum(data_at - bytes_before, 0)]
            goes_on = (past ^ self.text_words[text_at + bytes_after + WORD_BYTES]) & np.uint64(0xFF) == 0
            goes_on |= (ahead ^ self.text_words[text_at - bytes_before]) >> np.uint64(56) == 0
            goes_on[chosen] = False
            records, data_at, text_at = records[goes_on], data_at[goes_on], text_at[goes_on]
            if not len(data_at):
                break
        bytes_before, bytes_after = self._extents(data_at, text_at)
        return merged([*parts, Parts(records, text_at - bytes_before, text_at + bytes_after)])

    def _extents(self, data_at: Places, text_at: Places) -> tuple[Places, Places]:
        """The numbers of equal bytes before these places and from them on."""
        bytes_before = self.equal_before(data_at, text_at, MANY_BYTES)
        bytes_after = self.equal_after(data_at, text_at, MANY_BYTES)
        for number in np.flatnonzero((bytes_before >= MANY_BYTES) | (bytes_after >= MANY_BYTES)).tolist():
            place, offset = int(data_at[number]), int(data_at[number] - text_at[number])
            start, end = self._long.get(offset, (0, 0))
            if not start <= place < end:
                start = place - _common_suffix(self.data[:place], self.texts[: place - offset])
                end = place + _common_prefix(self.data[place:], self.texts[place - offset :])
                self._long[offset] = start, end
            bytes_before[number], bytes_after[number] = place - start, end - place
        return bytes_before, bytes_after


def is_first(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which pairs of values, in order, are the first of several equal ones."""
    is_other = np.ones(len(first), np.bool_)
    is_other[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    return is_other


def occurrences(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> Places:
    """How often each pair of values occurs, for all pairs."""
    order = np.lexsort((second, first))
    begins = np.flatnonzero(is_first(first[order], second[order]))
    counts = np.zeros(len(order), np.int64)
    sizes = np.diff(np.append(begins, len(order)))
    counts[order] = np.repeat(sizes, sizes)
    return counts


def _common_prefix(first: Bytes, second: Bytes) -> int:
    """Length of the common prefix in bytes."""
    size, done, step = min(len(first), len(second)), 0, MANY_BYTES
    while done < size:
        end = min(size, done + step)
        different = first[done:end] != second[done:end]
        if different.any():
            return done + int(different.argmax())
        done, step = end, min(2 * step, CHUNK_BYTES)
    return size


def _common_suffix(first: Bytes, second: Bytes) -> int:
    """Length of the common suffix in bytes."""
    size, done, step = min(len(first), len(second)), 0, MANY_BYTES
    first, second = first[len(first) - size :], second[len(second) - size :]
    while done < size:
        end = min(size, done + step)
        different = first[size - end : size - done] != second[size - end : size - done]
        if different.any():
            return done + int(different[::-1].argmax())
        done, step = end, min(2 * step, CHUNK_BYTES)
    return size
