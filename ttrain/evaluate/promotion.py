"""Challenger against champion on the same held-out records: figures, the interval of their difference, a decision. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ttrain.config import Promotion, Settings
from ttrain.errors import ArtifactError, UsageError
from ttrain.evaluate import scores, suites
from ttrain.evaluate import statistics as confidence
from ttrain.evaluate.task_result import Figure
from ttrain.store.layout import Artifact

ANY = "FIGURE"  # a figure of a task whose kind has too many to tell, or the harness's own
FIGURES: Mapping[str, tuple[str, ...]] = {  # of suites' tasks, by kind
    "text": ("bits_per_byte", "loss", "perplexity"),
    "choices": ("accuracy", "accuracy_characters", "accuracy_bytes", "accuracy_tokens", "choice_loss"),
    "last_word": ("accuracy", "perplexity"),
    "generation": ("accuracy_exact", "accuracy_numeric", "ended"),
}


@dataclass(frozen=True)
class Scores:
    """One model's figure, and the sums that it is the quotient of, a record each.

    The figure is `sum(sums) / sum(sizes)`: bits over bytes, or nats over tokens; where `shown` is "exp", a perplexity, the
    exponential of that. Without records it stands for itself.
    """

    metric: str
    value: float
    sums: tuple[float, ...] = ()
    sizes: tuple[float, ...] = ()
    records: tuple[str, ...] = ()  # digests of what was scored
    higher_is_better: bool | None = None  # None: the evaluation does not say
    shown: Literal["exp"] | None = None


@dataclass(frozen=True)
class Decision:
    """What was decided and from what. `difference` is by how much the challenger is better, in the metric's unit;
    `smallest_difference` is the one that records like these would show in four cases of five.
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
        """For titles and tags."""
        return "promoted" if self.promote else "kept"

    def to_json(self) -> dict[str, Any]:
        """Every figure, as JSON takes it: what is no finite number becomes null."""
        return {name: None if _is_no_number(value) else value for name, value in asdict(self).items()}

    def rows(self) -> list[tuple[str, str]]:
        """(what, value) for a table."""
        interval = "none" if self.interval is None else f"{self.interval[0]:+.5f} to {self.interval[1]:+.5f}"
        return [
            ("decision", self.word),
            ("metric", self.metric),
            ("challenger", f"{self.challenger:.5f}"),
            ("champion", "none" if self.champion is None else f"{self.champion:.5f}"),
            ("better by", "" if self.difference is None else f"{self.difference:+.5f}"),
            (f"{self.confidence:.0%} interval", interval),
            ("smallest visible", "" if self.smallest_difference is None else f"{self.smallest_difference:.5f}"),
            ("held-out records", f"{self.samples:,}"),
            ("margin", f"{self.margin:g}"),
            ("reason", self.reason),
        ]


def check_metric(settings: Settings) -> None:
    """Raise UsageError where no evaluation under these settings has `promotion.metric`: told before anything is trained."""
    models = [name for name in type(settings.evaluate.suites).model_fields if name != "sft" or "sft" in settings.trainings]
    bits = ["bits_per_byte", *(f"bits_per_byte_{name}" for name in models if name != "base")]
    parts = [loss for loss, of in (("chat_loss", "sft"), ("domain_loss", "lora")) if settings.reads(of)]
    losses = [f"{loss}_{name}" for loss in parts for name in models]
    of_suites = [
        f"{task}/{figure}/{name}"
        for name in models
        for one in settings.evaluate.suites.of(name)
        for task, spec in suites.load(one).suite.tasks.items()
        for figure in FIGURES.get(spec.kind, (ANY,))
    ]
    metric = settings.promotion.metric
    figure = metric.rpartition("/")[0] if ":" in metric.rpartition("/")[2] else metric  # without a group such as lang:zh
    task, _, rest = figure.partition("/")
    if metric in losses or figure in (*bits, *of_suites) or f"{task}/{ANY}/{rest.rpartition('/')[2]}" in of_suites:
        return
    raise UsageError(
        f"promotion.metric is {metric}, which no evaluation of these settings has; it has "
        + ", ".join(bits + losses + of_suites)
        + ("" if of_suites else ", and what `evaluate.suites` adds as TASK/FIGURE/MODEL")
    )


def scores_of(evaluation: Artifact, metric: str) -> Scores:
    """The figure of that name in an evaluation, with its records where it has them.

    Raises UsageError where there is no such figure, and ArtifactError where it is not what its records give, or where these
    are not here.
    """
    if scores.FILE in evaluation.absent:  # without them it would be compared as one that has no records
        raise ArtifactError(f"{scores.FILE} of {evaluation.stage} {evaluation.key[:12]} is not here; it was not fetched yet")
    metrics: Mapping[str, float] = evaluation.result["metrics"]
    if metric not in metrics:
        raise UsageError(
            f"promotion.metric is {metric}, which the evaluation does not have; it has {', '.join(sorted(metrics))}"
        )
    value = float(metrics[metric])
    found = scores.sums_of(evaluation.path, metric)
    if found is None:
        return Scores(metric, value)
    sums, sizes, records = found
    if not len(sums) == len(sizes) == len(records):
        raise ArtifactError(f"{evaluation.path / scores.FILE} does not have a sum, a size and a digest for each record")
    shown, direction = scores.shown_of(evaluation.path, metric), scores.direction_of(evaluation.path, metric)
    scored = Scores(metric, value, tuple(sums), tuple(sizes), tuple(records), direction, shown)
    again = _figure(scored).value
    if math.isfinite(value) and not math.isclose(again, value, rel_tol=1e-9):
        raise ArtifactError(f"{evaluation.path / scores.FILE} gives {metric} {again}, but the evaluation says {value}")
    return scored


def decide(challenger: Scores, champion: Scores | None, settings: Promotion) -> Decision:
    """Whether the challenger becomes champion.

    It does where it is better by more than the margin, and where there are records enough, only if the whole interval of
    the difference lies beyond the margin. The first one becomes champion if its figure is a number.
    """

    def decided(promote: bool, reason: str, **figures: Any) -> Decision:
        known = {"difference": None, "interval": None, "smallest_difference": None, "samples": 0, **figures}
        old = None if champion is None else champion.value
        return Decision(
            promote=promote, metric=settings.metric, challenger=challenger.value, champion=old, reason=reason,
            margin=settings.margin, confidence=settings.confidence, **known,
        )  # fmt: skip

    if not math.isfinite(challenger.value):
        return decided(False, f"the challenger's {settings.metric} is {challenger.value}, which is no number")
    if champion is None:
        return decided(True, "there is no champion yet")
    if not math.isfinite(champion.value):
        return decided(True, f"the champion's {settings.metric} is {champion.value}, which is no number")
    if challenger.records != champion.records or challenger.sizes != champion.sizes:
        return decided(False, _unlike(challenger, champion))
    known = challenger.higher_is_better
    sign = 1.0 if (settings.higher_is_better if known is None else known) else -1.0
    difference = sign * (challenger.value - champion.value) + 0.0  # no minus before a zero
    told = f"{'worse' if difference < 0 else 'better'} by {abs(difference):.5f}"
    samples = len(challenger.records)
    margin = settings.margin

    def alone(why: str) -> Decision:
        better = difference > margin
        reason = f"{told}, which is {'more' if better else 'not more'} than the margin {margin:g}; {why}"
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
        f"{told}; the lower end of the interval, {low:.5f}, is {'above' if better else 'not above'} the margin {margin:g}"
    )
    if not better and compared.smallest is not None:
        reason += f"; records like these show differences from about {compared.smallest:.5f} on"
    return decided(
        better, reason, difference=difference, interval=(low, high), smallest_difference=compared.smallest, samples=samples
    )


def _figure(found: Scores) -> Figure:
    return Figure(found.metric, found.sums, found.sizes, True, unit="", shown=found.shown)  # the sign is the caller's


def _unlike(challenger: Scores, champion: Scores) -> str:
    if challenger.records != champion.records:
        return "the two were not evaluated on the same held-out records, so their figures cannot be compared"
    return (
        f"the two count the same records differently, as two tokenizers do, so {challenger.metric} cannot be compared; "
        f"set promotion.metric=bits_per_byte"
    )


def _is_no_number(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
