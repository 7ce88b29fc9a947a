"""Decide whether a challenger replaces the champion, from their metrics on the same held-out records. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ttrain.config import Promotion, Settings
from ttrain.config.training import BITS_PER_BYTE, TRAINING_STAGES, TRAININGS
from ttrain.errors import ArtifactError, UsageError
from ttrain.evaluate import statistics as confidence
from ttrain.evaluate import suites, task_result
from ttrain.evaluate.task_result import Metric
from ttrain.store.layout import Artifact

ANY_FIGURE = "FIGURE"  # stands for any metric of a kind with too many to list, or of the harness
FIGURES: Mapping[str, tuple[str, ...]] = {  # of suites' tasks, by kind
    "text": (BITS_PER_BYTE.family, "loss", "perplexity"),
    "choices": ("accuracy", "accuracy_characters", "accuracy_bytes", "accuracy_tokens", "choice_loss"),
    "last_word": ("accuracy", "perplexity"),
    "generation": ("accuracy_exact", "accuracy_numeric", "ended"),
}


@dataclass(frozen=True)
class Scores:
    """One model's metric, with the sums and sizes of each record that it is computed from.

    The metric is `sum(sums) / sum(sizes)`: bits over bytes, or nats over tokens; if `shown` is "exp", its exponential, a
    perplexity. Without records only its value is known.
    """

    metric: str
    value: float
    sums: tuple[float, ...] = ()
    sizes: tuple[float, ...] = ()
    records: tuple[str, ...] = ()  # digests of the scored records
    higher_is_better: bool | None = None  # None: the evaluation does not say
    shown: Literal["exp"] | None = None


@dataclass(frozen=True)
class Decision:
    """A decision and its inputs. `difference` is by how much the challenger is better, in the metric's unit;
    `smallest_difference` is the difference that records like these would show in four cases of five.
    """

    promote: bool
    metric: str
    challenger: float
    champion: float | None
    difference: float | None
    interval: tuple[float, float] | None
    smallest_difference: float | None
    samples: int  # pairs of records; 0 where the figures alone decided
    margin: float
    confidence: float
    reason: str

    @property
    def word(self) -> str:
        """One word for titles and tags."""
        return "promoted" if self.promote else "kept"

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON; numbers that are not finite become null."""
        return task_result.finite(asdict(self))

    def rows(self) -> list[tuple[str, str]]:
        """(label, text) of each field, for a table."""
        interval = "none" if self.interval is None else f"{self.interval[0]:+.5f} to {self.interval[1]:+.5f}"
        return [
            ("decision", self.word),
            ("metric", self.metric),
            ("challenger", f"{self.challenger:.5f}"),
            ("champion", "none" if self.champion is None else f"{self.champion:.5f}"),
            ("better by", "" if self.difference is None else f"{self.difference:+.5f}"),
            (f"{self.confidence:.0%} interval", interval),
            ("minimum detectable", "" if self.smallest_difference is None else f"{self.smallest_difference:.5f}"),
            ("held-out records", f"{self.samples:,}"),
            ("margin", f"{self.margin:g}"),
            ("reason", self.reason),
        ]


def check_metric(settings: Settings) -> None:
    """Raise UsageError if no evaluation under these settings has `promotion.metric`; called before training."""
    always = (TRAININGS[0], TRAININGS[-1])  # there is a base and a last model, whichever stages train
    models = [row.model for name, row in TRAINING_STAGES.items() if name in (*always, *settings.trainings)]
    bits = [BITS_PER_BYTE.of(name) for name in models]
    metrics = [row.metric for row in TRAINING_STAGES.values() if row.metric and row.loss and settings.reads(row.dataset)]
    losses = [metric.of(name) for metric in metrics for name in models]
    of_suites = [
        f"{task}/{figure}/{name}"
        for name in models
        for suite in settings.evaluate.suites.of(name)
        for task, spec in suites.load(suite).suite.tasks.items()
        for figure in FIGURES.get(spec.kind, (ANY_FIGURE,))
    ]
    metric = settings.promotion.metric
    figure = metric.rpartition("/")[0] if ":" in metric.rpartition("/")[2] else metric  # without a group such as lang:zh
    task, _, figure_name = figure.partition("/")
    if (
        metric in losses
        or figure in (*bits, *of_suites)
        or f"{task}/{ANY_FIGURE}/{figure_name.rpartition('/')[2]}" in of_suites
    ):
        return
    raise UsageError(
        f"promotion.metric is {metric}, which no evaluation of these settings has; choose one of "
        + ", ".join(bits + losses + of_suites)
        + ("" if of_suites else ", and what `evaluate.suites` adds as TASK/FIGURE/MODEL")
    )


def scores_of(evaluation: Artifact, metric: str) -> Scores:
    """Read a metric of an evaluation, with its records if it has them.

    Raises UsageError if there is no such metric, and ArtifactError if its value does not follow from its records, or if
    these were not fetched.
    """
    if task_result.FILE in evaluation.absent:  # without them it would be compared like a metric without records
        raise ArtifactError(
            f"{task_result.FILE} of {evaluation.stage} {evaluation.key[:12]} is missing; it was not fetched yet"
        )
    metrics: Mapping[str, float] = evaluation.result["metrics"]
    if metric not in metrics:
        raise UsageError(
            f"promotion.metric is {metric}, which the evaluation does not have; choose one of {', '.join(sorted(metrics))}"
        )
    value = float(metrics[metric])
    stored = task_result.sums_of(evaluation.path, metric)
    if stored is None:
        return Scores(metric, value)
    if not len(stored.sums) == len(stored.sizes) == len(stored.records):
        raise ArtifactError(f"{evaluation.path / task_result.FILE} does not have a sum, a size and a digest for each record")
    scored = Scores(metric, value, *stored)
    again = _figure(scored).value
    if math.isfinite(value) and not math.isclose(again, value, rel_tol=1e-9):
        raise ArtifactError(f"{evaluation.path / task_result.FILE} gives {metric} {again}, but the evaluation says {value}")
    return scored


def decide(challenger: Scores, champion: Scores | None, settings: Promotion) -> Decision:
    """Decide whether the challenger becomes champion.

    It does if it is better by more than the margin; with enough records, only if the whole interval of the difference lies
    beyond the margin. The first challenger becomes champion if its metric is finite.
    """

    def decided(promote: bool, reason: str, **figures: Any) -> Decision:
        fields = {"difference": None, "interval": None, "smallest_difference": None, "samples": 0, **figures}
        old = None if champion is None else champion.value
        return Decision(
            promote=promote, metric=settings.metric, challenger=challenger.value, champion=old, reason=reason,
            margin=settings.margin, confidence=settings.confidence, **fields,
        )  # fmt: skip

    if not math.isfinite(challenger.value):
        return decided(False, f"the challenger's {settings.metric} is {challenger.value}, which is not a finite number")
    if champion is None:
        return decided(True, "there is no champion yet")
    if not math.isfinite(champion.value):
        return decided(True, f"the champion's {settings.metric} is {champion.value}, which is not a finite number")
    if challenger.records != champion.records or challenger.sizes != champion.sizes:
        return decided(False, _incomparable_reason(challenger, champion))
    higher_is_better = challenger.higher_is_better
    sign = 1.0 if (settings.higher_is_better if higher_is_better is None else higher_is_better) else -1.0
    difference = sign * (challenger.value - champion.value) + 0.0  # avoids -0.0
    change = f"{'worse' if difference < 0 else 'better'} by {abs(difference):.5f}"
    samples = len(challenger.records)
    margin = settings.margin

    def alone(why: str) -> Decision:
        better = difference > margin
        reason = f"{change}, which is {'more' if better else 'not more'} than the margin {margin:g}; {why}"
        return decided(better, reason, difference=difference)

    if not settings.resamples:
        return alone("resamples is 0")
    if samples < settings.min_samples:
        return alone(f"{samples} held-out records are too few for an interval")
    rule = confidence.Rule(settings.confidence, settings.resamples, settings.seed)
    compared = confidence.compare(_figure(challenger), _figure(champion), rule)
    if compared.interval is None:
        return alone(f"{samples} held-out records are too few for an interval")
    low, high = sorted(sign * end + 0.0 for end in compared.interval)
    better = low > margin
    reason = (
        f"{change}; the lower end of the interval, {low:.5f}, is {'above' if better else 'not above'} the margin {margin:g}"
    )
    if not better and compared.smallest is not None:
        reason += f"; the minimum detectable difference is about {compared.smallest:.5f}"
    return decided(
        better, reason, difference=difference, interval=(low, high), smallest_difference=compared.smallest, samples=samples
    )


def _figure(scored: Scores) -> Metric:
    return Metric(scored.metric, scored.sums, scored.sizes, True, unit="", shown=scored.shown)  # the sign is the caller's


def _incomparable_reason(challenger: Scores, champion: Scores) -> str:
    if challenger.records != champion.records:
        return "the models were not evaluated on the same held-out records, so their metrics cannot be compared"
    return (
        f"the models count the same records differently, as with two tokenizers, so {challenger.metric} cannot be compared; "
        f"set promotion.metric={BITS_PER_BYTE.name}"
    )
