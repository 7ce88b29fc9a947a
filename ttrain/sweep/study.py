"""The trials of a sweep, in Optuna's study: a journal of JSON lines that a kill leaves whole. Imports Optuna; one process
at a time may have a study open (`records.Sweep.lock`).

Samplers: TPE (arXiv:1206.2944 by way of `optuna.samplers.TPESampler`), random, grid. Each trial draws under a seed made of
the sweep's and its own number, so that a sweep that was killed goes on as it would have.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from ttrain.core.files import whole_lines
from ttrain.errors import UsageError
from ttrain.sweep.records import Sweep
from ttrain.sweep.space import Dimension, IntegerRange, Interval, Space, Values

STARTUP_TRIALS = 4  # before TPE learns from them; Optuna's own 10 would leave nothing to learn in a sweep of eight
DRAWS = 20  # of the same trial, where what is drawn was tried before
PRUNING_TRIALS = 3  # that must be complete before another is compared with them
PRUNING_SHARE = 0.2  # of a training, at its beginning, in which no trial is ended
NAME = "sweep"
COMPLETED, PRUNED, DIVERGED, FAILED, RUNNING = "completed", "pruned", "diverged", "failed", "running"
STATES = {
    COMPLETED: TrialState.COMPLETE,
    PRUNED: TrialState.PRUNED,
    DIVERGED: TrialState.PRUNED,  # the sampler learns from it, unlike from a failed one
    FAILED: TrialState.FAIL,
}


@dataclass(frozen=True)
class Trial:
    """One choice of settings, and its outcome. `curve`: {tokens: value} of the metric while it trained."""

    number: int  # from 1
    values: Values
    outcome: str  # one of STATES, or "running": also one that was interrupted, and will go on
    value: float | None = None
    seconds: float | None = None
    run: str | None = None  # its newest pipeline run
    error: str | None = None
    curve: Mapping[int, float] = field(default_factory=dict)

    @property
    def last(self) -> float | None:
        """The metric where the trial ended, also of one that was ended early."""
        return self.value if self.value is not None or not self.curve else self.curve[max(self.curve)]

    def to_json(self) -> dict[str, Any]:
        """The form that `--json` prints."""
        return {**asdict(self), "curve": sorted(self.curve.items())}


class Study:
    """The trials of one sweep. Several threads may `note`, as Optuna's journal has a lock; the rest is for one."""

    def __init__(
        self, path: Path | None, space: Space, *, sampler: str, seed: int, maximize: bool, writes: bool = True
    ) -> None:
        """`path`: of the journal; None for a study in memory alone. Who does not write needs no lock."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        if path is not None and writes:
            whole_lines(path)  # Optuna cannot read a journal with a torn line inside
        self._study = _opened(path if writes or (path and path.exists()) else None, maximize=maximize, writes=writes)
        self.space, self.sampler, self.seed, self.maximize = space, sampler, seed, maximize
        self._distributions = {key: _distribution(dimension) for key, dimension in space.dimensions.items()}

    @classmethod
    def of(cls, sweep: Sweep, *, writes: bool = False) -> Study:
        """Open the study of a sweep."""
        request = sweep["asked"]
        options = {"sampler": request["sampler"], "seed": request["seed"], "maximize": sweep.measure.maximize}
        return cls(sweep.journal, sweep.space, **options, writes=writes)

    def trials(self) -> list[Trial]:
        """All trials, by their numbers."""
        return [self._trial_of(optuna_trial) for _, optuna_trial in sorted(self._own_trials().items())]

    def best(self) -> Trial | None:
        """The best completed trial; None where there is none."""
        return best_of(self.trials(), maximize=self.maximize)

    def ask(self) -> Trial:
        """Begin a new trial, with values that no trial had. Raises UsageError where there is none left."""
        number = 1 + max((trial.number for trial in self.trials()), default=0)
        return self._begin(number, self._drawn(number))

    def retry(self, failed: Trial) -> Trial:
        """Begin a failed trial again, under its number."""
        return self._begin(failed.number, self._frozen(failed.number).params)

    def note(self, number: int, **attributes: Any) -> None:
        """Record attributes of a trial: run, seconds, error."""
        trial = self._handle(number)
        for name, value in attributes.items():
            trial.set_user_attr(name, value)

    def report(self, number: int, curve: Mapping[int, float]) -> None:
        """Record the new points of a trial's curve."""
        reported = self._frozen(number).intermediate_values
        trial = self._handle(number)
        for tokens, value in curve.items():
            if tokens not in reported:
                trial.report(value, tokens)

    def is_hopeless(self, number: int) -> bool:
        """Whether the trial's best so far is worse than the median of the complete ones where it is now."""
        done = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        longest = max((trial.last_step or 0 for trial in done), default=0)
        pruner = optuna.pruners.MedianPruner(PRUNING_TRIALS, round(PRUNING_SHARE * longest))
        return bool(pruner.prune(self._study, self._frozen(number)))

    def tell(self, number: int, outcome: str, value: float | None = None) -> None:
        """Record how a trial ended, with the `value` of a completed one."""
        self.note(number, outcome=outcome)
        self._study.tell(self._frozen(number).number, value, state=STATES[outcome])

    def _begin(self, number: int, params: Values) -> Trial:
        """Record a running trial in one line of the journal, so that a kill leaves all of it or nothing."""
        attributes = {"trial": number}
        trial = optuna.trial.create_trial(
            state=TrialState.RUNNING, params=dict(params), distributions=self._distributions, user_attrs=attributes
        )
        self._study.add_trial(trial)
        return self._trial_of(trial)

    def _trial_of(self, optuna_trial: FrozenTrial) -> Trial:
        attributes = optuna_trial.user_attrs
        outcome = attributes.get("outcome", RUNNING) if optuna_trial.state.is_finished() else RUNNING
        return Trial(
            number=attributes["trial"],
            values=self._values(optuna_trial.params),
            outcome=outcome,
            value=optuna_trial.value if outcome == COMPLETED else None,
            seconds=attributes.get("seconds"),
            run=attributes.get("run"),
            error=attributes.get("error"),
            curve=dict(optuna_trial.intermediate_values),
        )

    def _own_trials(self) -> dict[int, FrozenTrial]:
        """Optuna's trials by our numbers; of a retried one the last."""
        return {trial.user_attrs["trial"]: trial for trial in self._study.get_trials(deepcopy=False)}

    def _frozen(self, number: int) -> FrozenTrial:
        return self._own_trials()[number]

    def _handle(self, number: int) -> optuna.trial.Trial:
        return optuna.trial.Trial(self._study, self._frozen(number)._trial_id)

    def _drawn(self, number: int) -> Values:
        """Values that no trial had, in the form in which Optuna draws them. Raises UsageError where none can be drawn."""
        tried = {_label(trial.values) for trial in self.trials()}  # as text: 1 equals true and 1.0
        if self.sampler == "tpe" and number <= STARTUP_TRIALS and _label(values := self._spread(number)) not in tried:
            return self._params(values)
        history = optuna.create_study(direction=self._study.direction)  # in memory: what is drawn again leaves no trace
        history.add_trials(self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)))
        for draw in range(DRAWS if self.sampler != "grid" else 0):
            history.sampler = self._sampler(number, draw)
            params = history.ask(self._distributions).params
            if _label(self._values(params)) not in tried:
                return params
        for values in map(self.space.combination, range(self.space.size or 0)):
            if _label(values) not in tried:
                return self._params(values)
        raise UsageError(f"{', '.join(self.space.dimensions)} have no values left for trial {number}; vary them more widely")

    def _values(self, params: Values) -> Values:
        return {key: _value(dimension, params[key]) for key, dimension in self.space.dimensions.items()}

    def _params(self, values: Values) -> Values:
        return {key: _drawn_for(dimension, values[key]) for key, dimension in self.space.dimensions.items()}

    def _spread(self, number: int) -> Values:
        """Values of one of the first trials, which together reach all parts of each setting's range: a Latin hypercube
        (McKay, Beckman and Conover 1979, doi.org/10.1080/00401706.1979.10489755)."""
        random = np.random.default_rng(self.seed)
        chosen = {}
        for key, dimension in self.space.dimensions.items():
            parts, places = random.permutation(STARTUP_TRIALS), random.random(STARTUP_TRIALS)
            chosen[key] = dimension.at(float(parts[number - 1] + places[number - 1]) / STARTUP_TRIALS)
        return chosen

    def _sampler(self, number: int, draw: int) -> optuna.samplers.BaseSampler:
        seed = int(np.random.SeedSequence([self.seed, number, draw]).generate_state(1)[0])
        if self.sampler == "random":
            return optuna.samplers.RandomSampler(seed)
        return optuna.samplers.TPESampler(n_startup_trials=STARTUP_TRIALS, seed=seed)


def upcoming(space: Space, earlier: Sequence[Trial], count: int, *, sampler: str, seed: int, maximize: bool) -> list[Trial]:
    """The next trials as far as they do not depend on what others will give: at most `count`."""
    if sampler == "tpe":
        count = min(count, STARTUP_TRIALS - len(earlier))
    study = Study(None, space, sampler=sampler, seed=seed, maximize=maximize)
    drawn = [study.ask() for _ in range(len(earlier) + max(0, count))]
    return drawn[len(earlier) :]


def completed(trials: Iterable[Trial], *, maximize: bool) -> list[Trial]:
    """The trials with a metric, the best first, the earlier of equals."""
    done = [trial for trial in trials if trial.outcome == COMPLETED and trial.value is not None]
    return sorted(done, key=lambda trial: (-(trial.value or 0.0) if maximize else trial.value or 0.0, trial.number))


def best_of(trials: Iterable[Trial], *, maximize: bool) -> Trial | None:
    """The trial with the best metric; None if there is none with one."""
    return next(iter(completed(trials, maximize=maximize)), None)


class _SweepLock(JournalFileOpenLock):
    """No lock: the sweep's is held already. Optuna's own would stay for 30 s where its process was killed."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        return None


def _opened(path: Path | None, *, maximize: bool, writes: bool) -> optuna.Study:
    storage = JournalStorage(JournalFileBackend(str(path), lock_obj=_SweepLock(str(path)))) if path else None
    with contextlib.suppress(KeyError):  # there is no study yet
        if storage:
            return optuna.load_study(study_name=NAME, storage=storage)
    direction = StudyDirection.MAXIMIZE if maximize else StudyDirection.MINIMIZE
    return optuna.create_study(storage=storage if writes else None, study_name=NAME, direction=direction)


def _distribution(dimension: Dimension) -> BaseDistribution:
    if isinstance(dimension, Interval):
        return FloatDistribution(dimension.low, dimension.high, log=dimension.log)
    if isinstance(dimension, IntegerRange):
        return IntDistribution(dimension.low, dimension.probes[-1], log=dimension.log, step=dimension.step)
    if dimension.ordered:
        return IntDistribution(0, len(dimension.values) - 1)
    return CategoricalDistribution([_label(value) for value in dimension.values])


def _value(dimension: Dimension, drawn: Any) -> Any:
    """The setting's value for what Optuna drew."""
    if isinstance(dimension, Interval):
        return dimension.nearest(drawn)
    if isinstance(dimension, IntegerRange):
        return drawn
    return dimension.values[drawn if dimension.ordered else [_label(v) for v in dimension.values].index(drawn)]


def _drawn_for(dimension: Dimension, value: Any) -> Any:
    """The value in the form in which Optuna draws it."""
    if isinstance(dimension, Interval | IntegerRange):
        return value
    return dimension.values.index(value) if dimension.ordered else _label(value)


def _label(value: Any) -> str:
    """A choice, or the values of a trial, as text: Optuna's categories are plain values, a setting's may be lists."""
    return json.dumps(value)
