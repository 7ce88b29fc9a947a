"""The order of the rows: a pure function of (seed, epoch), O(1) in memory and to resume, the same for any world size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

U64 = np.uint64
FEISTEL_ROUNDS = 6  # 4 make a pseudo-random permutation of independent round functions (Luby and Rackoff 1988); 2 to spare


def permute(index: npt.NDArray[Any], size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
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
    for turn in range(FEISTEL_ROUNDS):
        key = mix(np.array([(seed << 32) ^ (epoch << 8) ^ turn], dtype=U64))
        left, right = right, left ^ (mix(right ^ key) & mask)
    return (left << half) | right


def mix(values: npt.NDArray[U64]) -> npt.NDArray[U64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    with np.errstate(over="ignore"):
        values = (values + U64(0x9E3779B97F4A7C15)).astype(U64)
        values = (values ^ (values >> U64(30))) * U64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> U64(27))) * U64(0x94D049BB133111EB)
    return values ^ (values >> U64(31))


@dataclass(frozen=True)
class ShuffledOrder:
    """Which rows make which step. `total_rows` ends the run, also in the middle of a step or an epoch."""

    rows: int
    rows_per_step: int
    total_rows: int
    seed: int

    @property
    def steps(self) -> int:
        """Optimizer steps; the last one may be smaller, and none is dropped."""
        return -(-self.total_rows // self.rows_per_step)

    def step_rows(self, step: int) -> npt.NDArray[np.int64]:
        """Row numbers of a step, counted from 0, over all ranks."""
        start = step * self.rows_per_step
        places = np.arange(start, min(start + self.rows_per_step, self.total_rows))
        found = np.empty_like(places)
        for epoch in np.unique(places // self.rows):
            there = places // self.rows == epoch
            found[there] = permute(places[there] % self.rows, self.rows, self.seed, int(epoch))
        return found
