"""Draw the values of trials: TPE (arXiv:1206.2944 by way of `optuna.samplers.TPESampler`), random, grid.

Each trial is drawn under a seed made of the sweep's and its own number, from the trials that ended before it, so that a
sweep that was killed continues as it would have. Imports Optuna.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from ttrain.errors import UsageError
from ttrain.experiments.records import COMPLETED, DIVERGED, Trial
from ttrain.experiments.space import Dimension, Interval, Space, Values

STARTUP_TRIALS = 4  # before TPE learns from them; Optuna's own 10 would leave nothing to learn in a sweep of eight
DRAWS = 20  # of the same trial, where what is drawn was tried before
STATES = {COMPLETED: TrialState.COMPLETE, DIVERGED: TrialState.PRUNED}  # of which the sampler learns


@dataclass(frozen=True)
class TrialSampler:
    """Draws trials of a space by a sampler of this kind: tpe, random or grid."""

    space: Space
    kind: str
    seed: int
    maximize: bool

    def draw(self, trials: Sequence[Trial]) -> Trial:
        """The next trial, with values that no trial had. Raises UsageError where there are none left."""
        number, tried = len(trials) + 1, {_label(trial.values) for trial in trials}
        for values in self._proposals(number, trials):
            if _label(values) not in tried:
                return Trial(number, values)
        raise UsageError(f"{', '.join(self.space.dimensions)} have no values left for trial {number}; vary them more widely")

    def upcoming(self, trials: Sequence[Trial], count: int) -> list[Trial]:
        """The next trials, as far as they do not depend on results of others: at most `count`."""
        if self.kind == "tpe":
            count = min(count, STARTUP_TRIALS - len(trials))
        drawn = list(trials)
        for _ in range(count):
            drawn.append(self.draw(drawn))
        return drawn[len(trials) :]

    def _proposals(self, number: int, trials: Sequence[Trial]) -> Iterator[Values]:
        if self.kind == "tpe" and number <= STARTUP_TRIALS:
            yield self._spread(number)
        for attempt in range(DRAWS if self.kind != "grid" else 0):
            yield self._suggested(number, attempt, trials)
        yield from map(self.space.combination, range(self.space.size or 0))

    def _suggested(self, number: int, attempt: int, trials: Sequence[Trial]) -> Values:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        seed = int(np.random.SeedSequence([self.seed, number, attempt]).generate_state(1)[0])
        tpe, random = (
            optuna.samplers.TPESampler(n_startup_trials=STARTUP_TRIALS, seed=seed),
            optuna.samplers.RandomSampler(seed),
        )
        study = optuna.create_study(
            sampler=random if self.kind == "random" else tpe, direction="maximize" if self.maximize else "minimize"
        )
        study.add_trials([self._told(trial) for trial in trials if trial.outcome in STATES])
        params = study.ask(self._distributions()).params
        return {key: _value(dimension, params[key]) for key, dimension in self.space.dimensions.items()}

    def _told(self, trial: Trial) -> FrozenTrial:
        """The trial in the form that Optuna learns from."""
        params = {key: _param(dimension, trial.values[key]) for key, dimension in self.space.dimensions.items()}
        return optuna.trial.create_trial(
            state=STATES[trial.outcome], params=params, distributions=self._distributions(), value=trial.value
        )

    def _distributions(self) -> dict[str, BaseDistribution]:
        return {key: _distribution(dimension) for key, dimension in self.space.dimensions.items()}

    def _spread(self, number: int) -> Values:
        """Values of one of the first trials, which together reach all parts of each setting's range: a Latin hypercube
        (McKay, Beckman and Conover 1979, doi.org/10.1080/00401706.1979.10489755)."""
        random = np.random.default_rng(self.seed)
        chosen = {}
        for key, dimension in self.space.dimensions.items():
            parts, places = random.permutation(STARTUP_TRIALS), random.random(STARTUP_TRIALS)
            chosen[key] = dimension.at(float(parts[number - 1] + places[number - 1]) / STARTUP_TRIALS)
        return chosen


def _distribution(dimension: Dimension) -> BaseDistribution:
    if isinstance(dimension, Interval):
        return FloatDistribution(dimension.low, dimension.high, log=dimension.log)
    last = len(dimension.values) - 1
    return IntDistribution(0, last) if dimension.ordered else CategoricalDistribution(range(last + 1))


def _value(dimension: Dimension, drawn: Any) -> Any:
    """The setting's value for what Optuna drew."""
    return dimension.nearest(drawn) if isinstance(dimension, Interval) else dimension.values[drawn]


def _param(dimension: Dimension, value: Any) -> Any:
    """The value in the form in which Optuna draws it."""
    return value if isinstance(dimension, Interval) else [*map(_label, dimension.values)].index(_label(value))


def _label(value: Any) -> str:
    """A value, or the values of a trial, as text: in Python 1 equals true."""
    return json.dumps(value)
