"""Rows of documents: windows over one stream of all of them, or over each alone."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import final

import numpy as np
import numpy.typing as npt

from ttrain.data.intervals import NO_MASKS, Flags, Intervals
from ttrain.data.packing import IGNORE, Array, Batch, Counts, Rows
from ttrain.data.shards import ShardSet

TOKENS_PER_PASS = 1 << 20  # read at once where targets have to be counted


class WindowRows(Rows):
    """Rows that are windows of the stream of all documents: inputs `start` to `end`, targets one place later.

    A place is a target unless it is its document's first or lies in a masked region. Positions restart where a document
    begins and at the start of the row.
    """

    def __init__(
        self, shards: ShardSet, row_length: int, pad_id: int, *, stride: int | None = None, masks: Intervals = NO_MASKS
    ) -> None:
        self.shards, self.row_length, self.pad_id, self.masks = shards, row_length, pad_id, masks
        self.stride = row_length if stride is None else stride
        assert 1 <= self.stride <= row_length, f"stride {stride} with rows of {row_length} would leave tokens out"

    @abstractmethod
    def window(self, row: int) -> tuple[int, int]:
        """First input of a row, and the place after its last one."""

    @abstractmethod
    def times(self, places: Array, firsts: Array) -> Array:
        """In how many rows each of the places can be a target; `firsts` is where its document begins."""

    def fill(self, row: int, batch: Batch, at: int) -> None:
        start, end = self.window(row)
        ids = self.shards.stream(start, end + 1)
        numbers, firsts, places = self.shards.documents(start, end + 1)
        there = slice(0, end - start)
        batch.input_ids_BT[at, there] = ids[:-1]
        labels = batch.labels_BT[at, there]
        labels[:] = ids[1:]
        labels[places.cumsum()[:-1] - 1] = IGNORE  # the first token of a document, predicted from another one
        if self.masks:
            labels[~self._targets(ids, firsts.repeat(places), start)[1:]] = IGNORE
        begins = np.maximum(firsts, start)
        np.subtract(np.arange(start, end), begins.repeat(places)[:-1], out=batch.positions_BT[at, there])
        batch.segments_BT[at, there] = numbers.repeat(places)[:-1]

    def counts(self) -> Counts:
        """`target_multiplicity` is how often a target counts in an epoch, on average; 1 unless windows overlap."""
        learnable = self.shards.tokens - len(self.shards)
        distinct, targets = self._counted
        return {
            "rows": len(self),
            "row_length": self.row_length,
            "records": len(self.shards),
            "target_tokens": targets,
            "target_multiplicity": targets / distinct if distinct else 1.0,
            "masked_tokens": learnable - distinct,
            "dropped_tokens": 0,
            "cut_records": 0,
            "fill": int(self.lengths().sum()) / max(1, len(self) * self.row_length),
        }

    @cached_property
    def _counted(self) -> tuple[int, int]:
        """(distinct targets, targets of all rows); without masks and overlap that takes no reading."""
        if self.stride == self.row_length and not self.masks:
            learnable = self.shards.tokens - len(self.shards)
            return learnable, learnable
        distinct = total = 0
        for start in range(0, self.shards.tokens, TOKENS_PER_PASS):
            places = np.arange(start, min(start + TOKENS_PER_PASS, self.shards.tokens))
            _, firsts = self.shards.document_starts(start, start + len(places))
            ids = self.shards.stream(start, start + len(places))
            targets = self._targets(ids, firsts, start) & (places != firsts)
            distinct += int(targets.sum())
            total += int(self.times(places[targets], firsts[targets]).sum())
        return distinct, total

    def _targets(self, ids: Array, firsts: Array, start: int) -> Flags:
        """Which tokens of the stream from `start` on are in no masked region."""
        if not self.masks:
            return np.ones(len(ids), bool)
        places = np.arange(start, start + len(ids))
        opened = self.masks.opened(self.shards.stream, int(firsts[0]), start)
        return ~self.masks.masked(ids, places == firsts, opened)


@final
class DocumentRows(WindowRows):
    """Windows over documents one after the other; a document that spans two rows goes on in the next.

    With a stride of `row_length`, the default, every token but each document's first is a target exactly once in an epoch,
    and nothing is dropped. Opening reads nothing but the index.
    """

    def __len__(self) -> int:
        return 0 if self.shards.tokens < 2 else int(windows(self.shards.tokens - 1, self.row_length, self.stride))

    def window(self, row: int) -> tuple[int, int]:
        start = row * self.stride
        return start, min(start + self.row_length, self.shards.tokens - 1)

    def times(self, places: Array, firsts: Array) -> Array:
        return windows_over(places, len(self), self.row_length, self.stride)

    def lengths(self) -> Array:
        found = super().lengths()
        if len(found):
            start, end = self.window(len(self) - 1)
            found[-1] = end - start
        return found


@final
class SeparateDocumentRows(WindowRows):
    """Windows over each document alone, so that a row holds one document; batches are trimmed to their longest row.

    A document longer than a row takes several, each beginning with the last target of the one before. Opening reads all
    offsets.
    """

    trimmed = True

    def __init__(
        self, shards: ShardSet, row_length: int, pad_id: int, *, stride: int | None = None, masks: Intervals = NO_MASKS
    ) -> None:
        super().__init__(shards, row_length, pad_id, stride=stride, masks=masks)
        self._windows = np.where(shards.lengths > 1, windows(shards.lengths - 1, row_length, self.stride), 0)
        self._firsts = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._windows)])
        document = np.repeat(np.arange(len(shards)), self._windows)
        before = (np.arange(len(document)) - self._firsts[document]) * self.stride
        self._lengths: Array = np.minimum(row_length, shards.lengths[document] - 1 - before)

    def __len__(self) -> int:
        return len(self._lengths)

    def window(self, row: int) -> tuple[int, int]:
        document = int(np.searchsorted(self._firsts, row, side="right")) - 1
        start = int(self.shards.starts[document]) + (row - int(self._firsts[document])) * self.stride
        return start, start + int(self._lengths[row])

    def times(self, places: Array, firsts: Array) -> Array:
        count = self._windows[np.searchsorted(self.shards.starts, places, side="right") - 1]
        return windows_over(places - firsts, count, self.row_length, self.stride)

    def lengths(self) -> Array:
        return self._lengths


def windows(targets: npt.ArrayLike, row_length: int, stride: int) -> Array:
    """How many windows it takes until the last of at least one target is reached."""
    return np.asarray(1 + -(-np.maximum(0, np.asarray(targets) - row_length) // stride))


def windows_over(places: Array, count: npt.ArrayLike, row_length: int, stride: int) -> Array:
    """How many of the first `count` windows hold a place; number i has the targets i*stride + 1 to i*stride + row_length."""
    last = np.minimum((places - 1) // stride, np.asarray(count) - 1)
    first = np.maximum(0, -((row_length - places) // stride))
    return np.asarray(last - first + 1)
