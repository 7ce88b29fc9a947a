"""Task results of one or more models: metrics with intervals, comparisons, tables, JSON. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ttrain.core.files import JsonDict, finite
from ttrain.core.hashing import digest_of
from ttrain.evaluate import statistics
from ttrain.evaluate.few_records import not_judged
from ttrain.evaluate.items import Items
from ttrain.evaluate.statistics import Interval, PairedComparison, Rule
from ttrain.evaluate.task_result import Metric, TaskResult

Table = tuple[list[str], list[tuple[str, ...]]]  # header, rows
NOT_COMPARED = PairedComparison(math.nan, "", None, math.nan, None, 0)
OTHER_ITEMS = "not the same items"
OTHER_COUNTS = "the models count the items differently, as with two tokenizers: compare a metric per byte"


@dataclass(frozen=True)
class ModelComparison:
    """Two models on the primary metric of a task.

    compared  NOT_COMPARED if the models cannot be, for the reason in `verdict`
    p_of_all  `compared.p` corrected for the number of comparisons, by Holm's rule
    """

    task: str
    figure: str
    first: str
    second: str
    compared: PairedComparison
    p_of_all: float
    verdict: str

    def to_json(self) -> JsonDict:
        """All fields as JSON, those of the comparison among them."""
        fields = {**vars(self), **vars(self.compared)}
        del fields["compared"]
        return finite(fields)


class Results:
    """Results of one or more models on the same tasks. The other models are compared with the first one.

    `read` has the items of the tasks, for the locations of rows that were left out.
    """

    def __init__(self, outcomes: Sequence[TaskResult], rule: Rule, read: Sequence[Items[Any]] = ()) -> None:
        self.outcomes = tuple(outcomes)
        self.rule = rule
        self.read = read
        self.models = list(dict.fromkeys(outcome.subject for outcome in outcomes))
        self._tasks: dict[str, dict[str, TaskResult]] = {}
        for outcome in outcomes:
            self._tasks.setdefault(outcome.task, {})[outcome.subject] = outcome

    def recorded(self) -> dict[str, Metric]:
        """Every metric as TASK/METRIC/MODEL, and the primary one of each group as TASK/METRIC/MODEL/KEY:VALUE."""
        return {name: metric for outcome in self.outcomes for name, metric in outcome.recorded().items()}

    def metrics(self) -> dict[str, float]:
        """The values of the recorded metrics, and of baselines as TASK/METRIC/BASELINE."""
        values = {name: metric.value for name, metric in self.recorded().items()}
        for outcome in self.outcomes:
            prefix = f"{outcome.task}/{outcome.primary.name}"
            values |= {f"{prefix}/{name}": value for name, value in outcome.baselines.items()}
        return values

    def counts(self) -> dict[str, int]:
        """Number of items and of left-out rows of each task."""
        numbers = {}
        for outcome in self.outcomes:
            numbers[f"{outcome.task}/items"] = len(outcome.items)
            numbers[f"{outcome.task}/left_out"] = sum(outcome.left_out.values())
        return numbers

    def comparisons(self) -> list[ModelComparison]:
        """Compare every other model with the first on each task's primary metric."""
        pairs = [(first, other) for first, *others in map(dict.values, self._tasks.values()) for other in others]
        comparisons: list[ModelComparison] = []
        for first, other in pairs:
            why = _incomparable_reason(first, other)
            compared = NOT_COMPARED
            if not why:
                compared = statistics.compare(first.primary, other.primary, self.rule, among=len(pairs))
            names = (first.task, first.primary.name, first.subject, other.subject)
            comparisons.append(ModelComparison(*names, compared, math.nan, why))
        corrected = statistics.holm([comparison.compared.p for comparison in comparisons])
        for number, (comparison, p) in enumerate(zip(comparisons, corrected, strict=True)):
            verdict = comparison.verdict or self._verdict(comparison, p)
            comparisons[number] = replace(comparison, p_of_all=p, verdict=verdict)
        return comparisons

    def _verdict(self, comparison: ModelComparison, p: float) -> str:
        """Summarise a comparison in words."""
        compared = comparison.compared
        if few := not_judged(compared.items, noun="items"):
            return few
        if compared.better and p <= 1 - self.rule.confidence:
            return f"{getattr(comparison, compared.better)} is better"
        if math.isnan(p):
            return "not tested: resamples is 0"
        minimum = f" (minimum detectable: {number(compared.smallest)})" if compared.smallest else ""
        return f"no significant difference{minimum}"

    def to_json(self) -> JsonDict:
        """Everything except the items, as JSON."""
        tasks = []
        left_out_rows = {items.task: [row._asdict() for row in items.left_out] for items in self.read}
        for task, by_model in self._tasks.items():
            first = next(iter(by_model.values()))
            tasks.append({
                "task": task, "kind": first.kind, "figure": first.primary.name,
                "items": len(first.items), "digest": digest_of(list(first.items)),
                "left_out": dict(first.left_out), "baselines": dict(first.baselines),
                **({"left_out_rows": left_out_rows[task]} if left_out_rows.get(task) else {}),
                "models": {model: self._figures(outcome) for model, outcome in by_model.items()},
            })  # fmt: skip
        compared = [comparison.to_json() for comparison in self.comparisons()]
        return {"confidence": self.rule.confidence, "models": self.models, "tasks": tasks, "comparisons": compared}

    def _figures(self, outcome: TaskResult) -> JsonDict:
        figures = {metric.name: self._figure(metric) for metric in outcome.figures}
        groups = {group: self._figure(metric) for group, metric in outcome.by_group().items()}
        return {"figures": figures, **({"groups": groups} if groups else {})}

    def _figure(self, metric: Metric) -> JsonDict:
        return finite({
            "value": metric.value, "interval": statistics.interval(metric, self.rule), "unit": metric.unit,
            "smallest": statistics.smallest(metric), "higher_is_better": metric.higher_is_better,
            "items": metric.items,
        })  # fmt: skip

    def table(self) -> Table:
        """(header, rows): a row for each metric, a column for each model. Below a task's primary metric come its values for
        groups of items and its baselines."""
        rows: list[tuple[str, ...]] = []
        for task, by_model in self._tasks.items():
            first = next(iter(by_model.values()))
            lines: dict[str, dict[str, Metric]] = {}
            for model, outcome in by_model.items():
                for name, metric in _lines(outcome).items():
                    lines.setdefault(name, {})[model] = metric
            for name, metrics in lines.items():
                cells = [self._cell(metrics[model]) if model in metrics else "" for model in self.models]
                rows.append((task, name, *cells, f"{next(iter(metrics.values())).items:,}"))
                for word, value in first.baselines.items() if name == first.primary.name else ():
                    rows.append((task, f"  {word}", *[number(value)] * len(self.models), ""))
        return ["task", "figure", *self.models, "items"], rows

    def line(self, outcome: TaskResult) -> str:
        """Format the primary metric of a task result in one line."""
        return f"{outcome.task}/{outcome.primary.name} {self._cell(outcome.primary)}"

    def comparison_table(self) -> Table:
        """(header, rows): a row for each task and each model but the first."""
        rows: list[tuple[str, ...]] = []
        for pair in self.comparisons():
            difference, interval = pair.compared.difference, pair.compared.interval
            cells = ("", "", "")
            if not math.isnan(difference):
                cells = (_shown(difference, "+"), span(interval, "+") if interval else "", _p(pair.p_of_all))
            rows.append((pair.task, pair.figure, f"{pair.first} - {pair.second}", *cells, pair.verdict))
        return ["task", "figure", "models", "difference", f"{self.rule.confidence:.0%} interval", "p", "verdict"], rows

    def rows(self) -> Iterator[JsonDict]:
        """Yield every item of every model, with its prompt and answer."""
        for outcome in self.outcomes:
            for digest, row in zip(outcome.items, outcome.rows, strict=True):
                yield {"task": outcome.task, "model": outcome.subject, "item": digest, **row}

    def _cell(self, metric: Metric) -> str:
        interval = statistics.interval(metric, self.rule)
        return number(metric.value) + ("" if interval is None else f" ({span(interval)})")


def _lines(outcome: TaskResult) -> dict[str, Metric]:
    """The metrics in the order of a table: the primary one, that of each group, the others."""
    groups = {f"  {group}": metric for group, metric in outcome.by_group().items()}
    others = {metric.name: metric for metric in outcome.figures[1:]}
    return {outcome.primary.name: outcome.primary, **groups, **others}


def _incomparable_reason(first: TaskResult, second: TaskResult) -> str:
    """Why the two results cannot be compared; "" if they can."""
    if first.items != second.items:
        return OTHER_ITEMS
    if not statistics.comparable(first.primary, second.primary):
        return OTHER_COUNTS
    broken = [outcome.subject for outcome in (first, second) if not math.isfinite(outcome.primary.value)]
    return f"the metric of {' and '.join(broken)} is not finite" if broken else ""


def number(value: float) -> str:
    """Format a metric's value for a table."""
    if not math.isfinite(value):
        return "not finite"
    return _shown(value, "")


def span(interval: Interval, sign: str = "") -> str:
    """Format an interval for a table; `sign` "+" shows the sign of both ends."""
    return " to ".join(_shown(end, sign) for end in interval)


def _shown(value: float, sign: str) -> str:
    if abs(value) < 10:
        return f"{value:{sign}.4f}"
    return f"{value:{sign},.2f}" if abs(value) < 1e5 else f"{value:{sign}.3g}"


def _p(value: float) -> str:
    if math.isnan(value):
        return ""
    return f"{value:.3f}" if value >= 0.001 else "< 0.001"
