"""How much the metric of a setting differs from seed to seed, from all runs of a home that differ in their seeds alone."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ttrain.config import SHAPE_NO_RESULT, flatten
from ttrain.config.training import seeds_of
from ttrain.core.files import JsonObject
from ttrain.core.hashing import digest_of
from ttrain.evaluate.statistics import POWER, student_quantile
from ttrain.store import runs

MOST_SEEDS = 1000  # a difference that needs more is not worth measuring


@dataclass(frozen=True)
class Noise:
    """The spread (standard deviation) of a metric over the seeds of one setting, and the degrees of freedom behind it."""

    spread: float
    freedom: int

    @classmethod
    def of_values(cls, values: Iterable[float]) -> "Noise | None":
        """That of runs which differ in their seeds alone; None of fewer than two."""
        array = np.array([*values])
        return cls(float(array.std(ddof=1)), len(array) - 1) if len(array) > 1 else None

    @classmethod
    def of_table(cls, table: npt.NDArray[np.float64]) -> "Noise | None":
        """That of settings [K] with common seeds [N], less what each seed adds to all of them; None of a single seed."""
        settings, seeds = table.shape
        freedom = (settings - 1) * (seeds - 1)
        rest = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
        return cls(math.sqrt(float((rest**2).sum()) / freedom), freedom) if freedom else None

    def seeds_for(self, difference: float, *, pairs: bool = False) -> int | None:
        """How many common seeds show a true difference of two settings with probability POWER at the level of 5 %; None
        beyond MOST_SEEDS. `pairs`: the spread is that of paired differences, not of one setting's values."""
        spread = self.spread if pairs else math.sqrt(2) * self.spread
        for seeds in range(2, MOST_SEEDS + 1):
            quantiles = student_quantile(0.975, seeds - 1) + student_quantile(POWER, seeds - 1)
            if quantiles * spread <= difference * math.sqrt(seeds):
                return seeds
        return None


def setting_key(settings: JsonObject) -> str:
    """Digest of the recorded settings that shape a result, but for the seeds: runs that share it are replicates."""
    apart = {*seeds_of(1), "name"}
    leaves = {name: value for name, value in flatten(settings) if name not in apart}
    return digest_of({name: value for name, value in leaves.items() if name.partition(".")[0] not in SHAPE_NO_RESULT})


def values_by_seed(home: Path, metric: str) -> Mapping[str, Mapping[str, float]]:
    """The metric of the home's runs, by the key of their setting and the seeds of their trainings."""
    values: dict[str, dict[str, float]] = {}
    for run in runs.history(home):
        if (value := run["metrics"].get(metric)) is not None and math.isfinite(value):
            leaves = dict(flatten(run["settings"]))
            seeds = str([leaves.get(name) for name in seeds_of(1)])
            values.setdefault(setting_key(run["settings"]), {}).setdefault(seeds, value)
    return values


def noise_of(home: Path, metric: str, settings: JsonObject) -> Noise | None:
    """The noise of the setting of these recorded settings, as the home's runs show it; None where fewer than two do."""
    return Noise.of_values(values_by_seed(home, metric).get(setting_key(settings), {}).values())
