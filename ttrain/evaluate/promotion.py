"""Decide whether a challenger replaces the champion, by metrics on the same held-out records."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ttrain.config import Promotion, Settings
from ttrain.config.training import BITS_PER_BYTE, TRAINING_STAGES, TRAININGS
from ttrain.errors import UsageError
from ttrain.evaluate import forgetting, suites
from ttrain.evaluate.forgetting import BestScore, Digests, TextScore
from ttrain.evaluate.statistics import Interval
from ttrain.evaluate.task_result import Evaluation, Metric, too_few

ANY_FIGURE = "FIGURE"  # stands for any metric of a kind with too many to list, or of the harness
FIGURES: Mapping[str, tuple[str, ...]] = {  # of suites' tasks, by kind
    "text": (BITS_PER_BYTE.family, "loss", "perplexity"),
    "pairs": ("accuracy", "margin"),
    "choices": (
        "accuracy",
        "accuracy_characters",
        "accuracy_bytes",
        "accuracy_tokens",
        "choice_loss",
        BITS_PER_BYTE.family,
    ),
    "last_word": ("accuracy", "perplexity"),
    "generation": ("accuracy_exact", "accuracy_numeric", "ended"),
}
OF_DOCUMENTS = frozenset(
    BITS_PER_BYTE.of(row.model) for row in TRAINING_STAGES.values()
)  # metrics over held-out documents
First = tuple[bool, str]  # whether a challenger becomes champion where there is none, and why
NO_CHAMPION = "there is no champion yet"


@dataclass(frozen=True)
class Decision:
    """A decision and its inputs.

    difference           by how much the challenger is better, in the metric's unit
    smallest_difference  that records like these would show in four cases of five
    lost                 texts on which it is worse by more than `promotion.forgetting`
    """

    promote: bool
    metric: str
    challenger: float
    champion: float | None
    margin: float
    confidence: float
    reason: str
    difference: float | None = None
    interval: Interval | None = None
    smallest_difference: float | None = None
    samples: int = 0  # pairs of records; 0 where the figures alone decided
    lost: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        """One word for titles and tags."""
        return "promoted" if self.promote else "kept"


def check_metric(settings: Settings) -> None:
    """Raise UsageError if no evaluation under these settings has `promotion.metric`."""
    stages = {TRAININGS[0], *settings.trainings}  # there is a base, whichever stages train
    models = [row.model for name, row in TRAINING_STAGES.items() if name in stages]
    of_heldout = [
        row.metric.of(model)
        for row in TRAINING_STAGES.values()
        if row.metric is BITS_PER_BYTE or settings.reads(row.name)
        for model in models
    ]
    of_suites = [
        f"{task}/{figure}/{model}"
        for model in models
        for suite in settings.evaluate.suites.of(model)
        for task, spec in suites.load(suite).suite.tasks.items()
        for figure in FIGURES.get(spec.kind, (ANY_FIGURE,))
    ]
    metric = settings.promotion.metric
    name = re.sub(
        "/[^/:]*:.*", "", metric, flags=re.DOTALL
    )  # without a group such as lang:zh or source:a/b
    names = {name, re.sub("/.*/", f"/{ANY_FIGURE}/", name)}
    if names.isdisjoint(of_heldout + of_suites):
        raise UsageError(
            f"promotion.metric is {metric}, which no evaluation of these settings has; "
            "choose one of "
            + ", ".join(of_heldout + of_suites)
            + ("" if of_suites else ", and what `evaluate.suites` adds as TASK/FIGURE/MODEL")
        )


def first_champion(metrics: Mapping[str, Metric], challenger: Metric, settings: Promotion) -> First:
    """Compare a first challenger with `promotion.baseline`, by the metrics of its evaluation.

    There is nothing to beat where there is no such baseline, as without held-out documents.
    """
    name = "promotion.baseline"
    value = settings.baseline
    own = challenger.value
    sign = forgetting.sign_of(challenger, settings)
    if isinstance(value, str):
        name = value
        sign = -1.0
        values = {key: metric.value for key, metric in metrics.items()}
        value = values.get(BITS_PER_BYTE.of(name))
        own = values.get(BITS_PER_BYTE.name, math.nan)
    if value is None or math.isnan(own):
        return True, NO_CHAMPION
    if sign * (own - value) > 0:
        return True, f"{NO_CHAMPION}, and its {own:.5f} beats {value:.5f} of {name}"
    return False, (
        f"{NO_CHAMPION}, but its {own:.5f} does not beat {value:.5f} of {name}; "
        "train longer or on more "
        "text, or set promotion.baseline, which is what a first champion must beat"
    )


def decide(
    challenger: Metric,
    champion: Metric | None,
    settings: Promotion,
    *,
    first: First = (True, NO_CHAMPION),
    texts: Sequence[TextScore] = (),
    unknown: str = "",
) -> Decision:
    """Decide whether the challenger becomes champion.

    first    the decision about a challenger where there is no champion
    texts    none of which may be lost
    unknown  why what it forgets cannot be determined, which promotes nothing
    """
    # With enough records the complete interval of the difference must lie beyond the margin.
    decision = _compared(challenger, champion, settings, first)
    lost = [figure for figure in texts if figure.lost]
    decision = replace(decision, lost=tuple(figure.name for figure in lost))
    if not decision.promote or not (lost or unknown):
        return decision
    reason = (
        f"{forgetting.reason_of(lost, settings.forgetting or 0.0)}; "
        f"over all held-out text it is {decision.reason}"
        if lost
        else f"what it forgets cannot be determined: {unknown}; else it would be promoted: "
        f"{decision.reason}"
    )
    return replace(decision, promote=False, reason=reason)


def _compared(
    challenger: Metric, champion: Metric | None, settings: Promotion, first: First
) -> Decision:
    # By the metric over all records.

    def decided(promote: bool, reason: str, **comparison: Any) -> Decision:
        return Decision(
            promote,
            settings.metric,
            challenger.value,
            None if champion is None else champion.value,
            settings.margin,
            settings.confidence,
            reason,
            **comparison,
        )

    if not math.isfinite(challenger.value):
        return decided(
            False,
            f"the challenger's {settings.metric} is {challenger.value}, "
            "which is not a finite number",
        )
    if champion is None:
        return decided(*first)
    if not math.isfinite(champion.value):
        return decided(
            True,
            f"the champion's {settings.metric} is {champion.value}, which is not a finite number",
        )
    if why := _incomparable_reason(challenger, champion):
        return decided(False, why)
    compared = forgetting.advantage(challenger, champion, settings)
    difference = compared.difference
    samples = len(challenger.records)
    margin = settings.margin
    change = f"{'worse' if difference < 0 else 'better'} by {abs(difference):.5f}"
    if not settings.resamples or samples < settings.min_samples or compared.interval is None:
        better = difference > margin
        why = (
            f"{samples} held-out records are too few for an interval"
            if settings.resamples
            else "resamples is 0"
        )
        relation = f", which is {'more' if better else 'not more'} than the margin {margin:g}"
        return decided(
            better,
            f"{change}{'' if difference < 0 <= margin else relation}; {why}",
            difference=difference,
        )
    low, _ = compared.interval
    better = low > margin
    reason = (
        f"{change}; the lower end of the interval, {low:.5f}, "
        f"is {'' if better else 'not '}above the margin {margin:g}"
    )
    if not better and compared.smallest is not None:
        reason += f"; the minimum detectable difference is about {compared.smallest:.5f}"
    return decided(
        better,
        reason,
        difference=difference,
        interval=compared.interval,
        smallest_difference=compared.smallest,
        samples=samples,
    )


def why_unknown(challenger: Metric, champion: Metric | None) -> str:
    """Why what a challenger forgets cannot be determined from these scores; "" where it can.

    A champion whose metric is not finite has nothing to lose.
    """
    if champion is None:
        return f"the champion's evaluation does not have {challenger.name}"
    if not math.isfinite(challenger.value):
        return (
            f"the challenger's {challenger.name} is {challenger.value}, "
            f"the champion's is {champion.value:.5f}"
        )
    return _incomparable_reason(challenger, champion) if math.isfinite(champion.value) else ""


def _incomparable_reason(challenger: Metric, champion: Metric) -> str:
    # "" where the metrics can be compared.
    if challenger.records != champion.records:
        return (
            "the models were not evaluated on the same held-out records, "
            "so their metrics cannot be compared"
        )
    if challenger.sizes == champion.sizes:
        return ""
    return (
        "the models count the same records differently, as with two tokenizers, "
        f"so {challenger.name} cannot be compared; "
        f"set promotion.metric={BITS_PER_BYTE.name}"
    )


def judge(
    challenger: Evaluation,
    champion: Evaluation | None,
    rules: Promotion,
    nights: Digests,
    new: str = "",
    best: Mapping[str, BestScore] = MappingProxyType({}),
) -> tuple[Decision, list[TextScore]]:
    """Decide by two evaluations: (decision, values by text and metric).

    nights  names of the held-out records of each night
    new     the night that is decided
    best    the champions' best values so far, by text

    Raises UsageError if an evaluation does not have the metric.
    """
    # The text of the new night cannot be forgotten.
    deciding = challenger.metric(rules.metric)
    texts = list[TextScore]()
    unknown = ""
    metric = metric_of_texts(rules.metric)
    if ours := challenger.metrics.get(metric):
        theirs = champion.metrics.get(metric) if champion else None
        listed = forgetting.heldout_texts(ours.records, nights, challenger.sources(metric), new)
        texts += forgetting.figures(ours, theirs, listed, rules, best)
        has_earlier = any(name != new for name in nights) or any(not text.new for text in listed)
        if champion and has_earlier and rules.forgetting is not None:
            unknown = why_unknown(ours, theirs)
    if champion:
        texts += _of_other_models(challenger, champion, rules)
    decision = decide(
        deciding,
        champion.metric(rules.metric) if champion else None,
        rules,
        first=first_champion(challenger.metrics, deciding, rules),
        texts=texts,
        unknown=unknown,
    )
    # With promotion.resamples=0, or without records, the values alone decide, however few.
    few = too_few(len(deciding.records), rules.min_samples)
    if (
        few
        and deciding.records
        and rules.resamples
        and decision.difference is not None
        and not decision.lost
    ):
        decision = replace(decision, promote=False, reason=few)
    return decision, texts


def _of_other_models(
    challenger: Evaluation, champion: Evaluation, rules: Promotion
) -> Iterator[TextScore]:
    # In the metric of each other model that is not over documents.
    names = [row.metric.name for row in TRAINING_STAGES.values()]
    for name in (name for name in names if name not in (*OF_DOCUMENTS, rules.metric)):
        ours = challenger.metrics.get(name)
        theirs = champion.metrics.get(name)
        if ours and theirs and (figure := forgetting.figure_of_metric(ours, theirs, rules)):
            yield figure


def metric_of_texts(metric: str) -> str:
    """The metric by which forgetting is judged, where this metric decides."""
    return metric if metric in OF_DOCUMENTS else BITS_PER_BYTE.name
