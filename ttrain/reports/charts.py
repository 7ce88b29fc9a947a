"""Curves of runs as charts: which belong together, and which points of long ones are drawn. Views in, plain values out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ttrain.reports.compare import labels
from ttrain.tracking import Point, RunView

POINTS = 1200  # per line, about what a wide screen can show; the lowest and highest of each stretch are kept

POINTS_OF_CHART = 12_000  # of all lines; a page of a hundred runs then has 4 MB, not 40

MAX_RUNS_WITH_ALL_CURVES = 8  # up to so many runs all curves are drawn, above only the main ones

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
COMPARISON_METRICS = ("validation_loss", "validation_loss_quick", "loss", "grad_norm", "tokens_per_second")

STRAIGHT_CURVES = re.compile(r"eta_seconds|tokens|epoch|epoch_time")  # curves that are straight lines


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
        """The form that the page draws; null is a gap, since JSON has no NaN."""
        most = min(POINTS, max(100, POINTS_OF_CHART // len(self.lines)))
        return {"title": self.title, "unit": self.unit, "lines": [_line_json(line, most) for line in self.lines]}


def charts_of(view: RunView, stage: str) -> tuple[list[Chart], list[Chart]]:
    """(main charts, other charts) of a stage of one run."""
    names = [name for name in view.curves(stage) if not STRAIGHT_CURVES.fullmatch(name)]
    first = list(_grouped(view, stage, names, GROUPS))
    others = list(_grouped(view, stage, names, MORE_GROUPS))
    drawn_names = {line.label for chart in (*first, *others) for line in chart.lines}
    families: dict[str, list[str]] = {}
    for name in names:
        if name not in drawn_names:
            families.setdefault(_family(name), []).append(name)
    for family, members in families.items():
        others += _chart(family, "", [(name, 0, view.curve(stage, name)) for name in members])
    return first, others


def comparison_charts(views: Sequence[RunView], stage: str) -> tuple[list[Chart], list[Chart]]:
    """(main charts, other charts) that compare several runs in a stage: a chart per metric, a line per run."""
    stage_views = [view for view in views if stage in view.stages]
    names = sorted({name for view in stage_views for name in view.curves(stage) if not STRAIGHT_CURVES.fullmatch(name)})
    other_names = (
        [name for name in names if name not in COMPARISON_METRICS] if len(views) <= MAX_RUNS_WITH_ALL_CURVES else []
    )
    names = [*(name for name in COMPARISON_METRICS if name in names), *other_names]
    letters = labels(len(views))
    charts: tuple[list[Chart], list[Chart]] = ([], [])
    for name in names:
        lines = [(letters[number], number, view.curve(stage, name)) for number, view in enumerate(views)]
        charts[name not in COMPARISON_METRICS].extend(_chart(name, unit_of(name), lines))
    return charts


def thinned(points: Sequence[Point], most: int = POINTS) -> list[Point]:
    """About `most` points or fewer, with the lowest and highest of each stretch and every gap among them."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    selected: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        numbers = [point for point in stretch if math.isfinite(point.value)]
        gap = next((point for point in stretch if not math.isfinite(point.value)), None)
        chosen = (
            {min(numbers, key=lambda point: point.value), max(numbers, key=lambda point: point.value)} if numbers else set()
        )
        selected += sorted(chosen | ({gap} if gap else set()), key=lambda point: point.step)
    return list(dict.fromkeys([points[0], *selected, points[-1]]))


def _grouped(view: RunView, stage: str, names: Sequence[str], groups: Iterable[tuple[str, str, str]]) -> Iterator[Chart]:
    for title, unit, pattern in groups:
        metrics = [name for name in names if re.fullmatch(pattern, name)]
        if len(metrics) > 1:  # "lr" is the rate of the first optimizer, which is there under its own name too
            metrics = [name for name in metrics if name != "lr"]
        yield from _chart(title, unit, [(name, 0, view.curve(stage, name)) for name in metrics])


def _chart(title: str, unit: str, lines: Sequence[tuple[str, int, Sequence[Point]]]) -> Iterator[Chart]:
    """The chart, if any line has more than one point: single values are in tables."""
    drawn = [Line(label, run, tuple(points)) for label, run, points in lines if points]
    if any(len(line.points) > 1 for line in drawn):
        yield Chart(title, unit, tuple(drawn))


def _family(name: str) -> str:
    """The name without numbers, which shares a chart: "system/cpu" of "system/cpu_3", "moe_load" of "moe_load_0"."""
    return re.sub(r"[_/.]?\d+(?=$|[_/.])", "", name) or name


def unit_of(name: str) -> str:
    """The unit of a metric's axis; "" where its name says it."""
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


AXES = ("tokens", "step", "time")

COLOURS = 8  # --run0 ... of page.css; lines beyond take them again

DATA = "points"  # the name of the data set with the rows

MARKED = 60  # points up to which each of a line is marked

COUNT = "format(datum.value, '~s')"  # 950, 12.8k, 1.5M
# A scale of dates has round ticks of seconds, minutes and hours; these are times since the beginning of a training.
CLOCK = (
    "datum.value < 60000 ? format(datum.value / 1000, '~r') + ' s' : "
    "datum.value < 3600000 ? format(datum.value / 60000, '~r') + ' min' : format(datum.value / 3600000, '~r') + ' h'"
)

FIGURE = "abs(datum.value) >= 10000 ? format(datum.value, '~s') : format(datum.value, '~g')"


def chart(axis: str, *, log: bool) -> dict[str, Any]:
    """Lines with gaps where values are missing, over tokens, steps or time; on a logarithmic axis where asked for."""
    time = axis == "time"
    across = {"labelExpr": CLOCK if time else COUNT, **({} if time else {"tickMinStep": 1})}
    up = {"labelExpr": FIGURE, "tickCount": 5, **({"labelOverlap": "greedy"} if log else {})}
    return {
        "data": {"name": DATA, "values": []},
        "layer": [
            {"mark": {"type": "line", "clip": True, "strokeWidth": 1.6, "strokeJoin": "round"}},
            {
                "mark": {"type": "point", "filled": True, "size": 24, "opacity": 1},
                "transform": [{"filter": "datum.dot"}],
            },
        ],
        "encoding": {
            "x": {
                "field": "x",
                "type": "temporal" if time else "quantitative",
                "scale": {"type": "utc" if time else "linear", "nice": False, "zero": False},
                "axis": {"title": None, "labelFlush": True, "tickCount": 7, **across},
            },
            "y": {
                "field": "y",
                "type": "quantitative",
                "scale": {"type": "log" if log else "linear", "zero": False, "nice": not log},
                "axis": {"title": None, "minExtent": 34, **up},
            },
            "color": {"field": "colour", "type": "nominal", "scale": {"domain": list(range(COLOURS))}, "legend": None},
            "opacity": {
                "field": "faint",
                "type": "nominal",
                "scale": {"domain": [False, True], "range": [1, 0.25]},
                "legend": None,
            },
            "detail": {"field": "line", "type": "nominal"},
        },
    }


def charts() -> dict[str, dict[str, dict[str, Any]]]:
    """{axis: {"linear" or "log": specification}}: all that a reader of a page can choose."""
    return {axis: {"log": chart(axis, log=True), "linear": chart(axis, log=False)} for axis in AXES}


def config(ink: str, grid: str, colours: list[str]) -> dict[str, Any]:
    """The look of charts, in the colours of their background."""
    return {
        "background": None,
        "view": {"stroke": None},
        "axis": {
            "labelColor": ink,
            "labelFontSize": 11.5,
            "gridColor": grid,
            "domain": False,
            "ticks": False,
            "labelPadding": 6,
            "labelOverlap": True,
        },
        "range": {"category": colours},
    }
