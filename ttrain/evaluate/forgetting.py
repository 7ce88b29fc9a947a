"""What a challenger lost on the held-out text of each night and source, and in other metrics.

Pure functions.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ttrain.config import Promotion
from ttrain.evaluate import statistics
from ttrain.evaluate.statistics import Interval, PairedComparison, Rule
from ttrain.evaluate.task_result import Metric

SHOWN = 3  # maximum number of texts that a reason lists
Digests = Mapping[str, Collection[str]]  # of the records of each night or source


@dataclass(frozen=True)
class HeldoutText:
    """Held-out records that are judged together, `rows` by their numbers in the scores.

    `new`: the text of the night under decision, which no earlier model can have forgotten.
    """

    kind: str  # night, source, several or metric
    name: str
    rows: tuple[int, ...]
    new: bool = False


@dataclass(frozen=True)
class BestScore:
    """The best value of a champion on a text of this many records, and that champion's name."""

    value: float
    champion: str
    records: int


@dataclass(frozen=True)
class TextScore:
    """The values of challenger and champion on one held-out text, or in one metric.

    difference  by how much the challenger is better, in the metric's unit
    judged      whether the bound applies
    best        value of an earlier champion, if it is better than the champion's
    """

    kind: str
    name: str
    records: int
    challenger: float
    champion: float | None = None
    difference: float | None = None
    interval: Interval | None = None
    judged: bool = False
    lost: bool = False
    best: float | None = None
    best_champion: str | None = None

    def describe(self) -> str:
        """Describe the loss in a line."""
        change = f"{self.name}: {self.champion:.5f} became {self.challenger:.5f}"
        if self.difference is None:
            return f"{change}, which is not a finite number"
        best = self.best
        since = (
            ""
            if best is None
            else f", and {abs(self.challenger - best) / (abs(best) or 1.0):.1%} worse than "
            f"{best:.5f} of {self.best_champion}"
        )
        return f"{change}, {self.loss:.1%} worse{since}"

    @property
    def loss(self) -> float:
        """The loss against the champion, as a share of its value; below 0: a gain."""
        if self.difference is None:
            return math.inf if self.lost else 0.0
        return -self.difference / (abs(self.champion or 0.0) or 1.0)


def heldout_texts(
    records: Sequence[str],
    nights: Digests,
    sources: Digests,
    new: str = "",
) -> list[HeldoutText]:
    """The texts among the scored records, by night, the oldest first, and by source.

    `nights` and `sources` have digests; `new` is the night that is decided.
    """
    # A single night or source covers all records, so it is not compared separately.
    numbers = {record: number for number, record in enumerate(records)}
    texts: list[HeldoutText] = []
    labelled_sources = {f"source {name}": digests for name, digests in sources.items()}
    for kind, members in (("night", nights), ("source", labelled_sources)):
        scored = {}
        for name, digests in members.items():
            rows = sorted(numbers[digest] for digest in digests if digest in numbers)
            if rows:
                scored[name] = tuple(rows)
        if len(scored) > 1:
            texts += [
                HeldoutText(kind, name, text, kind == "night" and name == new)
                for name, text in scored.items()
            ]
    return texts


def figures(
    challenger: Metric,
    champion: Metric | None,
    texts: Sequence[HeldoutText],
    settings: Promotion,
    best: Mapping[str, BestScore] = MappingProxyType({}),
) -> list[TextScore]:
    """Compare both models on each text, then on texts that are judged together.

    Empty where the scores cannot be compared. `best` has the champions' best values so far.
    """
    # The bound is one for all nights: a challenger that is worse than the champion must also stay
    # within the bound of the best champion, or losses would add up.
    if champion and (challenger.records != champion.records or challenger.sizes != champion.sizes):
        return []
    if not texts or not all(
        math.isfinite(scores.value) for scores in (challenger, champion) if scores
    ):
        return []
    earlier_nights = [text for text in texts if text.kind == "night" and not text.new]
    if len(earlier_nights) > 1:  # a small loss on each of them is a large one
        rows = sorted({row for text in earlier_nights for row in text.rows})
        texts = [*texts, HeldoutText("several", "all earlier nights", tuple(rows))]
    # A text of few records shows nothing by itself: by the values alone, 56 of 100 challengers that
    # lost nothing exceeded the bound on one of ten nights of 25 records.
    fewest = settings.min_samples if settings.resamples else 0
    return [
        _figure(
            challenger,
            champion,
            text,
            settings,
            best,
            judged=len(text.rows) >= fewest and not text.new,
        )
        for text in texts
    ]


def figure_of_metric(challenger: Metric, champion: Metric, settings: Promotion) -> TextScore | None:
    """Compare both models in a metric, all its records as one text; None if incomparable.

    A metric that is finite at the champion alone is lost, on however few records.
    """
    count = len(challenger.records)
    if not count or challenger.records != champion.records or not math.isfinite(champion.value):
        return None
    if not math.isfinite(challenger.value):
        is_lost = settings.forgetting is not None
        return TextScore(
            "metric",
            challenger.name,
            count,
            challenger.value,
            champion.value,
            judged=is_lost,
            lost=is_lost,
        )
    if challenger.sizes != champion.sizes:
        return None
    return _figure(
        challenger,
        champion,
        HeldoutText("metric", challenger.name, tuple(range(count))),
        settings,
        {},
        judged=True,
    )


def _figure(
    challenger: Metric,
    champion: Metric | None,
    text: HeldoutText,
    settings: Promotion,
    best: Mapping[str, BestScore],
    *,
    judged: bool,
) -> TextScore:
    ours = challenger.restricted(text.rows)
    alone = TextScore(text.kind, text.name, len(text.rows), ours.value)
    if champion is None:
        return alone
    theirs = champion.restricted(text.rows)
    compared = advantage(ours, theirs, settings)
    interval = compared.interval
    judged = (
        judged
        and settings.forgetting is not None
        and (interval is not None or not settings.resamples)
    )
    bound = settings.forgetting or 0.0
    least_loss = -(compared.difference if interval is None else interval[1])
    lost = judged and least_loss > bound * abs(theirs.value)
    figure = replace(
        alone,
        champion=theirs.value,
        difference=compared.difference,
        interval=interval,
        judged=judged,
        lost=lost,
    )
    earlier = best.get(text.name)
    drift = sign_of(challenger, settings) * (earlier.value - theirs.value) if earlier else 0.0
    if earlier is None or earlier.records != len(text.rows) or drift <= 0:
        return figure
    has_drifted = (
        judged and compared.difference < 0 and least_loss + drift > bound * abs(earlier.value)
    )
    return replace(
        figure, lost=lost or has_drifted, best=earlier.value, best_champion=earlier.champion
    )


def advantage(challenger: Metric, champion: Metric, settings: Promotion) -> PairedComparison:
    """Compare two models, with differences above 0 where the challenger is better."""
    compared = statistics.compare(
        challenger, champion, Rule(settings.confidence, settings.resamples, settings.seed)
    )
    if sign_of(challenger, settings) > 0:
        return compared
    interval = compared.interval
    turned = None if interval is None else (0.0 - interval[1], 0.0 - interval[0])
    return replace(compared, difference=0.0 - compared.difference, interval=turned)


def sign_of(metric: Metric, settings: Promotion) -> float:
    """1 if higher values are better, else -1."""
    higher = (
        settings.higher_is_better if metric.higher_is_better is None else metric.higher_is_better
    )
    return 1.0 if higher else -1.0


def reason_of(lost: Sequence[TextScore], bound: float) -> str:
    """Describe the texts that were lost, the worst first."""
    worst = sorted(lost, key=lambda figure: -figure.loss)
    rest_note = f", and {len(worst) - SHOWN} more" if len(worst) > SHOWN else ""
    texts = "; ".join(figure.describe() for figure in worst[:SHOWN])
    return f"it forgets {texts}{rest_note}; promotion.forgetting allows {bound:.1%}"
