"""Rows of conversations: whole where they fit, cut into pieces where they do not, packed or each alone."""

from __future__ import annotations

from itertools import chain
from typing import final

import numpy as np

from ttrain.data.intervals import NO_MASKS, Flags, Intervals
from ttrain.data.packing import IGNORE, Array, Batch, Counts, Rows, best_fit
from ttrain.data.shards import Column, ShardSet


@final
class ChatRows(Rows):
    """Every live token is a target exactly once in an epoch, and every piece has one.

    Packed, several pieces share a row of `row_length` by best fit; else each piece is a row of its own, and a batch is as
    wide as its longest row. A conversation without a live token is left out and counted.
    """

    def __init__(
        self,
        shards: ShardSet,
        row_length: int,
        pad_id: int,
        end_id: int,
        *,
        packed: bool = True,
        masks: Intervals = NO_MASKS,
    ) -> None:
        self.shards, self.row_length, self.pad_id, self.masks = shards, row_length, pad_id, masks
        self.trimmed = not packed
        self._cut = self._targets = self._all_masked = 0
        self._used = 0  # tokens in any piece; one that ends a piece and begins the next counts once
        plans, first = [], 0
        for column in shards.columns():
            plans.append(self._plan(column, first, end_id))
            first += len(column)
        self._records, self._starts, self._ends = (_joined([plan[part] for plan in plans]) for part in range(3))
        inputs = self._ends - self._starts - 1
        self._rows = best_fit(inputs.tolist(), row_length) if packed else [[piece] for piece in range(len(inputs))]
        row_of_piece = np.repeat(np.arange(len(self._rows)), [len(row) for row in self._rows])
        self._lengths = np.zeros(len(self._rows), np.int64)
        np.add.at(self._lengths, row_of_piece, inputs[list(chain.from_iterable(self._rows))])

    def __len__(self) -> int:
        return len(self._rows)

    def lengths(self) -> Array:
        return self._lengths

    def fill(self, row: int, batch: Batch, at: int) -> None:
        place = 0
        for segment, piece in enumerate(self._rows[row]):
            ids, live = self.shards.row(int(self._records[piece]))
            assert live is not None
            targets = live != 0
            if self.masks:
                targets &= ~self.masks.masked(ids, np.arange(len(ids)) == 0)
            start, end = int(self._starts[piece]), int(self._ends[piece])
            there = slice(place, place + end - start - 1)
            batch.input_ids_BT[at, there] = ids[start : end - 1]
            batch.labels_BT[at, there] = np.where(targets[start + 1 : end], ids[start + 1 : end].astype(np.int64), IGNORE)
            batch.positions_BT[at, there] = np.arange(end - start - 1)
            batch.segments_BT[at, there] = segment
            place = there.stop

    def counts(self) -> Counts:
        """`dropped_tokens` are those of conversations left out, and context that no piece of a long one holds."""
        return {
            "rows": len(self),
            "row_length": self.row_length,
            "records": len(self.shards),
            "pieces": len(self._records),
            "target_tokens": self._targets,
            "dropped_tokens": self.shards.tokens - self._used,
            "cut_records": self._cut,
            "all_masked_dropped": self._all_masked,
            "fill": int(self._lengths.sum()) / max(1, len(self) * self.row_length),
        }

    def _plan(self, column: Column, first: int, end_id: int) -> tuple[Array, Array, Array]:
        """(record, start, end) of every piece of a shard whose records are numbered from `first` on.

        Only what is longer than a row is looked at on its own, so 200,000 chats take a second.
        """
        lengths, live = np.diff(column.offsets), self._live(column)
        targets = _sums(live, column.offsets)
        self._targets += int(targets.sum())
        self._all_masked += int((targets == 0).sum())
        whole = np.flatnonzero((targets > 0) & (lengths <= self.row_length + 1))
        self._used += int(lengths[whole].sum())
        records, starts, ends = [whole], [np.zeros_like(whole)], [lengths[whole]]
        for record in np.flatnonzero((targets > 0) & (lengths > self.row_length + 1)).tolist():
            there = slice(int(column.offsets[record]), int(column.offsets[record + 1]))
            spans = np.array(cut(live[there], np.flatnonzero(column.tokens[there] == end_id) + 1, self.row_length))
            self._cut += 1
            self._used += int((spans[:, 1] - np.maximum(spans[:, 0], [0, *spans[:-1, 1]])).sum())
            records.append(np.full(len(spans), record))
            starts.append(spans[:, 0])
            ends.append(spans[:, 1])
        return first + _joined(records), _joined(starts), _joined(ends)

    def _live(self, column: Column) -> Flags:
        """Which tokens of a shard are targets; a record's first never is, since nothing stands before it."""
        assert column.live is not None
        live: Flags = column.live != 0
        begins = np.zeros(len(live), bool)
        begins[column.offsets[:-1][np.diff(column.offsets) > 0]] = True
        live &= ~begins
        if self.masks:
            live &= ~self.masks.masked(column.tokens, begins)
        return live


def cut(live: Flags, borders: Array, row_length: int) -> list[tuple[int, int]]:
    """Pieces (start, end) of a long conversation, of at most row_length + 1 tokens, of which the first is an input only.

    `borders` are the places at which a turn ends and the next one begins. A piece takes whole turns up to the last answer
    that fits. Where not even the next answer fits behind what comes before it, the piece ends with that answer and begins as
    early as it can. An answer longer than a row is cut: its first piece begins with half a row of what comes before it, and
    the next begins with the last token of the one before, so that each live token is a target once.
    """
    room = row_length + 1
    places = np.flatnonzero(live)
    ends_of_turns = np.union1d(borders, [len(live)])
    answers = np.unique(ends_of_turns[np.searchsorted(ends_of_turns, places, side="right")])
    spans: list[tuple[int, int]] = []
    start = at = 0
    while at < len(places):
        first = int(places[at])
        following, beyond = np.searchsorted(answers, [first, start + room], side="right")
        if following < beyond:
            end = int(answers[beyond - 1])
        elif answers[following] - first <= row_length:
            end = int(answers[following])
            start = end - room
        else:
            start = max(start, first - (row_length + 1) // 2)
            end = start + room
        spans.append((start, end))
        at = int(np.searchsorted(places, end))
        start = end - 1 if at < len(places) and places[at] == end else end
    return spans


def _sums(flags: Flags, offsets: Array) -> Array:
    """How many flags are set in each record."""
    found = np.zeros(len(offsets) - 1, np.int64)
    filled = np.diff(offsets) > 0
    if filled.any():
        found[filled] = np.add.reduceat(flags, offsets[:-1][filled], dtype=np.int64)
    return found


def _joined(parts: list[Array]) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
