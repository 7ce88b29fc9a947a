"""The order in which rows are trained on: a keyed permutation of (seed, epoch).

It is the same for every number of ranks, and computed, not stored: any place of it in O(1).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import numpy as np

from ttrain.data.packing import Array, Ids, Words
from ttrain.errors import DataError

U64 = np.uint64
# Of SplitMix64.
STEP = U64(0x9E3779B97F4A7C15)
FACTORS = (U64(0xBF58476D1CE4E5B9), U64(0x94D049BB133111EB))
SHIFTS = (U64(30), U64(27), U64(31))
# 4 make a pseudo-random permutation of independent round functions (Luby and Rackoff 1988).
FEISTEL_ROUNDS = 6
# Fractions of a weighted order are exact in each cycle, to one in this number.
DRAWS_PER_CYCLE = 10_000
# Rows are sorted by length within this many steps: enough to be alike, few enough to stay mixed.
GROUPED_STEPS = 50
COUNTED_TOGETHER = 1 << 16  # rows whose tokens are counted at once for a budget
CACHED_PARTS = 4  # a step uses at most two; prefetched steps may use the next


def permute(index: Ids, size: int, seed: int, epoch: int) -> Array:
    """Image of `index` under the permutation of [0, size) that belongs to (seed, epoch).

    A Feistel network on the next even power of two, walked until the image lies inside (Black and
    Rogaway 2002): under four rounds of walking on average.
    """
    assert size > 0, "an empty set has no order"
    half = max(1, (int(size - 1).bit_length() + 1) // 2)
    mask = U64((1 << half) - 1)
    values = np.asarray(index, dtype=U64).copy()
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        values[outside] = feistel(values[outside], U64(half), mask, seed, epoch)
        outside = values >= U64(size)
    return values.astype(np.int64)


def feistel(values: Words, half: U64, mask: U64, seed: int, epoch: int) -> Words:
    """Permute the values by a Feistel network with keys of the seed and the epoch."""
    high_bits = values >> half
    low_bits = values & mask
    for key in _keys(seed, epoch):
        high_bits, low_bits = low_bits, high_bits ^ (mix(low_bits ^ key) & mask)
    return (high_bits << half) | low_bits


@lru_cache(maxsize=64)
def _keys(seed: int, epoch: int) -> list[U64]:
    keys = [(seed << 32) ^ (epoch << 8) ^ turn for turn in range(FEISTEL_ROUNDS)]
    return list(mix(np.array(keys, dtype=U64)))


def mix(values: Words) -> Words:
    """The next value of SplitMix64 (Steele, Lea and Flood 2014)."""
    return spread(values + STEP)


def spread(values: Words) -> Words:
    """The finalizer of SplitMix64."""
    values = (values ^ (values >> SHIFTS[0])) * FACTORS[0]
    values = (values ^ (values >> SHIFTS[1])) * FACTORS[1]
    return values ^ (values >> SHIFTS[2])


def derived_seed(seed: int, number: int) -> int:
    """A seed of 32 bits for purpose `number`, unrelated to the seed itself."""
    return int(mix(np.array([(seed << 32) ^ (number + 1)], dtype=U64))[0] >> U64(32))


@dataclass(eq=False)
class Order(ABC):
    """Maps steps to rows. `total_rows` ends the run, also within a step or an epoch."""

    rows: int
    rows_per_step: int
    total_rows: int
    seed: int
    row_tokens: int | Array = 1  # of all rows alike, or of each one, without padding

    @property
    def steps(self) -> int:
        """Optimizer steps; the last one may be smaller, and none is dropped."""
        return -(-self.total_rows // self.rows_per_step)

    def step_rows(self, step: int) -> Array:
        """Row numbers of a step, counted from 0, over all ranks."""
        start = step * self.rows_per_step
        return self.rows_at(np.arange(start, min(start + self.rows_per_step, self.total_rows)))

    def epoch_ends(self, every: int | None) -> frozenset[int]:
        """The steps that end every so many epochs with the epoch's last row; None: none."""
        rows = self.rows * (every or 1 + self.total_rows)
        return frozenset(
            -(-n // self.rows_per_step) for n in range(rows, self.total_rows + 1, rows)
        )

    def step_tokens(self, step: int) -> int:
        """Tokens of the rows of a step, over all ranks."""
        if not isinstance(self.row_tokens, int):
            return int(self.row_tokens[self.step_rows(step)].sum())
        start = step * self.rows_per_step
        return self.row_tokens * (min(start + self.rows_per_step, self.total_rows) - start)

    @property
    def tokens_per_row(self) -> float:
        """Mean tokens of a row."""
        return float(np.mean(self.row_tokens))

    def steps_to_read(self, tokens: int) -> int:
        """The fewest steps whose rows have so many tokens."""
        places = 0
        lengths = np.broadcast_to(self.row_tokens, self.rows)
        while True:
            ends = lengths[self.rows_at(np.arange(places, places + COUNTED_TOGETHER))].cumsum()
            if ends[-1] >= tokens:
                places += int(np.searchsorted(ends, tokens)) + 1
                return -(-places // self.rows_per_step)
            places += COUNTED_TOGETHER
            tokens -= int(ends[-1])

    @abstractmethod
    def rows_at(self, places: Array) -> Array:
        """Row numbers at these positions of the whole run, without computing earlier ones."""


@final
class ShuffledOrder(Order):
    """Each epoch is a keyed permutation of all rows."""

    def rows_at(self, places: Array) -> Array:
        return shuffled(places, self.rows, self.seed)


def shuffled(places: Array, size: int, seed: int) -> Array:
    """The numbers below `size` at these places of one permutation after another."""
    numbers = np.empty_like(places)
    epochs = places // size
    # np.unique would import numpy.ma, 7 ms of the first batch.
    for epoch in sorted(set(epochs.tolist())):
        in_epoch = epochs == epoch
        numbers[in_epoch] = permute(places[in_epoch] % size, size, seed, epoch)
    return numbers


@final
class WeightedOrder(Order):
    """Groups of rows by weight, each shuffled on its own; a group may be repeated.

    Draws come in cycles with a fixed quota per group in keyed order, so fractions are exact. Draw k
    of a group is row k modulo its size in its pass k // size. Memory and a skip cost one cycle.
    """

    def __init__(
        self,
        group_rows: Sequence[int],
        weights: Sequence[float],
        rows_per_step: int,
        total_rows: int,
        seed: int,
        *,
        draws: int = DRAWS_PER_CYCLE,
    ) -> None:
        """`draws`: of a cycle. Raises DataError for a group that would never be drawn."""
        super().__init__(sum(group_rows), rows_per_step, total_rows, seed)
        self.group_rows = group_rows
        self.draws = draws
        self.quotas = quotas(weights, draws)
        for number, (rows, quota, weight) in enumerate(
            zip(group_rows, self.quotas, weights, strict=True), start=1
        ):
            if rows == 0 or quota == 0:
                why = f"would get none of {draws} draws" if rows else "gave no row to learn from"
                raise DataError(
                    f"source {number} has the weight {weight} but {why}; fix it or leave it out"
                )
        self._firsts = np.cumsum([0, *group_rows])
        self._cycle = lru_cache(CACHED_PARTS)(self._groups_of_cycle)

    def rows_at(self, places: Array) -> Array:
        groups, draws = np.empty((2, *places.shape), places.dtype)
        for cycle in np.unique(places // self.draws):
            mask = places // self.draws == cycle
            in_cycle = places[mask] % self.draws
            groups[mask], draws[mask] = (column[in_cycle] for column in self._cycle(int(cycle)))
        row_numbers = np.empty_like(places)
        for group in np.unique(groups):
            mine = groups == group
            row_numbers[mine] = self._firsts[group] + shuffled(
                draws[mine], self.group_rows[group], derived_seed(self.seed, int(group) + 1)
            )
        return row_numbers

    def _groups_of_cycle(self, cycle: int) -> tuple[Array, Array]:
        slots = permute(np.arange(self.draws), self.draws, derived_seed(self.seed, 0), cycle)
        groups = np.searchsorted(np.cumsum(self.quotas), slots, side="right")
        draws = np.empty_like(groups)
        for group, quota in enumerate(self.quotas):
            draws[groups == group] = cycle * quota + np.arange(quota)
        return groups, draws


@final
class LengthGroupedOrder(Order):
    """Every row once an epoch; rows of a step have about the same length.

    Each epoch's keyed shuffle is cut into parts of GROUPED_STEPS steps, fewer in a small set, so
    that epochs differ; a part is sorted by length and cut into steps, which come in keyed order. A
    skip costs one part.
    """

    def __init__(self, lengths: Array, rows_per_step: int, total_rows: int, seed: int) -> None:
        super().__init__(len(lengths), rows_per_step, total_rows, seed)
        self._lengths = lengths
        self._steps = max(1, min(GROUPED_STEPS, len(lengths) // (4 * rows_per_step)))
        self._part = lru_cache(CACHED_PARTS)(self._rows_of_part)

    def rows_at(self, places: Array) -> Array:
        row_numbers = np.empty_like(places)
        epochs = places // self.rows
        steps = places // self.rows_per_step - epochs * self.rows // self.rows_per_step
        part_numbers = steps // self._steps
        for epoch, part_number in sorted(
            {*zip(epochs.tolist(), part_numbers.tolist(), strict=True)}
        ):
            in_part = (epochs == epoch) & (part_numbers == part_number)
            start, rows = self._part(epoch, part_number)
            row_numbers[in_part] = rows[places[in_part] - start]
        return row_numbers

    def _rows_of_part(self, epoch: int, part_number: int) -> tuple[int, Array]:
        # An epoch may begin and end within a step.
        size = self.rows_per_step
        first = epoch * self.rows
        first_step = first // size + part_number * self._steps
        start = max(first, first_step * size)
        end = min(first + self.rows, (first_step + self._steps) * size)
        rows = permute(np.arange(start, end) - first, self.rows, self.seed, epoch)
        rows = rows[np.argsort(self._lengths[rows], kind="stable")]
        step_of_place = np.arange(start, end) // size - first_step
        steps = int(step_of_place[-1]) + 1
        rank_of_step = permute(np.arange(steps), steps, derived_seed(self.seed, epoch), part_number)
        places_by_rank = np.argsort(rank_of_step[step_of_place], kind="stable")
        ordered_rows = np.empty_like(rows)
        ordered_rows[places_by_rank] = rows
        return start, ordered_rows


def quotas(weights: Sequence[float], draws: int) -> list[int]:
    """Draws of each weight, adding up to `draws`, by the largest remainders."""
    exact = np.asarray(weights, float) / np.sum(weights) * draws
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: draws - int(counts.sum())]] += 1
    return list(counts.tolist())
