"""Which trials the next decision of an experiment needs: a function of those that have ended.

Rounds give every change one more seed, the same for all, and stop what is worse by more than the
noise. The best is run again on fresh seeds, and decided by these alone: the best of many changes
without effect looks better than it is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ttrain.evaluate.noise import Noise
from ttrain.evaluate.statistics import student_quantile
from ttrain.store.sweeps import Place

LEVEL = 0.02  # of all tests by which rounds stop changes, each of which is tested in each round
FEWEST_FREEDOM = 3  # of the noise that the home knows, to stop a change after its first seed
FRESH = (
    1000  # the fresh seeds of 5 rounds are 5001 to 5005: no other number of rounds has used them
)


@dataclass
class Standing:
    """How far an experiment is."""

    seeds: dict[
        int, list[int]
    ]  # of each change that is decided: the seeds which it shares with the baseline
    wanted: list[Place]  # trials that the next decision needs; empty once all is decided
    stopped: dict[int, bool] = field(
        default_factory=dict
    )  # by rounds: whether also worse than the baseline
    winner: int | None = None  # the best change of the rounds, which fresh seeds decide


@dataclass(frozen=True)
class Rounds:
    """The plan of an experiment.

    `values`: of each trial that has ended, less is better, on the records that choose; `noise`: of
    the baseline, as the home has it from before.
    """

    changes: int
    seeds: int
    values: Mapping[Place, float]
    lost: frozenset[int] = frozenset()  # changes that diverged or failed
    noise: Noise | None = None
    stops: bool = True  # whether what is worse stops, and fresh seeds decide

    def standing(self) -> Standing:
        """What has been decided, and what the next decision needs."""
        alive = [change for change in range(self.changes) if change not in self.lost]
        standing = Standing({change: [] for change in alive}, [])
        seeds = range(1, self.seeds + 1)
        for seed in seeds:
            if len(alive) < 2 or alive[0]:  # nothing to compare, or nothing to compare with
                return standing
            standing.wanted = [
                (change, seed) for change in alive if (change, seed) not in self.values
            ]
            if standing.wanted:
                return standing
            for change in alive:
                standing.seeds[change].append(seed)
            if self.stops:
                standing.stopped |= self._behind(alive, seed)
                alive = [change for change in alive if change not in standing.stopped]
        best = min(
            alive,
            key=lambda change: (
                math.fsum(self.values[change, seed] for seed in seeds) / self.seeds  # the mean
            ),
        )
        if self.stops and self.changes > 2 and best:  # fresh seeds alone decide the winner
            first = FRESH * self.seeds + 1
            fresh = list(range(first, first + self.seeds))
            places = [(change, seed) for seed in fresh for change in (0, best)]
            standing.wanted = [place for place in places if place not in self.values]
            standing.winner = best
            standing.seeds[best] = fresh
        return standing

    def _behind(self, alive: Sequence[int], seeds: int) -> dict[int, bool]:
        """The changes behind the best by more than the noise; whether also behind the baseline."""
        values = [self.values[change, seed] for change in alive for seed in range(1, seeds + 1)]
        table = np.array(values).reshape(len(alive), seeds)
        noise = Noise.of_table(table) if seeds > 1 else self.noise
        if noise is None or not noise.spread or (seeds == 1 and noise.freedom < FEWEST_FREEDOM):
            return {}
        level = LEVEL / (self.changes - 1) / self.seeds
        reach = student_quantile(1 - level / 2, noise.freedom) * noise.spread * math.sqrt(2 / seeds)
        means = dict(zip(alive, table.mean(1).tolist(), strict=True))
        least = min(means.values())
        return {
            change: mean > means.get(0, math.inf) + reach
            for change, mean in means.items()
            if change and mean > least + reach
        }
