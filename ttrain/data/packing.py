"""Training rows, mixtures of rows from several sources, and best-fit packing.

B: rows of a batch; T: positions of a row. A row is four arrays of length T: input ids, labels
(shifted: `labels[t]` is the target of position t, or IGNORE), positions (restart with each record)
and segments (which record, for the attention mask; -1 for padding).
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import chain, pairwise
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from ttrain.errors import DataError

IGNORE = -100

MOST_WEIGHTS = 100  # of rows of data, each with packed rows of its own
PACKED_TOGETHER = 1 << 18  # items; their rows are lists for a moment, 40 MB

# Positions; larger temporary arrays come from the kernel again each time: twice the CPU.
FILLED_TOGETHER = 1 << 13

# Widths of trimmed batches are multiples of it: tensor cores want that, and shapes stay few.
WIDTH_STEP = 8

Array = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]
Ids = npt.NDArray[Any]  # numbers of any type
NONE: Array = np.zeros(0, np.int64)

Counts = dict[str, int | float]


@dataclass(frozen=True)
class Batch:
    """Rows as arrays of shape [B, T]."""

    FILLS: ClassVar[tuple[int, ...]] = ()  # padding of the arrays that a subclass adds
    # Whether each target counts by itself, so that a part of a row can be trained on.
    divisible: ClassVar[bool] = True
    input_ids_BT: Array
    labels_BT: Array
    positions_BT: Array
    segments_BT: Array

    @classmethod
    def padding(cls, rows: int, width: int, pad_id: int) -> Self:
        """Rows without a token."""
        fills = (pad_id, IGNORE, 0, -1, *cls.FILLS)
        # In one piece, which malloc keeps for the next batch.
        arrays = np.empty((len(fills), rows, width), np.int64)
        arrays[:] = np.reshape(fills, (-1, 1, 1))
        return cls(*arrays)

    @property
    def parts_BT(self) -> Array:
        """Which record, or branch of one, a position belongs to; negative: padding."""
        return self.segments_BT

    def spans(self, row: int) -> Iterator[tuple[int, int]]:
        """(start, end) of each part of a row, without padding."""
        parts = self.parts_BT[row]
        borders = [*np.flatnonzero(np.diff(parts, prepend=-2)).tolist(), len(parts)]
        return ((start, end) for start, end in pairwise(borders) if parts[start] >= 0)

    @property
    def live_tokens(self) -> int:
        """Positions that have a target."""
        return int((self.labels_BT != IGNORE).sum())

    def without_targets(self) -> Self:
        """The same rows without targets."""
        return replace(self, labels_BT=np.full_like(self.labels_BT, IGNORE))


class Rows(ABC):
    """A fixed number of rows, each built on demand."""

    row_length: int
    pad_id: int
    trimmed = False  # whether a batch is only as wide as its longest row
    batch_type: type[Batch] = Batch

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def fill(self, rows: Array, batch: Batch, lines: Array) -> None:
        """Write the rows with these numbers into these lines of the batch, which are padding."""

    @abstractmethod
    def counts(self) -> Counts:
        """Counts of rows and tokens, for the manifest."""

    @property
    def epoch(self) -> int:
        """Rows of one pass."""
        return len(self)

    def draws(self) -> list[tuple[int, float]]:
        """(rows, their total weight) of consecutive groups of rows that are drawn by weight."""
        return [(len(self), 1.0)]

    def lengths(self) -> Array:
        """Positions of each row that hold a token, of shape [rows]."""
        return np.full(len(self), self.row_length)

    def width(self, rows: Collection[int]) -> int:
        """Width T of a batch: `row_length`, or, if trimmed, the longest row rounded up."""
        if not self.trimmed or not len(rows):
            return self.row_length
        longest = int(self.lengths()[np.asarray(rows)].max())
        return min(self.row_length, -(-longest // WIDTH_STEP) * WIDTH_STEP)

    def batch(self, rows: Collection[int]) -> Batch:
        """A batch of the rows with these numbers."""
        width = self.width(rows)
        batch = self.batch_type.padding(len(rows), width, self.pad_id)
        numbers = np.asarray(rows, np.int64)
        lines = np.arange(len(rows))
        together = max(1, FILLED_TOGETHER // width)
        for first in range(0, len(lines), together):
            span = slice(first, first + together)
            self.fill(numbers[span], batch, lines[span])
        return self.finished(batch)

    def finished(self, batch: Batch) -> Batch:
        """The batch after all of its rows are written."""
        return batch


class MixedRows(Rows):
    """The rows of several groups; `weights[g]` is the fraction of rows drawn from group g."""

    def __init__(
        self, groups: Sequence[Rows], weights: Sequence[float], *, epoch: int | None = None
    ) -> None:
        """`epoch`: rows of one pass with exactly these fractions; None: all rows."""
        assert len(groups) == len(weights) > 0, f"{len(groups)} groups with {len(weights)} weights"
        self.groups = tuple(groups)
        self.weights = tuple(weights)
        self._epoch = epoch
        self.row_length = groups[0].row_length
        self.pad_id = groups[0].pad_id
        self.batch_type = groups[0].batch_type
        self.trimmed = any(group.trimmed for group in groups)
        self._firsts = np.cumsum([0, *(len(group) for group in groups)])
        self._lengths = np.concatenate([group.lengths() for group in groups])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    @property
    def epoch(self) -> int:
        return self._epoch or len(self)

    def draws(self) -> list[tuple[int, float]]:
        """Parts of each group's weight by the weights of its rows."""
        parts: list[tuple[int, float]] = []
        for group, weight in zip(self.groups, self.weights, strict=True):
            total = sum(part for _, part in group.draws())
            parts += [
                (rows, weight * (part / total if total else 1.0)) for rows, part in group.draws()
            ]
        return parts

    @property
    def is_exact(self) -> bool:
        """Whether a pass has exactly the shares."""
        return self._epoch is not None

    def lengths(self) -> Array:
        return self._lengths

    def fill(self, rows: Array, batch: Batch, lines: Array) -> None:
        numbers = np.searchsorted(self._firsts, rows, side="right") - 1
        for number, group in enumerate(self.groups):
            mine = np.flatnonzero(numbers == number)
            if len(mine):
                group.fill(rows[mine] - self._firsts[number], batch, lines[mine])

    def finished(self, batch: Batch) -> Batch:
        return self.groups[0].finished(batch)

    def counts(self) -> Counts:
        """Sums over the groups; fill and multiplicity are weighted means."""
        parts = [group.counts() for group in self.groups]
        total: Counts = {
            name: sum(group_counts[name] for group_counts in parts) for name in parts[0]
        }
        filled = sum(group_counts["fill"] * group_counts["rows"] for group_counts in parts)
        total |= {
            "row_length": self.row_length,
            "epoch": self.epoch,
            "fill": filled / max(1, total["rows"]),
        }
        if "target_multiplicity" in total:
            distinct = sum(
                group_counts["target_tokens"] / group_counts["target_multiplicity"]
                for group_counts in parts
            )
            total["target_multiplicity"] = total["target_tokens"] / distinct if distinct else 1.0
        return total | {
            f"rows_of_source_{number}": group_counts["rows"]
            for number, group_counts in enumerate(parts)
        }


def best_fit(lengths: Sequence[int] | Array, capacity: int) -> list[list[int]]:
    """Best-fit decreasing bin packing (Johnson 1973): the items of each bin, the longest first."""
    # A bin's room is a small whole number, so open bins are kept by room, and a bit per room that
    # has one shows the tightest fit: 200,000 items take 0.3 s.
    bins: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # heaps of bin numbers
    rooms = 0  # bit r is set where with_room[r] is not empty
    for item in np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist():
        length = int(lengths[item])
        assert length <= capacity, f"item of {length} in bins of {capacity}"
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            number = heappop(with_room[room])
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room = capacity
            number = len(bins)
            bins.append([])
        bins[number].append(item)
        if remaining := room - length:
            heappush(with_room[remaining], number)
            rooms |= 1 << remaining
    return bins


def counted_up(starts: Array, lengths: Array) -> Array:
    """`starts[i]`, `starts[i] + 1`, ... of `lengths[i]` numbers each, one after the other."""
    ends = lengths.cumsum()
    return np.asarray(
        np.arange(ends[-1] if len(ends) else 0) + (starts - ends + lengths).repeat(lengths)
    )


class PackedRows(Rows):
    """Rows of items, such as pieces of records; packed, several share a row."""

    def pack(self, sizes: Array, weights: Ids | None, *, packed: bool) -> None:
        """Plan the rows of items of these sizes; only items of one weight share a row."""
        self.trimmed = not packed
        orders = [NONE]
        counts = [NONE]
        self._draws: list[tuple[int, float]] = []
        for weight, numbers in by_weight(weights, len(sizes)):
            items = np.ones_like(numbers)  # of each row
            if packed:
                order, items = _packed(sizes[numbers], self.row_length)
                numbers = numbers[order]
            orders.append(numbers)
            counts.append(items)
            self._draws.append((len(items), weight * len(items)))
        self._items = np.concatenate(orders)
        self._ends = np.concatenate(counts).cumsum()
        tokens = np.append(0, np.cumsum(sizes[self._items]))
        self._lengths: Array = np.diff(tokens[np.append(0, self._ends)])

    def __len__(self) -> int:
        return len(self._ends)

    def draws(self) -> list[tuple[int, float]]:
        return self._draws

    def lengths(self) -> Array:
        return self._lengths

    def items_of(self, rows: Array) -> tuple[Array, Array]:
        """(items of these rows, one row after the other; number of items of each row)."""
        begins = np.where(rows, self._ends[rows - 1], 0)
        counts = self._ends[rows] - begins
        return self._items[counted_up(begins, counts)], counts


def _packed(sizes: Array, row_length: int) -> tuple[Array, Array]:
    orders = [NONE]
    counts = [NONE]
    for first in range(0, len(sizes), PACKED_TOGETHER):
        rows = best_fit(sizes[first : first + PACKED_TOGETHER], row_length)
        orders.append(np.fromiter(chain.from_iterable(rows), np.int64) + first)
        counts.append(np.fromiter(map(len, rows), np.int64))
    return np.concatenate(orders), np.concatenate(counts)


def by_weight(weights: Ids | None, items: int) -> list[tuple[float, Array]]:
    """(weight, items that have it), the lightest first; one entry of weight 1 without weights.

    Raises DataError for more than MOST_WEIGHTS.
    """
    if weights is None:
        return [(1.0, np.arange(items))]
    distinct, which = np.unique(weights, return_inverse=True)
    if len(distinct) > MOST_WEIGHTS:
        raise DataError(
            f"the rows of the training data have {len(distinct)} different weights, but rows of "
            f"one weight are packed together, of at most {MOST_WEIGHTS}; round them, such as to "
            "one digit"
        )
    return [
        (float(weight), np.flatnonzero(which == number)) for number, weight in enumerate(distinct)
    ]


# Pairs (from, to) of different token ids, between which no token is a target.
Intervals = tuple[tuple[int, int], ...]


def masked(intervals: Intervals, ids: Ids, begins: Flags) -> Flags:
    """Which of the N tokens are not targets; `begins[t]` says that a record begins at t.

    A token is masked if any pair masks it.
    """
    mask = np.zeros(len(ids), bool)
    for opens, closes in intervals:
        closing = ids == closes
        events = np.flatnonzero((ids == opens) | closing | begins)  # where the state may change
        states = np.concatenate([[False], ids[events] == opens])
        mask |= np.repeat(states, np.diff(events, prepend=0, append=len(ids))) | closing
    return mask
