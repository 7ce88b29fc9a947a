"""Charts as drawings: where lines, grid and labels are in the SVG elements that a page's template writes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from ttrain.reports import facts
from ttrain.reports.charts import Chart, Line
from ttrain.store.run_views import Point

WIDTH, HEIGHT = 480, 250  # of a drawing, which the page scales
LEFT, RIGHT, TOP, BOTTOM = 46, 472, 8, 228  # of the frame inside it
COLOURS = 8  # in page.css
POINTS = 1000  # per line, two for each pixel; the lowest and highest of each stretch are kept
POINTS_OF_CHART = 12_000  # of all lines
MARKED = 60  # points up to which each of a line is marked
X_TICKS, Y_TICKS = 9, 8
MINUTE, HOUR = 60, 3600
BEGIN, GO_ON = "M{},{}h0", "L{},{}"  # of a path; h0: a lone point is seen
CLOCK_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200)  # seconds

Position = tuple[float, float | None]  # None where there is a gap


@dataclass(frozen=True)
class DrawnLine:
    """A line of a drawing. `dots` are its points where these are few, `last` its last value as a text."""

    label: str
    colour: int
    last: str
    path: str
    dots: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Drawing:
    """A chart as it is drawn. `columns` and `rows` are the lines of the grid, (pixel, label)."""

    chart: Chart
    axis: str
    lines: Sequence[DrawnLine]
    columns: Sequence[tuple[float, str]]
    rows: Sequence[tuple[float, str]]


@dataclass(frozen=True)
class Scale:
    """From values to pixels: `start` and `end` are the pixels of `low` and `high`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log10(part) if self.log else part for part in (self.low, self.high, value))
        return round(self.start + (self.end - self.start) * (value - low) / (high - low), 2)


def drawing_of(chart: Chart, axis: str, *, log: bool = False) -> Drawing:
    """Draw a chart over tokens, steps or time; values that a logarithmic axis cannot show are gaps."""
    axis = axis_of(chart, axis)
    most = min(POINTS, max(100, POINTS_OF_CHART // max(1, len(chart.lines))))
    lines = [list(_positions(line, axis, most, log=log)) for line in chart.lines]
    x_values = [x for line in lines for x, y in line]
    y_values = [y for line in lines for x, y in line if y is not None]
    low, high = _extent(x_values)
    across = Scale(low, high, LEFT, RIGHT)
    columns = time_ticks(high) if axis == "time" else ticks(low, high, X_TICKS, least=1)
    low, high = _extent(y_values, log=log)
    rows = log_ticks(low, high) if log else ticks(low, high, Y_TICKS)
    if not log:
        step = rows[1] - rows[0]
        low, high = math.floor(low / step) * step, math.ceil(high / step) * step
        rows = ticks(low, high, Y_TICKS)
    up = Scale(low, high, BOTTOM, TOP, log)
    label = _clock if axis == "time" else _number
    return Drawing(
        chart,
        axis,
        [_drawn(chart, number, line, across, up) for number, line in enumerate(lines)],
        [(across(value), label(value)) for value in columns],
        [(up(value), _number(value)) for value in rows],
    )


def axis_of(chart: Chart, axis: str) -> str:
    """The axis of a chart: what a machine does is measured by the clock and has no tokens."""
    points = (point for line in chart.lines for point in line.points)
    return "time" if axis == "tokens" and all(point.tokens is None for point in points) else axis


def thinned(points: Sequence[Point], most: int = POINTS) -> list[Point]:
    """About `most` points or fewer, with the lowest and highest of each stretch and every gap among them."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    selected: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        gaps = [point for point in stretch if not math.isfinite(point.value)]
        numbers = [point for point in stretch if math.isfinite(point.value)]
        ends = {end(numbers, key=attrgetter("value")) for end in (min, max) if numbers}
        selected += sorted({*ends, *gaps[:1]}, key=attrgetter("step"))
    return list(dict.fromkeys([points[0], *selected, points[-1]]))


def ticks(low: float, high: float, count: int, least: float = 0.0) -> list[float]:
    """About `count` round values from `low` to `high`, a step of 1, 2 or 5 times a power of ten apart."""
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if (high - low) / step <= count)
    return _multiples(low, high, max(step, least))


def log_ticks(low: float, high: float) -> list[float]:
    """Round values of a logarithmic axis: powers of ten, also 2 and 5 times these where they are few."""
    if high < 10 * low:
        return ticks(low, high, Y_TICKS)
    factors = (1, 2, 5) if high < 1000 * low else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [factor * 10.0**power for power in powers for factor in factors if low <= factor * 10.0**power <= high]


def time_ticks(high: float) -> list[float]:
    """Round times from 0 to `high` seconds."""
    day = 24 * HOUR
    step = next((step for step in CLOCK_STEPS if high / step <= X_TICKS), day * math.ceil(high / day / X_TICKS))
    return ticks(0, high, X_TICKS) if high < X_TICKS else _multiples(0, high, step)


def _multiples(low: float, high: float, step: float) -> list[float]:
    """The multiples of `step` from `low` to `high`; the tolerance is for what floats lose."""
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _extent(values: Sequence[float], *, log: bool = False) -> tuple[float, float]:
    """The lowest and highest value, apart also where they are equal."""
    low, high = (min(values), max(values)) if values else (1.0, 2.0)
    apart = abs(low) / 10 or 1.0
    return (low, high) if high > low else (low - (0 if log else apart), high + apart)


def _positions(line: Line, axis: str, most: int, *, log: bool) -> Iterator[Position]:
    points = thinned(line.points, most)
    for point in points:
        x = point.time - points[0].time if axis == "time" else point.tokens if axis == "tokens" else point.step
        if x is not None:
            is_drawable = math.isfinite(point.value) and not (log and point.value <= 0)
            yield x, point.value if is_drawable else None


def _drawn(chart: Chart, number: int, positions: Sequence[Position], across: Scale, up: Scale) -> DrawnLine:
    line = chart.lines[number]
    path, dots = [], []
    command = BEGIN
    for x, y in positions:
        if y is not None:
            dots.append((across(x), up(y)))
            path.append(command.format(*dots[-1]))
        command = BEGIN if y is None else GO_ON
    runs = [other.run for other in chart.lines]
    colour = (line.run if any(runs) else number) % COLOURS
    last = next((point.value for point in reversed(line.points) if math.isfinite(point.value)), None)
    value = "–" if last is None else f"{last:.5g}"
    return DrawnLine(line.label, colour, value, "".join(path), dots if len(positions) < MARKED else ())


def _number(value: float) -> str:
    return facts.short(value) if abs(value) >= 10_000 else f"{value:.6g}"


def _clock(seconds: float) -> str:
    if seconds < MINUTE:
        return f"{seconds:g} s"
    return f"{seconds / MINUTE:g} min" if seconds < HOUR else f"{seconds / HOUR:g} h"
