"""Task results of one or more models: intervals, comparisons, tables, JSON. Loads no torch."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from ttrain.core.files import JsonDict, finite
from ttrain.core.hashing import digest_of
from ttrain.evaluate import statistics
from ttrain.evaluate.statistics import Interval, PairedComparison, Rule
from ttrain.evaluate.task_result import Metric, TaskResult, not_judged

Table = tuple[list[str], list[tuple[str, ...]]]  # header, rows
NOT_COMPARED = PairedComparison(math.nan, "", None, math.nan, None, 0)
OTHER_ITEMS = "not the same items"
OTHER_COUNTS = (
    "the models count the items differently, as with two tokenizers: compare a metric per byte"
)


class Results:
    """Results of models on the same tasks; the other models are compared with the first one."""

    def __init__(self, outcomes: Sequence[TaskResult], rule: Rule) -> None:
        self.outcomes = outcomes
        self.rule = rule
        self.models = list(dict.fromkeys(outcome.subject for outcome in outcomes))
        self._tasks: dict[str, dict[str, TaskResult]] = {}
        for outcome in outcomes:
            self._tasks.setdefault(outcome.task, {})[outcome.subject] = outcome

    def recorded(self) -> dict[str, Metric]:
        """Every metric as TASK/METRIC/MODEL[/KEY:VALUE], and baselines as TASK/METRIC/BASELINE."""
        recorded: dict[str, Metric] = {}
        for outcome in self.outcomes:
            names = {
                metric.name: f"{outcome.task}/{metric.name}/{outcome.subject}"
                for metric in outcome.figures
            }
            recorded |= outcome.recorded(names, f"{outcome.task}/{outcome.primary.name}/")
        return recorded

    def metrics(self) -> dict[str, float]:
        """The values of the recorded metrics that are finite."""
        return {
            name: metric.value
            for name, metric in self.recorded().items()
            if math.isfinite(metric.value)
        }

    def counts(self) -> dict[str, int]:
        """Number of items and of left-out rows of each task."""
        numbers: dict[str, int] = {}
        for task in (outcome.items for outcome in self.outcomes):
            numbers |= {
                f"{task.task}/items": len(task.digests),
                f"{task.task}/left_out": len(task.left_out),
            }
        return numbers

    def comparisons(self) -> list[JsonDict]:
        """Compare every other model with the first on each metric that decides.

        The fields of `PairedComparison`, `verdict` in words, and `p_of_all`: p corrected by Holm's
        rule.
        """
        decisive = [
            (first, other, metric, other_metric)
            for first, *others in map(dict.values, self._tasks.values())
            for other in others
            for metric, other_metric in zip(first.compared, other.compared, strict=False)
        ]
        comparisons: list[JsonDict] = []
        for first, other, metric, other_metric in decisive:
            why = _incomparable_reason(first, other, metric, other_metric)
            compared = (
                NOT_COMPARED
                if why
                else statistics.compare(metric, other_metric, self.rule, among=len(decisive))
            )
            comparisons.append(
                {
                    "task": first.task,
                    "figure": metric.name,
                    "first": first.subject,
                    "second": other.subject,
                    **asdict(compared),
                    "verdict": why,
                }
            )
        corrected = statistics.holm([comparison["p"] for comparison in comparisons])
        for comparison, p in zip(comparisons, corrected, strict=True):
            comparison["p_of_all"] = p
            comparison["verdict"] = comparison["verdict"] or self._verdict(comparison)
        return comparisons

    def _verdict(self, comparison: JsonDict) -> str:
        if few := not_judged(comparison["items"], noun="items"):
            return few
        if comparison["better"] and comparison["p_of_all"] <= 1 - self.rule.confidence:
            return f"{comparison[comparison['better']]} is better"
        if math.isnan(comparison["p_of_all"]):
            return "not tested: resamples is 0"
        smallest = comparison["smallest"]
        return (
            "no significant "
            f"difference{f' (minimum detectable: {number(smallest)})' if smallest else ''}"
        )

    def to_json(self) -> JsonDict:
        """Everything except the items, as JSON."""
        tasks = []
        for task, by_model in self._tasks.items():
            first = next(iter(by_model.values()))
            tasks.append(
                {
                    "task": task,
                    "kind": first.items.spec.kind,
                    "figure": first.primary.name,
                    "items": len(first.items.digests),
                    "digest": digest_of(list(first.items.digests)),
                    "left_out": first.items.reasons,
                    "baselines": dict(first.baselines),
                    "models": {
                        model: {"figures": self._figures(outcome)}
                        for model, outcome in by_model.items()
                    },
                }
            )
        return {
            "confidence": self.rule.confidence,
            "models": self.models,
            "tasks": tasks,
            "comparisons": finite(self.comparisons()),
        }

    def _figures(self, outcome: TaskResult) -> JsonDict:
        return {
            metric.name + metric.suffix: finite(
                {
                    "value": metric.value,
                    "interval": statistics.interval(metric, self.rule),
                    "unit": metric.unit,
                    "smallest": statistics.smallest(metric),
                    "higher_is_better": metric.higher_is_better,
                    "items": metric.items,
                }
            )
            for metric in outcome.figures
        }

    def table(self) -> Table:
        """(header, rows): a row for each metric, a column for each model.

        Below a task's primary metric come its groups and baselines.
        """
        rows: list[tuple[str, ...]] = []
        for task, by_model in self._tasks.items():
            first = next(iter(by_model.values()))
            lines: dict[str, dict[str, Metric]] = {}
            for model, outcome in by_model.items():
                for metric in outcome.figures:
                    lines.setdefault(f"  {metric.group}" if metric.group else metric.name, {})[
                        model
                    ] = metric
            for name, metrics in lines.items():
                cells = [
                    self.cell(metrics[model]) if model in metrics else "" for model in self.models
                ]
                rows.append((task, name, *cells, f"{next(iter(metrics.values())).items:,}"))
                for word, value in first.baselines.items() if name == first.primary.name else ():
                    rows.append((task, f"  {word}", *[number(value)] * len(self.models), ""))
        return ["task", "figure", *self.models, "items"], rows

    def cell(self, metric: Metric) -> str:
        """Format a metric with its interval."""
        interval = statistics.interval(metric, self.rule)
        return number(metric.value) + ("" if interval is None else f" ({span(interval)})")

    def comparison_table(self) -> Table:
        """(header, rows): a row for each compared metric of a task and each model but the first."""
        rows: list[tuple[str, ...]] = []
        for pair in self.comparisons():
            cells = (
                ("", "", "")
                if math.isnan(pair["difference"])
                else (
                    _shown(pair["difference"], "+"),
                    span(pair["interval"], "+") if pair["interval"] else "",
                    _p(pair["p_of_all"]),
                )
            )
            rows.append(
                (
                    pair["task"],
                    pair["figure"],
                    f"{pair['first']} - {pair['second']}",
                    *cells,
                    pair["verdict"],
                )
            )
        return [
            "task",
            "figure",
            "models",
            "difference",
            f"{self.rule.confidence:.0%} interval",
            "p",
            "verdict",
        ], rows

    def rows(self) -> Iterator[JsonDict]:
        """Yield every item of every model, with its prompt and answer."""
        for outcome in self.outcomes:
            for digest, row in zip(outcome.items.digests, outcome.rows, strict=True):
                yield {"task": outcome.task, "model": outcome.subject, "item": digest, **row}


def _incomparable_reason(
    first: TaskResult, second: TaskResult, metric: Metric, other: Metric
) -> str:
    # "" if this metric of two results can be compared.
    if first.items.digests != second.items.digests:
        return OTHER_ITEMS
    if not statistics.comparable(metric, other):
        return OTHER_COUNTS
    broken = [
        of.subject
        for of, value in ((first, metric.value), (second, other.value))
        if not math.isfinite(value)
    ]
    return f"the metric of {' and '.join(broken)} is not finite" if broken else ""


def number(value: float) -> str:
    """Format a metric's value for a table."""
    return _shown(value, "") if math.isfinite(value) else "not finite"


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
