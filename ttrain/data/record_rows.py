"""Rows of documents (windows over one stream, or over each alone) and of chats."""

from abc import abstractmethod
from collections import Counter
from functools import cached_property
from itertools import pairwise
from typing import final

import numpy as np
import numpy.typing as npt

from ttrain.data.packing import (
    IGNORE,
    NONE,
    Array,
    Batch,
    Counts,
    Flags,
    Intervals,
    PackedRows,
    Rows,
    counted_up,
    masked,
)
from ttrain.data.shards import Column, ShardSet, offsets_of

ThreeArrays = tuple[Array, Array, Array]

TOKENS_PER_PASS = 1 << 20  # read at a time when targets are counted


class WindowRows(Rows):
    """Rows that are windows of the stream of all documents.

    A position is a target unless it is its document's first or masked. Positions restart with each
    document and each row.
    """

    def __init__(
        self,
        shards: ShardSet,
        row_length: int,
        pad_id: int,
        *,
        stride: int | None = None,
        masks: Intervals = (),
    ) -> None:
        self.shards = shards
        self.row_length = row_length
        self.pad_id = pad_id
        self.masks = masks
        self.stride = row_length if stride is None else stride
        assert 1 <= self.stride <= row_length, (
            f"stride {stride} with rows of {row_length} would leave tokens out"
        )

    @abstractmethod
    def windows(self, rows: Array) -> ThreeArrays:
        """(first input, number of inputs) of each window, and the windows of each row."""

    def fill(self, rows: Array, batch: Batch, lines: Array) -> None:
        starts, lengths, windows = self.windows(rows)
        ranges = self.shards.ranges(starts, starts + lengths + 1)
        window_ends = (lengths + 1).cumsum()
        piece_starts = ranges.counts.cumsum() - ranges.counts
        labels = ranges.ids.copy()
        labels[piece_starts] = IGNORE  # the first token of a document, predicted from another one
        if self.masks:
            firsts = ranges.firsts.repeat(ranges.counts)
            borders = pairwise([0, *window_ends.tolist()])
            for start, (first, end) in zip(starts.tolist(), borders, strict=True):
                # A region may have begun before the window.
                before = self.shards.stream(int(firsts[first]), start)
                ids = np.concatenate([before, ranges.ids[first:end]])
                places = start - len(before) + np.arange(len(ids))
                mask = masked(self.masks, ids, np.isin(places, firsts[first:end]))
                labels[first:end][mask[len(before) :]] = IGNORE
        inputs, targets = np.ones((2, len(labels)), bool)
        inputs[window_ends - 1] = targets[window_ends - lengths - 1] = False
        row_lengths = np.add.reduceat(lengths, windows.cumsum() - windows)
        at = counted_up(lines * batch.input_ids_BT.shape[1], row_lengths)
        batch.input_ids_BT.reshape(-1)[at] = ranges.ids[inputs]
        batch.labels_BT.reshape(-1)[at] = labels[targets]
        batch.positions_BT.reshape(-1)[at] = (
            np.arange(len(labels)) - piece_starts.repeat(ranges.counts)
        )[inputs]
        batch.segments_BT.reshape(-1)[at] = ranges.numbers.repeat(ranges.counts)[inputs]

    def counts(self) -> Counts:
        """`target_multiplicity` is the mean count of a target in an epoch, 1 without overlap."""
        distinct, targets = self.target_counts
        return {
            "rows": len(self),
            "row_length": self.row_length,
            "records": len(self.shards),
            "target_tokens": targets,
            "target_multiplicity": targets / distinct if distinct else 1.0,
            "masked_tokens": self.shards.tokens - len(self.shards) - distinct,
            "dropped_tokens": 0,
            "cut_records": 0,
            "fill": int(self.lengths().sum()) / max(1, len(self) * self.row_length),
        }

    @cached_property
    def target_counts(self) -> tuple[int, int]:
        """(distinct targets, targets of an epoch); without masks and overlap no token is read."""
        distinct = self.shards.tokens - len(self.shards)
        if self.masks:
            distinct = _live_tokens(
                DocumentRows(self.shards, self.row_length, self.pad_id, masks=self.masks)
            )
        return distinct, distinct if self.stride == self.row_length else _live_tokens(self)


@final
class DocumentRows(WindowRows):
    """Windows over consecutive documents; a document may span several rows.

    With a stride of `row_length` every token but each document's first is a target once in an
    epoch. Opening reads only the index.
    """

    def __len__(self) -> int:
        return int(window_count(self.shards.tokens, self.row_length, self.stride))

    def windows(self, rows: Array) -> ThreeArrays:
        starts = rows * self.stride
        lengths = np.minimum(self.row_length, self.shards.tokens - 1 - starts)
        return starts, lengths, np.ones_like(rows)

    def lengths(self) -> Array:
        lengths = super().lengths()
        if len(lengths):
            lengths[-1] = self.windows(np.array([len(self) - 1]))[1][0]
        return lengths


@final
class SeparateDocumentRows(PackedRows, WindowRows):
    """Windows over each document alone, which begins at its own beginning.

    Packed, several windows share a row by best fit; else each is a row, and batches are trimmed. A
    document longer than a row takes several windows. Opening reads all offsets, and packs a million
    documents in 2 s.
    """

    def __init__(
        self,
        shards: ShardSet,
        row_length: int,
        pad_id: int,
        *,
        packed: bool = False,
        stride: int | None = None,
        masks: Intervals = (),
    ) -> None:
        # Of the quickstart's tokens 17 % lie in a row without the beginning of their document if
        # windows are packed, 41 % in one stream; rows are as full (0.999).
        super().__init__(shards, row_length, pad_id, stride=stride, masks=masks)
        _, document, tokens_before = document_windows(shards.lengths, row_length, self.stride)
        self._starts: Array = shards.starts[document] + tokens_before
        self._inputs: Array = np.minimum(row_length, shards.lengths[document] - 1 - tokens_before)
        weights = None if shards.row_weights is None else shards.row_weights[document]
        self.pack(self._inputs, weights, packed=packed)

    def windows(self, rows: Array) -> ThreeArrays:
        numbers, windows = self.items_of(rows)
        return self._starts[numbers], self._inputs[numbers], windows


def window_count(tokens: npt.ArrayLike, row_length: int, stride: int) -> Array:
    """Number of windows that cover the targets of so many tokens."""
    targets = np.asarray(tokens) - 1
    return np.where(targets > 0, 1 + -(-np.maximum(0, targets - row_length) // stride), 0)


def document_windows(lengths: Array, row_length: int, stride: int) -> ThreeArrays:
    """(windows of each document; document of each window, and its tokens before it)."""
    counts = window_count(lengths, row_length, stride)
    documents = np.repeat(np.arange(len(lengths)), counts)
    firsts = np.cumsum(counts) - counts
    return counts, documents, (np.arange(len(documents)) - firsts[documents]) * stride


def _live_tokens(rows: Rows) -> int:
    together = max(1, TOKENS_PER_PASS // rows.row_length)
    parts = np.split(np.arange(len(rows)), range(together, len(rows), together))
    return sum(rows.batch(part).live_tokens for part in parts)


class PieceRows(PackedRows):
    """Rows of pieces of records; packed, several share a row by best fit."""

    def __init__(self, shards: ShardSet, row_length: int, pad_id: int, *, packed: bool) -> None:
        """Plan and pack; what `plan` reads is set before."""
        self.shards = shards
        self.row_length = row_length
        self.pad_id = pad_id
        # Of all records; `used_tokens` are in any piece: one that ends a piece and begins the next
        # counts once.
        self.totals: Counter[str] = Counter()
        columns = shards.columns()
        firsts = offsets_of([len(column) for column in columns]).tolist()
        plans = [(NONE, NONE, NONE), *map(self.plan, columns, firsts)]
        self.records, self.starts, self.sizes = map(np.concatenate, zip(*plans, strict=True))
        weights = None if shards.row_weights is None else shards.row_weights[self.records]
        self.pack(self.sizes, weights, packed=packed)

    @abstractmethod
    def plan(self, column: Column, first: int) -> ThreeArrays:
        """(record, first token, positions) of the pieces of a shard; records count from `first`."""

    @abstractmethod
    def fill_piece(self, piece: int, batch: Batch, line: int, position: int, segment: int) -> None:
        """Write a piece into a line of the batch, from `position` on."""

    def fill(self, rows: Array, batch: Batch, lines: Array) -> None:
        for row, line in zip(rows.tolist(), lines.tolist(), strict=True):
            position = 0
            for segment, piece in enumerate(self.items_of(np.array([row]))[0].tolist()):
                self.fill_piece(piece, batch, line, position, segment)
                position += int(self.sizes[piece])

    def counted(self, pieces: Counts, dropped: Counts | None = None) -> Counts:
        """Counts of all rows of pieces, with more of `pieces` and of `dropped` records."""
        return {
            "rows": len(self),
            "row_length": self.row_length,
            "records": len(self.shards),
            **pieces,
            "target_tokens": self.totals["target_tokens"],
            "dropped_tokens": self.shards.tokens - self.totals["used_tokens"],
            "cut_records": self.totals["cut_records"],
            **(dropped or {}),
            "all_masked_dropped": self.totals["all_masked_dropped"],
            "fill": int(self._lengths.sum()) / max(1, len(self) * self.row_length),
        }


@final
class ChatRows(PieceRows):
    """Rows of conversations; every live token is a target once in an epoch, every piece has one.

    A conversation without a live token is left out and counted.
    """

    def __init__(
        self,
        shards: ShardSet,
        row_length: int,
        pad_id: int,
        end_id: int,
        *,
        packed: bool = True,
        masks: Intervals = (),
    ) -> None:
        self.masks = masks
        self._end_id = end_id
        super().__init__(shards, row_length, pad_id, packed=packed)

    def fill_piece(self, piece: int, batch: Batch, line: int, position: int, segment: int) -> None:
        ids, live = self.shards.row(int(self.records[piece]))
        targets = live != 0
        if self.masks:
            targets &= ~masked(self.masks, ids, np.arange(len(ids)) == 0)
        start = int(self.starts[piece])
        size = int(self.sizes[piece])
        following = slice(start + 1, start + size + 1)
        row_range = slice(position, position + size)
        batch.input_ids_BT[line, row_range] = ids[start : start + size]
        batch.labels_BT[line, row_range] = np.where(
            targets[following], ids[following].astype(np.int64), IGNORE
        )
        batch.positions_BT[line, row_range] = np.arange(size)
        batch.segments_BT[line, row_range] = segment

    def counts(self) -> Counts:
        """`dropped_tokens`: of conversations left out, and context that no piece holds."""
        return self.counted({"pieces": len(self.records)})

    def plan(self, column: Column, first: int) -> ThreeArrays:
        # Only records longer than a row are handled one by one, so 200,000 chats take a second.
        lengths = np.diff(column.offsets)
        assert column.live is not None
        live: Flags = column.live != 0
        # A record's first token is no target, since nothing precedes it.
        begins = np.zeros(len(live), bool)
        begins[column.offsets[:-1][lengths > 0]] = True
        live &= ~begins
        if self.masks:
            live &= ~masked(self.masks, column.tokens, begins)
        targets = sums_by_record(live, column.offsets)
        whole = np.flatnonzero((targets > 0) & (lengths <= self.row_length + 1))
        self.totals.update(
            target_tokens=int(targets.sum()),
            all_masked_dropped=int((targets == 0).sum()),
            used_tokens=int(lengths[whole].sum()),
        )
        # The records, starts and sizes of pieces, of shape [3, pieces].
        pieces = [np.stack([whole, np.zeros_like(whole), lengths[whole] - 1])]
        for record in np.flatnonzero((targets > 0) & (lengths > self.row_length + 1)).tolist():
            token_range = slice(int(column.offsets[record]), int(column.offsets[record + 1]))
            borders = np.flatnonzero(column.tokens[token_range] == self._end_id) + 1
            spans = np.array(cut(live[token_range], borders, self.row_length))
            used = spans[:, 1] - np.maximum(spans[:, 0], [0, *spans[:-1, 1]])
            self.totals.update(cut_records=1, used_tokens=int(used.sum()))
            starts, ends = spans.T
            pieces.append(np.stack([np.full(len(spans), record), starts, ends - starts - 1]))
        records, starts, sizes = np.concatenate(pieces, axis=1)
        return first + records, starts, sizes


def cut(live: Flags, borders: Array, row_length: int) -> list[tuple[int, int]]:
    """Pieces (start, end) of a long conversation, of at most row_length + 1 tokens.

    A piece's first token is an input only; `borders` are the ends of turns. A piece takes complete
    turns up to the last answer that fits. If the next answer does not fit after its context, the
    piece ends with it and begins as early as it can. An answer longer than a row is cut: its first
    piece begins with half a row of context, each next one with the last token of the previous one,
    so that each live token is a target once.
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


def sums_by_record(flags: Flags, offsets: Array) -> Array:
    """How many flags are set in each record."""
    return np.diff(offsets_of(flags)[offsets])
