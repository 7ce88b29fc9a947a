"""Verdicts on changes: the paired difference from the baseline, with its intervals.

Seeds alone decide: held-out records of one seed tell two models apart, not two settings.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from ttrain.config.training import EVALUATED
from ttrain.core.files import JsonDict
from ttrain.core.text import counted
from ttrain.evaluate import statistics
from ttrain.evaluate.noise import Noise
from ttrain.evaluate.statistics import Interval, Rule
from ttrain.evaluate.task_result import SCORES, Metric, read_scores
from ttrain.experiments.changes import Change
from ttrain.experiments.measure import Measure
from ttrain.experiments.rounds import FRESH, Rounds, Standing
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.sweeps import COMPLETED, DIVERGED, FAILED, Experiment, Place, Trial
from ttrain.tasks import EVALUATE

LEVEL = 0.05
BETTER, WORSE, EQUAL, UNDECIDED, STOPPED = "better", "worse", "equal", "not decided", "stopped"
HEADER = ("setting", "seeds", "mean", "difference", "over seeds", "over records", "verdict")


def scores_of(evaluation: Path, metric: str) -> Metric | None:
    """A metric of an evaluation with the share of each held-out record; None without records."""
    file = evaluation / SCORES
    found = read_scores(file).get(metric.removeprefix(EVALUATED)) if file.is_file() else None
    return found if found and found.records else None


@dataclass(frozen=True)
class Verdict:
    """What is known of a change.

    `values`: of the metric, one for each of `seeds`; `baseline`: the baseline's with these seeds.
    The intervals are of the difference from it.
    """

    setting: str
    seeds: Sequence[int] = ()
    values: Sequence[float] = ()
    baseline: Sequence[float] = ()
    over_records: Interval | None = None
    verdict: str = "in progress"
    why: str = ""

    @property
    def mean(self) -> float | None:
        """The mean over the seeds."""
        return math.fsum(self.values) / len(self.values) if self.values else None

    @property
    def differences(self) -> list[float]:
        """The difference from the baseline with each seed."""
        return [value - base for value, base in zip(self.values, self.baseline, strict=False)]

    @property
    def difference(self) -> float | None:
        """The mean difference from the baseline."""
        return math.fsum(self.differences) / len(self.baseline) if self.baseline else None

    @property
    def over_seeds(self) -> Interval | None:
        """The 95 % interval of the difference over the seeds, by Student's t; None of one seed."""
        return statistics.t_interval(self.differences, LEVEL)

    @property
    def repeats(self) -> bool:
        """Whether the seeds change nothing: all of them give one value."""
        return len(self.seeds) > 1 and len({*self.values}) == 1 and len({*self.baseline}) < 2

    @property
    def row(self) -> tuple[str, ...]:
        """The texts of a table with HEADER."""
        mean = "" if self.mean is None else f"{self.mean:.4f}"
        difference = "" if self.difference is None else f"{self.difference:+.4f}"
        return (
            self.setting,
            str(len(self.seeds)),
            mean,
            difference,
            *map(_shown, (self.over_seeds, self.over_records)),
            f"{self.verdict} {self.why}".strip(),
        )

    def to_json(self) -> JsonDict:
        """With what follows from the values."""
        derived = ("mean", "differences", "difference", "over_seeds")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def _shown(interval: Interval | None) -> str:
    return f"{interval[0]:+.4f} to {interval[1]:+.4f}" if interval else ""


@dataclass
class Judgement:
    """The verdicts of an experiment, as far as its trials have ended."""

    experiment: Experiment
    store: ArtifactStore

    @cached_property
    def changes(self) -> list[Change]:
        """The baseline and the changes."""
        return [Change(**entry) for entry in self.experiment["changes"]]

    @cached_property
    def measure(self) -> Measure:
        """The metric by which the changes are compared."""
        return Measure(**self.experiment["measure"])

    @cached_property
    def trials(self) -> dict[Place, Trial]:
        """The trials that have a metric, by change and seed."""
        done = (
            trial
            for trial in self.experiment.trials
            if trial.outcome == COMPLETED and trial.value is not None
        )
        return {trial.place: trial for trial in done}

    @cached_property
    def lost(self) -> dict[int, Trial]:
        """The changes of which a trial diverged or failed."""
        return {
            trial.change: trial
            for trial in self.experiment.trials
            if trial.outcome in (DIVERGED, FAILED)
        }

    @cached_property
    def sign(self) -> int:
        """-1 where more is better, so that less always is of the product."""
        return -1 if self.measure.maximize else 1

    @cached_property
    def standing(self) -> Standing:
        """How far the experiment is."""
        recorded = self.experiment["noise"]
        return Rounds(
            len(self.changes),
            self.experiment["seeds"],
            {place: self.sign * value_of(trial) for place, trial in self.trials.items()},
            frozenset(self.lost),
            Noise(**recorded) if recorded else None,
            stops=self.experiment["rounds"],
        ).standing()

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """The baseline and the changes, in their order."""
        measured = [
            self._measured(number, change.name) for number, change in enumerate(self.changes)
        ]
        tested = [
            math.nan if number in (0, self.standing.winner) else _p(row)
            for number, row in enumerate(measured)
        ]
        corrected = statistics.holm(tested)
        return [self._judged(number, row, corrected[number]) for number, row in enumerate(measured)]

    @cached_property
    def best(self) -> Verdict | None:
        """The change that is shown to be better, if any."""
        better = [row for row in self.verdicts if row.verdict == BETTER]
        return min(better, key=lambda row: self.sign * (row.difference or 0.0), default=None)

    @property
    def sentence(self) -> str:
        """The result of the experiment in one sentence."""
        metric = self.measure.metric
        winner = self.standing.winner
        if wanted := self.standing.wanted:
            ended = counted(len(self.trials), "trial")
            return f"{ended} ended, {len(wanted)} more are needed for the next decision"
        row = self.best or (self.verdicts[winner] if winner else None)
        if row is None:
            return f"no change is shown to be better than the baseline by {metric}"
        seeds = counted(len(row.seeds), "seed")
        evidence = f"{metric} {row.difference:+.4f}, {_shown(row.over_seeds)} over {seeds}"
        if row.verdict == BETTER:
            return f"{row.setting} is better than the baseline: {evidence}"
        return (
            f"{row.setting} was the best of the rounds, but is not better on fresh seeds: "
            f"{evidence}"
        )

    def to_json(self) -> JsonDict:
        """The object that `sweep show --json` prints."""
        experiment = self.experiment
        return {
            "sweep": experiment.name,
            "outcome": experiment.outcome,
            **{
                name: experiment[name]
                for name in ("started", "seeds", "looks", "rounds", "measure", "noise", "tracking")
            },
            "verdict": self.sentence,
            "settings": [
                {**row.to_json(), "changes": dict(change.values)}
                for row, change in zip(self.verdicts, self.changes, strict=True)
            ],
            "trials": [asdict(trial) for trial in experiment.trials],
        }

    def _measured(self, number: int, name: str) -> Verdict:
        """What was measured of a change with the seeds that it shares with the baseline."""
        seeds = [
            seed
            for seed in self.standing.seeds.get(number, ())
            if {(number, seed), (0, seed)} <= self.trials.keys()
        ]
        own = [self.trials[number, seed] for seed in seeds]
        base = [self.trials[0, seed] for seed in seeds]
        over_records = None
        if number and seeds:  # of metrics averaged over the seeds, for other records
            first = self._average(own)
            second = self._average(base)
            if (
                first is not None
                and second is not None
                and first.records == second.records
                and statistics.comparable(first, second)
            ):
                over_records = statistics.compare(first, second, Rule()).interval
        return Verdict(name, seeds, [*map(value_of, own)], [*map(value_of, base)], over_records)

    def _judged(self, number: int, row: Verdict, p: float) -> Verdict:
        """A measured change with its verdict. `p`: corrected for the number of changes."""
        standing = self.standing
        is_winner = number == standing.winner
        if number in self.lost:
            return replace(row, verdict=self.lost[number].outcome, why=self.lost[number].reason)
        if number == 0:
            return replace(row, verdict="baseline", baseline=())
        if row.difference is None:
            return row
        direction = BETTER if self.sign * row.difference < 0 else WORSE
        if row.repeats:
            return replace(
                row,
                verdict=UNDECIDED,
                why="(the seeds change nothing here, so they are no replicates)",
            )
        level = LEVEL / 2 ** self.experiment["looks"]
        if number in standing.stopped:
            is_worse = standing.stopped[number] or (p < level and direction == WORSE)
            why = (
                f"(behind the best by more than the noise after {counted(len(row.seeds), 'seed')})"
            )
            return replace(row, verdict=WORSE if is_worse else STOPPED, why=why)
        if standing.wanted and (is_winner or len(row.seeds) < self.experiment["seeds"]):
            return row
        if is_winner and len(row.seeds) > 1:
            return replace(
                row, verdict=direction if _p(row) < level else EQUAL, why="(on fresh seeds)"
            )
        if p < level and (direction == WORSE or standing.winner is None):
            return replace(row, verdict=direction)
        if standing.winner and direction == BETTER and not is_winner:
            return replace(
                row, verdict=UNDECIDED, why="(not the best of the rounds; compare it alone)"
            )
        if _p(row) < level:
            return replace(
                row, verdict=UNDECIDED, why="(of so many settings one may differ so much by chance)"
            )
        return replace(row, verdict=UNDECIDED, why=_what_it_takes(row))

    def _average(self, trials: Sequence[Trial]) -> Metric | None:
        """A metric whose records have the means over the seeds.

        None where the evaluations are gone, or of different records.
        """
        paths = (self.store.path(EVALUATE.name, trial.evaluation or "") for trial in trials)
        found = [scores_of(path, self.measure.metric) for path in paths]
        metrics = [metric for metric in found if metric]
        if (
            len(metrics) < len(found)
            or len({(metric.records, metric.sizes) for metric in metrics}) > 1
        ):
            return None
        sums = zip(*(metric.sums for metric in metrics), strict=True)
        average = replace(metrics[0], sums=tuple(math.fsum(each) / len(metrics) for each in sums))
        return average.half(trials[0].seed > FRESH) if trials[0].halves else average


def value_of(trial: Trial) -> float:
    """The metric of a trial on the records that choose, or of a fresh seed on those that decide."""
    assert trial.value is not None, "a trial that is judged has a metric"
    return trial.halves[trial.seed > FRESH] if trial.halves else trial.value


def _p(row: Verdict) -> float:
    """Two-sided p of the difference over the seeds; NaN of one seed."""
    return statistics.t_test(row.differences)


def _what_it_takes(row: Verdict) -> str:
    """How many seeds would show a difference of this size."""
    noise = Noise.of_values(row.differences)
    if noise is None:
        return "(one seed shows no spread; set --seeds 5)"
    seeds = noise.seeds_for(abs(row.difference or 0.0), pairs=True)
    return f"(a difference of this size takes {seeds:,} seeds)" if seeds else ""
