"""How much a setting's metric differs between runs that differ in their seeds alone."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ttrain.core.files import JsonObject
from ttrain.evaluate.statistics import POWER, student_quantile
from ttrain.store.replicates import setting_key, values_by_seed

MOST_SEEDS = 1000  # a difference that needs more is not worth measuring


@dataclass(frozen=True)
class Noise:
    """Standard deviation of a metric over the seeds of one setting, and degrees of freedom."""

    spread: float
    freedom: int

    @classmethod
    def of_values(cls, values: Iterable[float]) -> "Noise | None":
        """The noise of runs that differ in their seeds alone; None of fewer than two."""
        array = np.array([*values])
        return cls(float(array.std(ddof=1)), len(array) - 1) if len(array) > 1 else None

    @classmethod
    def of_table(cls, table: npt.NDArray[np.float64]) -> "Noise | None":
        """The noise of settings [K] with common seeds [N], less each seed's effect, or None."""
        settings, seeds = table.shape
        freedom = (settings - 1) * (seeds - 1)
        rest = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
        return cls(math.sqrt(float((rest**2).sum()) / freedom), freedom) if freedom else None

    def seeds_for(self, difference: float, *, pairs: bool = False) -> int | None:
        """Common seeds that show a difference with probability POWER at the level of 5 %, or None.

        `pairs`: the spread is that of paired differences, not of one setting.
        """
        spread = self.spread if pairs else math.sqrt(2) * self.spread
        for seeds in range(2, MOST_SEEDS + 1) if difference else ():
            quantiles = student_quantile(0.975, seeds - 1) + student_quantile(POWER, seeds - 1)
            if quantiles * spread <= difference * math.sqrt(seeds):
                return seeds
        return None


def noise_of(home: Path, metric: str, settings: JsonObject) -> Noise | None:
    """The noise of a setting by the home's runs; None where fewer than two have these settings."""
    values = values_by_seed(home, metric).get(setting_key(settings), {}).values()
    # A set: a seed of another model's training leaves the metric as it is.
    return Noise.of_values({*values})
