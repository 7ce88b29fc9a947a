"""Draw changes from ranges by what earlier ones gave: TPE (arXiv:1206.2944), by Optuna.

Each is drawn under a seed of its own number, so that a killed experiment continues as it would
have. Imports
Optuna.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

from ttrain.errors import UsageError
from ttrain.experiments.changes import Change
from ttrain.experiments.request import STARTUP
from ttrain.experiments.space import Interval, Space

DRAWS = 20  # of one change, where what is drawn was tried before


def draw(space: Space, changes: Sequence[Change], values: Mapping[int, float]) -> Change:
    """The next change, other than `changes`. `values`: the metrics of drawn ones, less is better.

    Raises UsageError where none is left.
    """
    number = len(changes)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    distributions: dict[str, BaseDistribution] = {
        key: FloatDistribution(dimension.low, dimension.high, log=dimension.log)
        if isinstance(dimension, Interval)
        else CategoricalDistribution(range(len(dimension.values)))
        for key, dimension in space.dimensions.items()
    }
    earlier = []
    for tried, metric in values.items():
        drawn = {key: _drawn(space, key, value) for key, value in changes[tried].values.items()}
        earlier.append(
            optuna.trial.create_trial(params=drawn, distributions=distributions, value=metric)
        )
    names = {each.name for each in changes}
    for attempt in range(DRAWS):
        sampler = optuna.samplers.TPESampler(
            n_startup_trials=STARTUP, seed=DRAWS * number + attempt
        )
        study = optuna.create_study(sampler=sampler)
        study.add_trials(earlier)
        change = Change.of(
            {
                key: space.dimensions[key].value(raw)
                for key, raw in study.ask(distributions).params.items()
            }
        )
        if change.name not in names:
            return change
    for listed in space.combinations(space.size) if space.size else ():
        change = Change.of(listed)
        if change.name not in names:
            return change
    raise UsageError(
        f"{', '.join(space.dimensions)} have no values left for change {number}; "
        "vary them more widely"
    )


def _drawn(space: Space, key: str, value: Any) -> Any:
    """A value in the form in which Optuna draws it."""
    dimension = space.dimensions[key]
    return (
        value
        if isinstance(dimension, Interval)
        else [*map(repr, dimension.values)].index(repr(value))
    )
