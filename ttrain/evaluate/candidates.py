"""Candidates for champion: each judged on all held-out text, on that of every night and source and by the metrics of its
other models, and the best of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ttrain.config import Promotion
from ttrain.config.training import BITS_PER_BYTE, TRAINING_STAGES
from ttrain.evaluate import forgetting, promotion
from ttrain.evaluate.few_records import too_few
from ttrain.evaluate.forgetting import BestFigure, Digests, TextFigure
from ttrain.evaluate.promotion import Decision
from ttrain.evaluate.scores import Evaluation

OF_DOCUMENTS = frozenset(BITS_PER_BYTE.of(row.model) for row in TRAINING_STAGES.values())  # metrics over held-out documents


@dataclass(frozen=True)
class Judged:
    """The decision about a candidate, with its figures on the text of each night and source, and in other metrics."""

    decision: Decision
    texts: tuple[TextFigure, ...] = ()
    base: str = ""  # which weights its base model has, where a night averaged


def judge(
    challenger: Evaluation,
    champion: Evaluation | None,
    rules: Promotion,
    nights: Digests,
    new: str = "",
    best: Mapping[str, BestFigure] = MappingProxyType({}),
) -> Judged:
    """Decide whether a candidate becomes champion.

    `nights`: names of the held-out records of each night; `new`: the one that is decided, whose text nothing can forget;
    `best`: the best figures of champions so far, by text.
    What is forgotten is judged by `promotion.metric` where that is over documents, else by the base model's bits per byte;
    the other models by their own metrics.
    Raises UsageError if an evaluation does not have the metric.
    """
    scores = challenger.scores(rules.metric)
    texts, unknown = list[TextFigure](), ""
    metric = metric_of_texts(rules.metric)
    if metric in challenger.metrics:
        ours = challenger.scores(metric)
        theirs = champion.scores(metric) if champion and metric in champion.metrics else None
        listed = forgetting.heldout_texts(ours.records, nights, challenger.sources(metric), new)
        texts += forgetting.figures(ours, theirs, listed, _directed(rules, higher_is_better=False), best)
        has_earlier = any(name != new for name in nights) or any(not text.new for text in listed)
        if champion and has_earlier and rules.forgetting is not None:
            unknown = promotion.why_unknown(ours, theirs)
    if champion:
        texts += _of_other_models(challenger, champion, rules)
    baseline = promotion.baseline_of(challenger.metrics, scores, rules)
    of_champion = champion.scores(rules.metric) if champion else None
    decision = promotion.decide(scores, of_champion, rules, baseline=baseline, texts=texts, unknown=unknown)
    return Judged(_kept_if_too_few(decision, len(scores.records), rules), tuple(texts))


def _kept_if_too_few(decision: Decision, records: int, rules: Promotion) -> Decision:
    """The same decision, but to keep the champion where it was made by the figures over too few records.

    Where the user sets promotion.resamples=0, or a metric has no records, the figures alone decide.
    """
    few = too_few(records, rules.min_samples)
    if not few or not records or not rules.resamples or decision.difference is None or decision.lost:
        return decision
    return replace(decision, promote=False, reason=few)


def _of_other_models(challenger: Evaluation, champion: Evaluation, rules: Promotion) -> Iterator[TextFigure]:
    """The figures in the metric of each model that does not decide and has one that is not over documents."""
    for row in TRAINING_STAGES.values():
        if row.metric is None or (name := row.metric.of(row.model)) in OF_DOCUMENTS or name == rules.metric:
            continue
        if name in challenger.metrics and name in champion.metrics:
            directed = _directed(rules, higher_is_better=row.metric.higher_is_better)
            figure = forgetting.figure_of_metric(challenger.scores(name), champion.scores(name), directed)
            yield from [figure] if figure else []


def _directed(rules: Promotion, *, higher_is_better: bool) -> Promotion:
    """The same rules for a metric of this direction."""
    return rules.model_copy(update={"higher_is_better": higher_is_better})


def metric_of_texts(metric: str) -> str:
    """The metric by which the gate judges what is forgotten, where it decides by this one."""
    return metric if metric in OF_DOCUMENTS else BITS_PER_BYTE.name


def choose(candidates: Mapping[str, Judged]) -> str:
    """The name of the best candidate: one that would be promoted before one that would not, one that forgets nothing before
    one that does, then the one that is better by more; the first of equals."""

    def rank(name: str) -> tuple[bool, bool, float]:
        decision = candidates[name].decision
        return decision.promote, not decision.lost, -float("inf") if decision.difference is None else decision.difference

    return max(candidates, key=rank)


def tables(judged: Judged) -> Sequence[tuple[Sequence[tuple[str, ...]], Sequence[str]]]:
    """(rows, header) of the decision, and of the figures by text where there are some."""
    of_texts = [(forgetting.rows(judged.texts), forgetting.HEADER)] if judged.texts else []
    base = [("base model", judged.base)] if judged.base else []
    return [([*judged.decision.rows(), *base], ("name", "value")), *of_texts]
