"""The order of the rows: a pure function of the seed and the place, the same for any world size, resumed at any step.

Shuffled: every row once an epoch. Weighted: groups of rows in fixed proportions. Length-grouped: every row once an epoch,
rows of about the same length in the same step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, final

import numpy as np
import numpy.typing as npt

from ttrain.errors import DataError

U64 = np.uint64
Numbers = npt.NDArray[np.int64]
STEP, FACTORS = U64(0x9E3779B97F4A7C15), (U64(0xBF58476D1CE4E5B9), U64(0x94D049BB133111EB))  # of SplitMix64
SHIFTS = (U64(30), U64(27), U64(31))
FEISTEL_ROUNDS = 6  # 4 make a pseudo-random permutation of independent round functions (Luby and Rackoff 1988); 2 to spare
DRAWS_PER_CYCLE = 10_000  # shares of a weighted order are exact in each cycle, to one in so many
GROUPED_STEPS = 50  # rows are sorted by length within so many steps: enough to be alike, few enough to stay mixed
CACHED_PARTS = 4  # a step touches two at most; those made ahead may touch the next


def permute(index: npt.NDArray[Any], size: int, seed: int, epoch: int) -> Numbers:
    """Image of `index` under the permutation of [0, size) that belongs to (seed, epoch).

    A Feistel network on the next even power of two, walked until the image lies inside (Black and Rogaway 2002): under four
    rounds of walking on average.
    """
    assert size > 0, "an empty set has no order"
    half = max(1, (int(size - 1).bit_length() + 1) // 2)
    mask = U64((1 << half) - 1)
    values = np.asarray(index, dtype=U64).copy()
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], U64(half), mask, seed, epoch)
        outside = values >= U64(size)
    return values.astype(np.int64)


def _feistel(values: npt.NDArray[U64], half: U64, mask: U64, seed: int, epoch: int) -> npt.NDArray[U64]:
    left, right = values >> half, values & mask
    for key in _keys(seed, epoch):
        left, right = right, left ^ (mix(right ^ key) & mask)
    return (left << half) | right


@lru_cache(maxsize=64)
def _keys(seed: int, epoch: int) -> list[U64]:
    """Of the rounds."""
    return list(mix(np.array([(seed << 32) ^ (epoch << 8) ^ turn for turn in range(FEISTEL_ROUNDS)], dtype=U64)))


def mix(values: npt.NDArray[U64]) -> npt.NDArray[U64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    values = values + STEP
    values = (values ^ (values >> SHIFTS[0])) * FACTORS[0]
    values = (values ^ (values >> SHIFTS[1])) * FACTORS[1]
    return values ^ (values >> SHIFTS[2])


def derived_seed(seed: int, number: int) -> int:
    """A seed of 32 bits for purpose `number`, unrelated to the seed itself."""
    return int(mix(np.array([(seed << 32) ^ (number + 1)], dtype=U64))[0] >> U64(32))


class Order(ABC):
    """Which rows make which step. `total_rows` ends the run, also in the middle of a step or an epoch."""

    def __init__(self, rows: int, rows_per_step: int, total_rows: int, seed: int) -> None:
        self.rows, self.rows_per_step, self.total_rows, self.seed = rows, rows_per_step, total_rows, seed

    @property
    def steps(self) -> int:
        """Optimizer steps; the last one may be smaller, and none is dropped."""
        return -(-self.total_rows // self.rows_per_step)

    def step_rows(self, step: int) -> Numbers:
        """Row numbers of a step, counted from 0, over all ranks."""
        start = step * self.rows_per_step
        return self.rows_at(np.arange(start, min(start + self.rows_per_step, self.total_rows)))

    @abstractmethod
    def rows_at(self, places: Numbers) -> Numbers:
        """Row numbers at these places of the whole run; it costs nothing for the places before."""


@final
class ShuffledOrder(Order):
    """Each epoch is a keyed permutation of all rows."""

    def rows_at(self, places: Numbers) -> Numbers:
        found = np.empty_like(places)
        epochs = places // self.rows
        for epoch in sorted(set(epochs.tolist())):  # np.unique would import numpy.ma, 7 ms of the first batch
            there = epochs == epoch
            found[there] = permute(places[there] % self.rows, self.rows, self.seed, epoch)
        return found


@final
class WeightedOrder(Order):
    """Groups of rows by weight, each shuffled on its own: a small group with a large weight is passed through more often.

    Draws come in cycles, each with a fixed quota a group in keyed order, so shares are exact and not left to chance. Draw
    number k of a group is row k modulo its size in its pass k // size, so that a pass holds each of its rows once. Memory
    and a skip cost one cycle.
    """

    def __init__(
        self, group_rows: Sequence[int], weights: Sequence[float], rows_per_step: int, total_rows: int, seed: int
    ) -> None:
        """Raises DataError where a group has no row, or so small a weight that it would never be drawn."""
        super().__init__(sum(group_rows), rows_per_step, total_rows, seed)
        self.group_rows, self.quotas = list(group_rows), quotas(weights, DRAWS_PER_CYCLE)
        for group, (rows, quota, weight) in enumerate(zip(group_rows, self.quotas, weights, strict=True)):
            if rows == 0 or quota == 0:
                why = "gave no row to learn from" if rows == 0 else f"would get none of {DRAWS_PER_CYCLE} draws"
                raise DataError(f"source {group + 1} has the weight {weight} but {why}; mend it or leave it out")
        self._firsts = np.cumsum([0, *group_rows])
        self._cycle = lru_cache(CACHED_PARTS)(self._draws_of_cycle)

    def rows_at(self, places: Numbers) -> Numbers:
        groups, draws = np.empty_like(places), np.empty_like(places)
        for cycle in np.unique(places // DRAWS_PER_CYCLE):
            there = places // DRAWS_PER_CYCLE == cycle
            groups[there], draws[there] = (part[places[there] % DRAWS_PER_CYCLE] for part in self._cycle(int(cycle)))
        found = np.empty_like(places)
        for group in np.unique(groups):
            size, seed = self.group_rows[group], derived_seed(self.seed, int(group) + 1)
            for turn in np.unique(draws[groups == group] // size):
                there = (groups == group) & (draws // size == turn)
                found[there] = self._firsts[group] + permute(draws[there] % size, size, seed, int(turn))
        return found

    def _draws_of_cycle(self, cycle: int) -> tuple[Numbers, Numbers]:
        """(group, how many draws of that group came before) of each draw of a cycle."""
        slots = permute(np.arange(DRAWS_PER_CYCLE), DRAWS_PER_CYCLE, derived_seed(self.seed, 0), cycle)
        groups = np.searchsorted(np.cumsum(self.quotas), slots, side="right")
        draws = np.empty_like(groups)
        for group, quota in enumerate(self.quotas):
            draws[groups == group] = cycle * quota + np.arange(quota)
        return groups, draws


@final
class LengthGroupedOrder(Order):
    """Every row once an epoch, the rows of a step of about the same length, long and short steps in random order.

    Each epoch's keyed shuffle is taken in parts of GROUPED_STEPS steps, fewer in a small set, so that epochs differ; a part
    is sorted by length, dealt out to its steps, and the steps are put in keyed order. Within a step rows ascend, so that
    micro-batches are alike too. A skip costs one part.
    """

    def __init__(self, lengths: Numbers, rows_per_step: int, total_rows: int, seed: int) -> None:
        super().__init__(len(lengths), rows_per_step, total_rows, seed)
        self._lengths = lengths
        self._steps = max(1, min(GROUPED_STEPS, len(lengths) // (4 * rows_per_step)))
        self._part = lru_cache(CACHED_PARTS)(self._rows_of_part)

    def rows_at(self, places: Numbers) -> Numbers:
        found = np.empty_like(places)
        epochs = places // self.rows
        parts = (places // self.rows_per_step - epochs * self.rows // self.rows_per_step) // self._steps
        for epoch, part in np.unique(np.stack([epochs, parts], axis=1), axis=0).tolist():
            there = (epochs == epoch) & (parts == part)
            start, rows = self._part(epoch, part)
            found[there] = rows[places[there] - start]
        return found

    def _rows_of_part(self, epoch: int, part: int) -> tuple[int, Numbers]:
        """First place of a part of an epoch, and the rows from there on. An epoch may begin and end within a step."""
        size, first = self.rows_per_step, epoch * self.rows
        first_step = first // size + part * self._steps
        start = max(first, first_step * size)
        end = min(first + self.rows, (first_step + self._steps) * size)
        rows = permute(np.arange(start, end) - first, self.rows, self.seed, epoch)
        rows = rows[np.argsort(self._lengths[rows], kind="stable")]
        step_of_place = np.arange(start, end) // size - first_step
        steps = int(step_of_place[-1]) + 1
        rank_of_step = permute(np.arange(steps), steps, derived_seed(self.seed, epoch), part)
        places_by_rank = np.argsort(rank_of_step[step_of_place], kind="stable")
        found = np.empty_like(rows)
        found[places_by_rank] = rows
        return start, found


def quotas(weights: Sequence[float], draws: int) -> list[int]:
    """Draws of each weight, adding up to `draws`: rounded down, and what is left to the largest remainders."""
    exact = np.asarray(weights, float) / np.sum(weights) * draws
    found = np.floor(exact).astype(np.int64)
    found[np.argsort(found - exact, kind="stable")[: draws - int(found.sum())]] += 1
    return [int(quota) for quota in found]
