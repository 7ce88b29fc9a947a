"""Curves of runs as charts: which belong together, and where their lines are in the SVG of a page."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ttrain.config.training import TRAINING_STAGES
from ttrain.reports import facts
from ttrain.store.run_views import Point, RunView

WIDTH, HEIGHT = 480, 250  # of a drawing, which the page scales
LEFT, RIGHT, TOP, BOTTOM = 46, 472, 8, 228  # of the frame inside it
COLOURS = 8  # in page.css
POINTS = 1000  # per line, two for each pixel
MOST_COLUMNS, MOST_ROWS = 9, 8  # lines of the grid
BEGIN, CONTINUE = "M{},{}h0", "L{},{}"  # of a path; h0: a lone point is seen
LARGE = 10_000  # numbers from here on are shown as 12.8k
MINUTE = 60

TITLES = {name: row.label for name, row in TRAINING_STAGES.items()}
QUICK = "_quick"  # at the end of the name of a metric on a few held-out rows
PER_TARGET, PER_PAIR = "nats per target", "per pair or rated answer"

# Title, unit and metrics of a chart, by pattern; a page shows the first MAIN at once, and folds the others.
GROUPS = (
    ("loss", PER_TARGET, r"loss|validation_loss(_quick)?"),
    ("accuracy of the next token", "share of tokens", r"validation_accuracy(_quick)?"),
    ("chosen answer leads", "share of pairs", r"(validation_)?reward_accuracy"),
    ("lead of the chosen answer", "reward", r"(validation_)?reward_margin"),
    ("learning rate", "", r"lr_.+"),
    ("gradient norm", "", r"grad_norm"),
    ("speed", "tokens per second", r"tokens_per_second"),
    ("parts of the loss", PER_TARGET, r"loss_.+|logits_loss|aux_loss"),
    ("perplexity", "", r"perplexity"),
    ("log-probability of answers", "nats", r"(validation_)?log_probability_(chosen|rejected)"),
    ("reward of answers", "", r"(validation_)?reward_(chosen|rejected)"),
    ("KL to the reference", "nats", r"(validation_)?kl_to_reference"),
    ("length of answers", "tokens", r"(validation_)?answer_tokens_(chosen|rejected)"),
    ("shares of the time", "", r"mfu|data_wait_fraction"),
    ("time of a step", "seconds", r"step_seconds|step_time"),
    ("memory", "bytes", r"memory_bytes"),
    ("use of the machine", "percent", r"system/(node_\d+/)?(cpu|gpu_\d+)_utilization_percentage"),
    ("memory of the machine", "percent", r"system/(node_\d+/)?(system|gpu_\d+)_memory_usage_percentage"),
    ("temperature", "°C", r"system/.*_temperature_celsius"),
)
MAIN = 7
# What a comparison shows at once, in this order.
COMPARED = ("validation_loss", "validation_loss_quick", "loss", "grad_norm", "tokens_per_second")
# Curves that are straight lines, and the rate of the first optimizer, which has its own name too.
HIDDEN = re.compile(r"eta_seconds|tokens|epoch|epoch_time|lr")

Curve = tuple[str, int, Sequence[Point]]  # label, number of the colour, points
Scale = Callable[[float], float]  # from a value to its pixel


@dataclass(frozen=True)
class Line:
    """A line of a chart: the `d` of its SVG path, its last value, and where that is."""

    label: str
    colour: int
    path: str
    last: str
    end: tuple[float, float] | None


@dataclass(frozen=True)
class Chart:
    """Lines on common axes. `columns` and `rows` are the lines of the grid, (pixel, label)."""

    title: str
    unit: str
    axis: str
    lines: Sequence[Line]
    columns: Sequence[tuple[float, str]]
    rows: Sequence[tuple[float, str]]


def charts_of(view: RunView, stage: str) -> tuple[list[Chart], list[Chart]]:
    """(main charts, other charts) of a stage of one run: metrics of one group share a chart."""
    groups: dict[tuple[int, str, str], list[Curve]] = {}
    for name in _names(view, stage):
        curves = groups.setdefault(_group(name, stage), [])
        curves.append((_label(name), len(curves), _points(view, stage, name)))
    charts = {group: draw(*group[1:], curves) for group, curves in sorted(groups.items())}
    main = [chart for group, chart in charts.items() if chart and group[0] < MAIN]
    return main, [chart for group, chart in charts.items() if chart and group[0] >= MAIN]


def comparison_charts(views: Sequence[RunView], stage: str) -> tuple[list[Chart], list[Chart]]:
    """(main charts, other charts) that compare runs in a stage: a chart per metric, a line per run."""
    curves: dict[str, list[Curve]] = {}
    for number, view in enumerate(views):
        for name in _names(view, stage):
            curve = facts.letter(number), number, _points(view, stage, name)
            curves.setdefault(name, []).append(curve)
    charts = {name: draw(_label(name), _group(name, stage)[2], curves[name]) for name in sorted(curves)}
    main = [chart for name in COMPARED if (chart := charts.pop(name, None))]
    return main, [chart for chart in charts.values() if chart]


def draw(title: str, unit: str, curves: Sequence[Curve]) -> Chart | None:
    """Draw curves over tokens, or over time where nothing is trained on.

    None where no curve has two points: single values are in tables. A value that is not finite is a gap.
    """
    if max(len(points) for _, _, points in curves) < 2:
        return None
    has_tokens = any(point.tokens is not None for _, _, points in curves for point in points)
    places = [list(_places(thinned(points), has_tokens=has_tokens)) for _, _, points in curves]
    low, high = _extent(x for line in places for x, _ in line)
    columns = [value for value in ticks(low, high, MOST_COLUMNS) if low <= value <= high]
    across = _scale(low, high, LEFT, RIGHT)
    rows = ticks(*_extent(y for line in places for _, y in line if math.isfinite(y)), MOST_ROWS)
    up = _scale(rows[0], rows[-1], BOTTOM, TOP)
    lines = [
        _line(label, colour % COLOURS, line, across, up) for (label, colour, _), line in zip(curves, places, strict=True)
    ]
    axis = "tokens" if has_tokens else "minutes"
    labelled_columns = [(across(value), _number(value)) for value in columns]
    return Chart(title, unit, axis, lines, labelled_columns, [(up(value), _number(value)) for value in rows])


def thinned(points: Sequence[Point]) -> list[Point]:
    """About `POINTS` points, with the ends, and of each stretch the highest and a gap or the lowest."""
    size = max(1, 2 * len(points) // POINTS)
    kept = {points[0], points[-1]} if points else set()
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        kept |= {min(stretch, key=_finite), max(stretch, key=_finite)}
    return sorted(kept, key=lambda point: (point.step, math.isfinite(point.value)))


def ticks(low: float, high: float, most: int) -> list[float]:
    """About `most` values that enclose a range, a step of 1, 2 or 5 times a power of ten apart."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if (high - low) / step <= most)
    first, last = math.floor(round(low / step, 9)), math.ceil(round(high / step, 9))
    return [number * step for number in range(first, last + 1)]


def _names(view: RunView, stage: str) -> list[str]:
    """The curves that are shown: those of quick validations end with the full one's value."""
    names = view.curves(stage)
    return [name for name in names if not HIDDEN.fullmatch(name) and f"{name}{QUICK}" not in names]


def _label(name: str) -> str:
    return f"{name} (few rows; the dot: all)" if name.endswith(QUICK) else name


def _points(view: RunView, stage: str, name: str) -> list[Point]:
    """The points of a curve, with a gap between a validation of a few rows and one of all."""
    points = view.curve(stage, name)
    if name.endswith(QUICK):
        full = {point.step for point in view.curve(stage, name.removesuffix(QUICK))}
        gaps = [point._replace(value=math.nan) for point in points if point.step in full]
        points = sorted([*gaps, *points], key=lambda point: point.step)
    return points


def _group(name: str, stage: str) -> tuple[int, str, str]:
    """(position, title, unit) of a metric's chart: names that differ in numbers share one."""
    for position, (title, unit, pattern) in enumerate(GROUPS):
        if re.fullmatch(pattern, name):
            row = TRAINING_STAGES.get(stage)
            is_per_pair = unit == PER_TARGET and row is not None and row.rows == "pairs"
            return position, title, PER_PAIR if is_per_pair else unit
    return len(GROUPS), re.sub(r"[_/.]?\d+(?=$|[_/.])", "", name) or name, ""


def _places(points: Sequence[Point], *, has_tokens: bool) -> Iterator[tuple[float, float]]:
    """(tokens, or minutes since the first point, value) of the points that have both."""
    for point in points:
        x = point.tokens if has_tokens else (point.time - points[0].time) / MINUTE
        if x is not None:
            yield x, point.value


def _finite(point: Point) -> float:
    return point.value if math.isfinite(point.value) else -math.inf


def _extent(values: Iterable[float]) -> tuple[float, float]:
    """The lowest and highest value, apart also where they are equal."""
    found = [*values] or [1.0]
    low, high = min(found), max(found)
    apart = 0.0 if low < high else abs(low) / 10 or 1.0
    return low - apart, high + apart


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    return lambda value: round(start + (end - start) * (value - low) / (high - low), 2)


def _line(label: str, colour: int, places: Sequence[tuple[float, float]], across: Scale, up: Scale) -> Line:
    """A line that begins again after a gap."""
    path, last, end = "", "–", None
    command = BEGIN
    for x, y in places:
        if math.isfinite(y):
            last, end = f"{y:.5g}", (across(x), up(y))
            path += command.format(*end)
        command = CONTINUE if math.isfinite(y) else BEGIN
    return Line(label, colour, path, last, end)


def _number(value: float) -> str:
    return facts.short(value) if abs(value) >= LARGE else f"{value:.6g}"
