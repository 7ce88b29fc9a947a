"""The outcomes of one or more models as figures with intervals, as comparisons, as rows of a table, as JSON. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ttrain.core.hashing import digest_of
from ttrain.evaluate import item_notes as notes
from ttrain.evaluate import p_values, statistics
from ttrain.evaluate.items import Items
from ttrain.evaluate.statistics import FEWEST_ITEMS, Comparison, Rule
from ttrain.evaluate.task_result import Figure, Outcome, metric_of

COMPARED = tuple(field.name for field in fields(Comparison))
OTHER_ITEMS = "not the same items"
OTHER_COUNTS = "the two count the items differently, as two tokenizers do: compare a figure by bytes"


@dataclass(frozen=True)
class Versus:
    """Two models on the primary figure of a task. `p_of_all` is corrected for the number of comparisons, by Holm's rule;
    `compared` is None where the two cannot be compared, and `why` says why not."""

    task: str
    figure: str
    first: str
    second: str
    compared: Comparison | None
    p_of_all: float
    why: str = ""

    def verdict(self, rule: Rule) -> str:
        """In words, what these items say."""
        if self.compared is None:
            return self.why
        if self.compared.better and self.p_of_all <= 1 - rule.confidence:
            return f"{self.first if self.compared.better == 'first' else self.second} is better"
        if self.compared.items < FEWEST_ITEMS:
            return f"too few items to tell: {self.compared.items}, and no difference shows below {FEWEST_ITEMS}"
        if math.isnan(self.p_of_all):
            return "not tested, for there are no resamples"
        smallest = self.compared.smallest
        needs = f" (needs about {number(smallest)})" if smallest else ""  # none between two that are equal on every item
        return f"no difference that this set can show{needs}"

    def to_json(self, rule: Rule) -> dict[str, Any]:
        """All of it."""
        told = dict.fromkeys(COMPARED) if self.compared is None else self.compared.to_json()
        names = {"task": self.task, "figure": self.figure, "first": self.first, "second": self.second}
        return _finite({**names, **told, "p_of_all": self.p_of_all, "verdict": self.verdict(rule)})


class Results:
    """What one or more models made of the same tasks. The first model is the one that the others are compared with.

    `read` is what was asked, for what is to be said of it: where the rows stand that were left out.
    """

    def __init__(self, outcomes: Sequence[Outcome], rule: Rule, read: Sequence[Items[Any]] = ()) -> None:
        self.outcomes, self.rule, self.read = tuple(outcomes), rule, tuple(read)
        self.models = list(dict.fromkeys(one.subject for one in outcomes))
        self._tasks: dict[str, dict[str, Outcome]] = {}
        for one in outcomes:
            self._tasks.setdefault(one.task, {})[one.subject] = one

    def metrics(self) -> dict[str, float]:
        """Every figure as TASK/FIGURE/MODEL, and the primary one of each group as TASK/FIGURE/MODEL/KEY:VALUE."""
        found = {}
        for one in self.outcomes:
            for figure in one.figures:
                found[f"{one.task}/{figure.name}/{one.subject}"] = figure.value
            for name, value in one.baselines.items():
                found[f"{one.task}/{one.primary.name}/{name}"] = value
            for name, group in _groups(one):
                found[metric_of(f"{one.task}/{group.name}/{one.subject}", name)] = group.value
        return found

    def counts(self) -> dict[str, int]:
        """Of each task its items, and the rows that are none."""
        found = {}
        for task, by_model in self._tasks.items():
            one = next(iter(by_model.values()))
            found[f"{task}/items"], found[f"{task}/left_out"] = len(one.items), sum(one.left_out.values())
        return found

    def comparisons(self) -> list[Versus]:
        """Of each task, every other model against the first on the primary figure."""
        found: list[Versus] = []
        among = max(1, sum(len(by_model) - 1 for by_model in self._tasks.values()))
        for task, by_model in self._tasks.items():
            first, *others = by_model.values()
            for other in others:
                why = _incomparable(first, other)
                compared = None if why else statistics.compare(first.primary, other.primary, self.rule, among=among)
                found.append(Versus(task, first.primary.name, first.subject, other.subject, compared, math.nan, why))
        corrected = p_values.holm([math.nan if one.compared is None else one.compared.p for one in found])
        return [
            Versus(one.task, one.figure, one.first, one.second, one.compared, p, one.why)
            for one, p in zip(found, corrected, strict=True)
        ]

    def to_json(self) -> dict[str, Any]:
        """Everything but the items."""
        tasks = []
        places = {one.task: notes.left_out_json(one) for one in self.read}
        for task, by_model in self._tasks.items():
            one = next(iter(by_model.values()))
            tasks.append({
                "task": task, "kind": one.kind, "figure": one.primary.name,
                "items": len(one.items), "digest": digest_of(list(one.items)),
                "left_out": dict(one.left_out), "baselines": dict(one.baselines),
                **({"left_out_rows": places[task]} if places.get(task) else {}),
                "models": {model: self._figures(outcome) for model, outcome in by_model.items()},
            })  # fmt: skip
        compared = [one.to_json(self.rule) for one in self.comparisons()]
        return {"confidence": self.rule.confidence, "models": self.models, "tasks": tasks, "comparisons": compared}

    def _figures(self, outcome: Outcome) -> dict[str, Any]:
        found = {}
        for figure in outcome.figures:
            found[figure.name] = self._figure(figure)
        groups = {name: self._figure(group) for name, group in _groups(outcome)}
        return {"figures": found, **({"groups": groups} if groups else {})}

    def _figure(self, figure: Figure) -> dict[str, Any]:
        return _finite({
            "value": figure.value, "interval": statistics.interval(figure, self.rule), "unit": figure.unit,
            "smallest": statistics.smallest(figure), "higher_is_better": figure.higher_is_better,
            "items": sum(size > 0 for size in figure.sizes),
        })  # fmt: skip

    def table(self) -> tuple[list[str], list[tuple[str, ...]]]:
        """(header, rows): a row for each figure, a column for each model; where there is one, what it can show beside it.
        Below the figure that stands for a task: what it would be without a model, and what it is for groups of items."""
        rows: list[tuple[str, ...]] = []
        for task, by_model in self._tasks.items():
            lines: dict[str, dict[str, Figure]] = {}
            for model, outcome in by_model.items():
                named = [(figure.name, figure) for figure in outcome.figures]
                for name, figure in [*named[:1], *((f"  {name}", group) for name, group in _groups(outcome)), *named[1:]]:
                    lines.setdefault(name, {})[model] = figure
            beside = next(iter(by_model.values()))
            for name, figures in lines.items():
                cells = [self._cell(figures[model]) if model in figures else "" for model in self.models]
                one = next(iter(figures.values()))
                count = f"{sum(size > 0 for size in one.sizes):,}"
                rows.append((task, name, *cells, count, *([_shows(one)] if len(self.models) == 1 else [])))
                if name == beside.primary.name:
                    rows += [(task, f"  {word}", *self._of_all(value)) for word, value in beside.baselines.items()]
        return ["task", "figure", *self.models, "items", *(["shows from"] if len(self.models) == 1 else [])], rows

    def line(self, outcome: Outcome) -> str:
        """An outcome in a few words: the figure that stands for it."""
        return f"{outcome.task}/{outcome.primary.name} {self._cell(outcome.primary)}"

    def comparison_table(self) -> tuple[list[str], list[tuple[str, ...]]]:
        """(header, rows): a row for each task and each model beside the first."""
        rows: list[tuple[str, ...]] = []
        for one in self.comparisons():
            found = one.compared
            interval = "" if found is None or found.interval is None else span(found.interval, "+")
            told = ("", "", "") if found is None else (_shown(found.difference, "+"), interval, _p(one.p_of_all))
            rows.append((one.task, one.figure, f"{one.first} - {one.second}", *told, one.verdict(self.rule)))
        return ["task", "figure", "models", "difference", f"{self.rule.confidence:.0%} interval", "p", "verdict"], rows

    def notes(self) -> list[str]:
        """A line for whatever a user should know of the items beside the figures."""
        return notes.lines(self.read)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every item of every model: what was asked, what was said."""
        for one in self.outcomes:
            for digest, row in zip(one.items, one.rows, strict=True):
                yield {"task": one.task, "model": one.subject, "item": digest, **row}

    def _of_all(self, value: float) -> tuple[str, ...]:
        """Cells of a number that no model has a part in."""
        return (*(number(value) for _ in self.models), "", *([""] if len(self.models) == 1 else []))

    def _cell(self, figure: Figure) -> str:
        interval = statistics.interval(figure, self.rule)
        return number(figure.value) + ("" if interval is None else f" ({span(interval)})")


def _incomparable(first: Outcome, other: Outcome) -> str:
    """Why the two say nothing about each other; "" where they do."""
    if first.items != other.items:
        return OTHER_ITEMS
    if not statistics.comparable(first.primary, other.primary):
        return OTHER_COUNTS
    broken = [one.subject for one in (first, other) if not math.isfinite(one.primary.value)]
    return f"what {' and '.join(broken)} says is no number" if broken else ""


def number(value: float) -> str:
    """A figure as a table shows it."""
    if not math.isfinite(value):
        return "no number"
    return _shown(value, "")


def span(interval: tuple[float, float], sign: str = "") -> str:
    """An interval as a table shows it; `sign` "+" shows the sign of both ends."""
    return " to ".join(_shown(end, sign) for end in interval)


def _shown(value: float, sign: str) -> str:
    if abs(value) < 10:
        return f"{value:{sign}.4f}"
    return f"{value:{sign},.2f}" if abs(value) < 1e5 else f"{value:{sign}.3g}"


def _shows(figure: Figure) -> str:
    smallest = statistics.smallest(figure)
    return "" if smallest is None else number(smallest)


def _p(value: float) -> str:
    if math.isnan(value):
        return ""
    return f"{value:.3f}" if value >= 0.001 else "< 0.001"


def _groups(outcome: Outcome) -> Iterator[tuple[str, Figure]]:
    """The primary figure over the items of each group."""
    for name, numbers in outcome.groups.items():
        yield name, outcome.primary.restricted(numbers)


def _finite(told: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON takes it: what is no number becomes null, and what is a tuple a list."""
    return {
        name: [_known(end) for end in value] if isinstance(value, tuple) else _known(value) for name, value in told.items()
    }


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
