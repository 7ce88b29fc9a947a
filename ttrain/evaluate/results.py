"""Task results of one or more models: metrics with intervals, comparisons, tables, JSON. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ttrain.core.files import JsonDict, finite
from ttrain.core.hashing import digest_of
from ttrain.evaluate import items as notes
from ttrain.evaluate import statistics
from ttrain.evaluate.few_records import not_judged
from ttrain.evaluate.items import Items
from ttrain.evaluate.statistics import Interval, PairedComparison, Rule
from ttrain.evaluate.task_result import Metric, TaskResult, metric_of

Table = tuple[list[str], list[tuple[str, ...]]]  # header, rows
COMPARED = tuple(field.name for field in fields(PairedComparison))
OTHER_ITEMS = "not the same items"
OTHER_COUNTS = "the models count the items differently, as with two tokenizers: compare a metric per byte"


@dataclass(frozen=True)
class ModelComparison:
    """Two models on the primary metric of a task. `p_of_all` is corrected for the number of comparisons, by Holm's rule;
    `compared` is None if the models cannot be compared, for the reason in `verdict`."""

    task: str
    figure: str
    first: str
    second: str
    compared: PairedComparison | None
    p_of_all: float
    verdict: str

    def to_json(self) -> JsonDict:
        """All fields as JSON, those of the comparison among them."""
        comparison = dict.fromkeys(COMPARED) if self.compared is None else asdict(self.compared)
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "compared"}
        return finite({**own, **comparison})


class Results:
    """Results of one or more models on the same tasks. The other models are compared with the first one.

    `read` has the items of the tasks, for notes such as the locations of rows that were left out.
    """

    def __init__(self, outcomes: Sequence[TaskResult], rule: Rule, read: Sequence[Items[Any]] = ()) -> None:
        self.outcomes, self.rule, self.read = tuple(outcomes), rule, tuple(read)
        self.models = list(dict.fromkeys(outcome.subject for outcome in outcomes))
        self._tasks: dict[str, dict[str, TaskResult]] = {}
        for outcome in outcomes:
            self._tasks.setdefault(outcome.task, {})[outcome.subject] = outcome

    def metrics(self) -> dict[str, float]:
        """Every metric as TASK/FIGURE/MODEL, and the primary one of each group as TASK/FIGURE/MODEL/KEY:VALUE."""
        values: dict[str, float] = {}
        for outcome in self.outcomes:
            names, primary = outcome.names, outcome.primary.name
            values |= {names[metric.name]: metric.value for metric in outcome.figures}
            values |= {f"{outcome.task}/{primary}/{name}": value for name, value in outcome.baselines.items()}
            values |= {metric_of(names[primary], name): group.value for name, group in _groups(outcome)}
        return values

    def counts(self) -> dict[str, int]:
        """Number of items and of left-out rows of each task."""
        numbers = {}
        for task, by_model in self._tasks.items():
            outcome = next(iter(by_model.values()))
            numbers[f"{task}/items"], numbers[f"{task}/left_out"] = len(outcome.items), sum(outcome.left_out.values())
        return numbers

    def comparisons(self) -> list[ModelComparison]:
        """Compare every other model with the first on each task's primary metric."""
        pairs = [(first, other) for first, *others in map(dict.values, self._tasks.values()) for other in others]
        reasons = [_incomparable_reason(*pair) for pair in pairs]
        compared = [
            None if why else statistics.compare(first.primary, other.primary, self.rule, among=len(pairs))
            for (first, other), why in zip(pairs, reasons, strict=True)
        ]
        corrected = statistics.holm([math.nan if pair is None else pair.p for pair in compared])
        comparisons: list[ModelComparison] = []
        for (first, other), why, pair, p in zip(pairs, reasons, compared, corrected, strict=True):
            names = (first.task, first.primary.name, first.subject, other.subject)
            verdict = why if pair is None else self._verdict(pair, p, first.subject, other.subject)
            comparisons.append(ModelComparison(*names, pair, p, verdict))
        return comparisons

    def _verdict(self, compared: PairedComparison, p: float, first: str, second: str) -> str:
        """Summarise a comparison in words."""
        if few := not_judged(compared.items, noun="items"):
            return few
        if compared.better and p <= 1 - self.rule.confidence:
            return f"{first if compared.better == 'first' else second} is better"
        if math.isnan(p):
            return "not tested: resamples is 0"
        minimum = f" (minimum detectable: {number(compared.smallest)})" if compared.smallest else ""
        return f"no significant difference{minimum}"

    def to_json(self) -> JsonDict:
        """Everything except the items, as JSON."""
        tasks = []
        left_out_rows = {task_items.task: [row._asdict() for row in task_items.left_out] for task_items in self.read}
        for task, by_model in self._tasks.items():
            first = next(iter(by_model.values()))
            tasks.append({
                "task": task, "kind": first.kind, "figure": first.primary.name,
                "items": len(first.items), "digest": digest_of(list(first.items)),
                "left_out": dict(first.left_out), "baselines": dict(first.baselines),
                **({"left_out_rows": left_out_rows[task]} if left_out_rows.get(task) else {}),
                "models": {model: self._figures(outcome) for model, outcome in by_model.items()},
            })  # fmt: skip
        compared = [pair.to_json() for pair in self.comparisons()]
        return {"confidence": self.rule.confidence, "models": self.models, "tasks": tasks, "comparisons": compared}

    def _figures(self, outcome: TaskResult) -> JsonDict:
        figures = {figure.name: self._figure(figure) for figure in outcome.figures}
        groups = {name: self._figure(group) for name, group in _groups(outcome)}
        return {"figures": figures, **({"groups": groups} if groups else {})}

    def _figure(self, figure: Metric) -> JsonDict:
        return finite({
            "value": figure.value, "interval": statistics.interval(figure, self.rule), "unit": figure.unit,
            "smallest": statistics.smallest(figure), "higher_is_better": figure.higher_is_better,
            "items": sum(size > 0 for size in figure.sizes),
        })  # fmt: skip

    def table(self) -> Table:
        """(header, rows): a row for each metric, a column for each model. Below a task's primary metric come its values for
        groups of items and its baselines."""
        rows: list[tuple[str, ...]] = []
        for task, by_model in self._tasks.items():
            lines: dict[str, dict[str, Metric]] = {}
            for model, outcome in by_model.items():
                primary, *others = ((metric.name, metric) for metric in outcome.figures)
                groups = ((f"  {name}", group) for name, group in _groups(outcome))
                for name, metric in (primary, *groups, *others):
                    lines.setdefault(name, {})[model] = metric
            reference = next(iter(by_model.values()))
            for name, metrics in lines.items():
                cells = [self._cell(metrics[model]) if model in metrics else "" for model in self.models]
                count = sum(size > 0 for size in next(iter(metrics.values())).sizes)
                rows.append((task, name, *cells, f"{count:,}"))
                for word, value in reference.baselines.items() if name == reference.primary.name else ():
                    rows.append((task, f"  {word}", *[number(value)] * len(self.models), ""))
        return ["task", "figure", *self.models, "items"], rows

    def line(self, outcome: TaskResult) -> str:
        """Format the primary metric of a task result in one line."""
        return f"{outcome.task}/{outcome.primary.name} {self._cell(outcome.primary)}"

    def comparison_table(self) -> Table:
        """(header, rows): a row for each task and each model but the first."""
        rows: list[tuple[str, ...]] = []
        for pair in self.comparisons():
            comparison = pair.compared
            interval = "" if comparison is None or comparison.interval is None else span(comparison.interval, "+")
            cells = ("", "", "") if comparison is None else (_shown(comparison.difference, "+"), interval, _p(pair.p_of_all))
            rows.append((pair.task, pair.figure, f"{pair.first} - {pair.second}", *cells, pair.verdict))
        return ["task", "figure", "models", "difference", f"{self.rule.confidence:.0%} interval", "p", "verdict"], rows

    def notes(self) -> list[str]:
        """Notes on the items, a line each: left-out rows, duplicates, unused keys."""
        return notes.lines(self.read)

    def rows(self) -> Iterator[JsonDict]:
        """Yield every item of every model, with its prompt and answer."""
        for outcome in self.outcomes:
            for digest, row in zip(outcome.items, outcome.rows, strict=True):
                yield {"task": outcome.task, "model": outcome.subject, "item": digest, **row}

    def _cell(self, figure: Metric) -> str:
        interval = statistics.interval(figure, self.rule)
        return number(figure.value) + ("" if interval is None else f" ({span(interval)})")


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


def _groups(outcome: TaskResult) -> Iterator[tuple[str, Metric]]:
    """Yield the primary metric over the items of each group."""
    for name, numbers in outcome.groups.items():
        yield name, outcome.primary.restricted(numbers)
