"""Rows of a fixed length, planned from the records' lengths alone.

Letters in names: B rows of a batch, T positions of a row. A row is four arrays of length T: input ids, labels (already
shifted: `labels[t]` is the target of position t, or IGNORE), positions (restart with each record) and segments (which
record, for the attention mask; padding is a segment of its own).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ttrain.data.shards import ShardSet

IGNORE = -100
Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Rows as arrays of shape [B, T]."""

    input_ids_BT: Array
    labels_BT: Array
    positions_BT: Array
    segments_BT: Array

    @property
    def live_tokens(self) -> int:
        """Positions that have a target."""
        return int((self.labels_BT != IGNORE).sum())

    def without_targets(self) -> Batch:
        """The same rows, none of which moves the loss."""
        return Batch(self.input_ids_BT, np.full_like(self.labels_BT, IGNORE), self.positions_BT, self.segments_BT)


class Rows(ABC):
    """A fixed number of rows, each built when asked for."""

    row_length: int
    pad_id: int

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def fill(self, row: int, batch: Batch, at: int) -> None:
        """Write row number `row` into line `at` of the batch."""

    @abstractmethod
    def counts(self) -> dict[str, int | float]:
        """What became of the tokens, for the manifest."""

    def batch(self, rows: Collection[int]) -> Batch:
        """The rows with these numbers."""
        shape = (len(rows), self.row_length)
        batch = Batch(
            np.full(shape, self.pad_id, np.int64),
            np.full(shape, IGNORE, np.int64),
            np.zeros(shape, np.int64),
            np.full(shape, -1, np.int64),
        )
        for at, row in enumerate(rows):
            self.fill(int(row), batch, at)
        return batch


class DocumentRows(Rows):
    """Documents one after the other, cut into rows; a document that spans two rows goes on in the next.

    Every token but each document's first is a target exactly once: row i predicts the tokens i*T+1 to i*T+T of the stream.
    """

    def __init__(self, shards: ShardSet, row_length: int, pad_id: int) -> None:
        self.shards, self.row_length, self.pad_id = shards, row_length, pad_id
        self.tokens = int(shards.starts[-1])

    def __len__(self) -> int:
        return max(0, -(-(self.tokens - 1) // self.row_length))

    def fill(self, row: int, batch: Batch, at: int) -> None:
        start = row * self.row_length
        end = min(start + self.row_length, self.tokens - 1)
        length = end - start
        ids = self.shards.stream(start, end + 1)
        places = np.arange(start, end + 1)
        document = np.searchsorted(self.shards.starts, places, side="right") - 1
        same = document[1:] == document[:-1]
        batch.input_ids_BT[at, :length] = ids[:-1]
        batch.labels_BT[at, :length] = np.where(same, ids[1:], IGNORE)
        first = np.maximum(self.shards.starts[document[:-1]], start)
        batch.positions_BT[at, :length] = places[:-1] - first
        batch.segments_BT[at, :length] = document[:-1]

    def counts(self) -> dict[str, int | float]:
        targets = self.tokens - len(self.shards)
        return {
            "rows": len(self),
            "row_length": self.row_length,
            "records": len(self.shards),
            "target_tokens": targets,
            "dropped_tokens": 0,
            "cut_records": 0,
            "fill": targets / max(1, len(self) * self.row_length),
        }


@dataclass(frozen=True)
class _Piece:
    record: int
    start: int
    end: int


class ChatRows(Rows):
    """Conversations packed whole into rows by best fit; one that is longer than a row is cut at the border of a turn.

    Where no whole turn with an answer fits, the row shows as much of the prompt and the answer as it can, so that no
    conversation is without live tokens.
    """

    def __init__(self, shards: ShardSet, row_length: int, pad_id: int, end_id: int) -> None:
        self.shards, self.row_length, self.pad_id = shards, row_length, pad_id
        self._cut = 0
        pieces = [self._piece(record, end_id) for record in range(len(shards))]
        self._live = sum(self._live_in(piece) for piece in pieces)
        self._rows = best_fit([(piece.end - piece.start - 1) for piece in pieces], row_length)
        self._pieces = pieces

    def __len__(self) -> int:
        return len(self._rows)

    def fill(self, row: int, batch: Batch, at: int) -> None:
        place = 0
        for segment, number in enumerate(self._rows[row]):
            piece = self._pieces[number]
            ids, live = self.shards.row(piece.record)
            assert live is not None
            ids, live = ids[piece.start : piece.end].astype(np.int64), live[piece.start : piece.end]
            there = slice(place, place + len(ids) - 1)
            batch.input_ids_BT[at, there] = ids[:-1]
            batch.labels_BT[at, there] = np.where(live[1:] != 0, ids[1:], IGNORE)
            batch.positions_BT[at, there] = np.arange(len(ids) - 1)
            batch.segments_BT[at, there] = segment
            place = there.stop

    def counts(self) -> dict[str, int | float]:
        used = sum(piece.end - piece.start - 1 for piece in self._pieces)
        dropped = int(self.shards.lengths.sum()) - sum(piece.end - piece.start for piece in self._pieces)
        return {
            "rows": len(self),
            "row_length": self.row_length,
            "records": len(self.shards),
            "target_tokens": self._live,
            "dropped_tokens": dropped,
            "cut_records": self._cut,
            "fill": used / max(1, len(self) * self.row_length),
        }

    def _piece(self, record: int, end_id: int) -> _Piece:
        length = int(self.shards.lengths[record])
        room = self.row_length + 1  # the last token of a piece is a target only
        if length <= room:
            return _Piece(record, 0, length)
        self._cut += 1
        ids, live = self.shards.row(record)
        assert live is not None
        turns = np.flatnonzero(ids[:room] == end_id)
        if len(turns) and live[: turns[-1] + 1].any():
            return _Piece(record, 0, int(turns[-1]) + 1)
        first = int(np.flatnonzero(live)[0])
        start = max(0, min(first - self.row_length // 2, length - room))
        return _Piece(record, start, start + room)

    def _live_in(self, piece: _Piece) -> int:
        live = self.shards.row(piece.record)[1]
        assert live is not None
        return int(live[piece.start + 1 : piece.end].sum())


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing bin packing (Johnson 1973): numbers of each bin's items; the longest first, ties by number."""
    order = sorted(range(len(lengths)), key=lambda item: (-lengths[item], item))
    bins: list[list[int]] = []
    open_bins: list[tuple[int, int]] = []  # (room left, bin), sorted
    for item in order:
        assert lengths[item] <= capacity, f"item of {lengths[item]} in bins of {capacity}"
        at = bisect_left(open_bins, (lengths[item], -1))
        if at == len(open_bins):
            room, number = capacity, len(bins)
            bins.append([])
        else:
            room, number = open_bins.pop(at)
        bins[number].append(item)
        if room - lengths[item] > 0:
            insort(open_bins, (room - lengths[item], number))
    return bins
