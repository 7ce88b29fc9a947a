"""Curves of runs as charts: which belong together, and which points of long ones are drawn. Views in, plain values out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ttrain.reports.compare import labels
from ttrain.tracking import Point, RunView

TRAININGS = ("pretrain", "sft", "lora")
POINTS = 1200  # of a line, about what a wide screen can show; the lowest and the highest of each stretch stay
POINTS_OF_CHART = 12_000  # of all lines; a hundred runs make a page of 4 MB then, and not of 40
EVERYTHING = 8  # runs of which all curves are drawn, not only those that everybody looks at
DIGITS = 7  # of a value in a page

# What a run's page shows at once: title, unit, the metrics of one chart, by pattern.
GROUPS = (
    ("loss", "nats per target", r"loss|validation_loss(_quick)?"),
    ("learning rate", "", r"lr(_.+)?"),
    ("gradient norm", "", r"grad_norm"),
    ("speed", "tokens per second", r"tokens_per_second"),
)
MORE_GROUPS = (
    ("parts of the loss", "nats per target", r"loss_.+|logits_loss|aux_loss"),
    ("perplexity", "", r"perplexity"),
    ("shares of the time", "", r"mfu|data_wait_fraction"),
    ("time of a step", "seconds", r"step_seconds|step_time"),
    ("memory", "bytes", r"memory_bytes"),
    ("use of the machine", "percent", r"system/(node_\d+/)?(cpu|gpu_\d+)_utilization_percentage"),
    ("memory of the machine", "percent", r"system/(node_\d+/)?(system|gpu_\d+)_memory_usage_percentage"),
    ("temperature", "°C", r"system/.*_temperature_celsius"),
)
# What a comparison shows at once, in this order.
COMPARED = ("validation_loss", "validation_loss_quick", "loss", "grad_norm", "tokens_per_second")
UNTOLD = re.compile(r"eta_seconds|tokens|epoch|epoch_time")  # curves that are straight lines


@dataclass(frozen=True)
class Line:
    """One line of a chart: `run` is the number of its run, which gives the colour where runs are compared."""

    label: str
    run: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Chart:
    """Lines on common axes."""

    title: str
    unit: str
    lines: tuple[Line, ...]

    def to_json(self) -> dict[str, Any]:
        """What the page draws: JSON has no NaN, and null is a gap."""
        most = min(POINTS, max(100, POINTS_OF_CHART // len(self.lines)))
        return {"title": self.title, "unit": self.unit, "lines": [_line_json(line, most) for line in self.lines]}


def charts_of(view: RunView, stage: str) -> tuple[list[Chart], list[Chart]]:
    """(those that everybody looks at, the others) of a stage of one run."""
    names = [name for name in view.curves(stage) if not UNTOLD.fullmatch(name)]
    first = list(_grouped(view, stage, names, GROUPS))
    more = list(_grouped(view, stage, names, MORE_GROUPS))
    told = {line.label for chart in (*first, *more) for line in chart.lines}
    families: dict[str, list[str]] = {}
    for name in names:
        if name not in told:
            families.setdefault(_family(name), []).append(name)
    for family, members in families.items():
        more += _chart(family, "", [(name, 0, view.curve(stage, name)) for name in members])
    return first, more


def compared(views: Sequence[RunView], stage: str) -> tuple[list[Chart], list[Chart]]:
    """(those that everybody looks at, the others) of a stage of several runs: a chart a metric, a line a run."""
    there = [view for view in views if stage in view.stages]
    names = sorted({name for view in there for name in view.curves(stage) if not UNTOLD.fullmatch(name)})
    more = [name for name in names if name not in COMPARED] if len(views) <= EVERYTHING else []
    names = [*(name for name in COMPARED if name in names), *more]
    letters = labels(len(views))
    found: tuple[list[Chart], list[Chart]] = ([], [])
    for name in names:
        lines = [(letters[place], place, view.curve(stage, name)) for place, view in enumerate(views)]
        found[name not in COMPARED].extend(_chart(name, unit_of(name), lines))
    return found


def thinned(points: Sequence[Point], most: int = POINTS) -> list[Point]:
    """At most about so many points, with the lowest and highest of each stretch and every gap among them."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        numbers = [point for point in stretch if math.isfinite(point.value)]
        gap = next((point for point in stretch if not math.isfinite(point.value)), None)
        chosen = {min(numbers, key=lambda one: one.value), max(numbers, key=lambda one: one.value)} if numbers else set()
        kept += sorted(chosen | ({gap} if gap else set()), key=lambda one: one.step)
    return list(dict.fromkeys([points[0], *kept, points[-1]]))


def _grouped(view: RunView, stage: str, names: Sequence[str], groups: Iterable[tuple[str, str, str]]) -> Iterator[Chart]:
    for title, unit, pattern in groups:
        found = [name for name in names if re.fullmatch(pattern, name)]
        if len(found) > 1:  # the rate of the first optimizer, which has a name of its own too
            found = [name for name in found if name != "lr"]
        yield from _chart(title, unit, [(name, 0, view.curve(stage, name)) for name in found])


def _chart(title: str, unit: str, lines: Sequence[tuple[str, int, Sequence[Point]]]) -> Iterator[Chart]:
    """The chart, where there is a line to draw: single figures stand in tables."""
    drawn = [Line(label, run, tuple(points)) for label, run, points in lines if points]
    if any(len(line.points) > 1 for line in drawn):
        yield Chart(title, unit, tuple(drawn))


def _family(name: str) -> str:
    """ "system/cpu" of "system/cpu_3", "moe_load" of "moe_load_0": what numbers tell apart goes onto one chart."""
    return re.sub(r"[_/.]?\d+(?=$|[_/.])", "", name) or name


def unit_of(name: str) -> str:
    """What a metric's axis is of; "" where its name says it."""
    return next((unit for _, unit, pattern in (*GROUPS, *MORE_GROUPS) if unit and re.fullmatch(pattern, name)), "")


def _line_json(line: Line, most: int) -> dict[str, Any]:
    points = thinned(line.points, most)
    began = points[0].time
    return {
        "label": line.label,
        "run": line.run,
        "step": [point.step for point in points],
        "tokens": [point.tokens for point in points],
        "time": [round(point.time - began, 1) for point in points],
        "value": [float(f"{point.value:.{DIGITS}g}") if math.isfinite(point.value) else None for point in points],
    }
