"""Whether two models differ on the same items: p-values of one comparison, and of many at once. Loads numpy alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK = 1 << 18  # drawn item numbers that are in memory at once


def sign_test(wins: int, losses: int) -> float:
    """Two-sided p of that many items being right for one model alone and for the other alone: the exact form of McNemar's
    test, which holds its level for two classifiers on one test set (Dietterich 1998,
    https://doi.org/10.1162/089976698300017197). Items on which both agree tell nothing.
    """
    count, fewer = wins + losses, min(wins, losses)
    logs = [
        math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) - count * math.log(2)
        for k in range(fewer + 1)
    ]
    return min(1.0, 2 * math.fsum(map(math.exp, logs)))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values for being right about all of them at once (Holm 1979, https://www.jstor.org/stable/4615733): of twenty
    comparisons of equal models, one is below 0.05 by chance. Those that are no number stay so and do not count."""
    known = sorted((p, number) for number, p in enumerate(p_values) if not math.isnan(p))
    found, highest = [math.nan] * len(p_values), 0.0
    for rank, (p, number) in enumerate(known):
        highest = max(highest, min(1.0, (len(known) - rank) * p))
        found[number] = highest
    return found


def randomised(differences_N: NDArray[np.float64], resamples: int, seed: int) -> float:
    """Two-sided p of the summed difference where each item's two scores change places by chance (approximate
    randomisation: Noreen 1989; Yeh 2000, https://aclanthology.org/C00-2137). Never below 1 / (resamples + 1)."""
    if not resamples:
        return math.nan
    random, count = np.random.default_rng(seed), len(differences_N)
    seen, reached = abs(float(differences_N.sum())), 0
    for start in range(0, resamples, rows := max(1, CHUNK // count)):
        rows = min(rows, resamples - start)
        signs_RN = 1.0 - 2.0 * random.integers(2, size=(rows, count), dtype=np.int8)
        reached += int((np.abs(signs_RN @ differences_N) >= seen * (1 - 1e-12)).sum())
    return (1 + reached) / (1 + resamples)
