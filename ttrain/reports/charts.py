"""Curves of runs as SVG charts: grouping of metrics, positions of lines."""

import math
import re
from collections.abc import Callable, Iterable, Sequence

from ttrain.config.training import TRAINING_STAGES
from ttrain.core.files import JsonDict
from ttrain.reports import facts
from ttrain.store.run_views import Point, RunView

WIDTH, HEIGHT = 480, 250  # of a drawing, which the page scales
LEFT, RIGHT, TOP, BOTTOM = 46, 472, 8, 228  # of the frame inside it
ROWS_LEFT, RIGHT_OF_ROWS, ROW_HEIGHT = 250, 740, 30  # of a drawing with a row for each setting
COLOURS = 8  # in page.css
POINTS = 1000  # per line, two for each pixel
MOST_COLUMNS, MOST_ROWS = 9, 8  # lines of the grid
LARGE = 10_000  # numbers from here on are shown as 12.8k
MINUTE = 60

TITLES = {name: row.label for name, row in TRAINING_STAGES.items()}
QUICK = "_quick"  # at the end of the name of a metric on a few held-out rows
PER_TARGET = "nats per target"
PER_PAIR = "per pair or rated answer"

# Title, unit and metrics of a chart, by pattern; a page shows the first MAIN at once, and folds the
# others.
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
    (
        "memory of the machine",
        "percent",
        r"system/(node_\d+/)?(system|gpu_\d+)_memory_usage_percentage",
    ),
    ("temperature", "°C", r"system/.*_temperature_celsius"),
)
MAIN = 7
# Curves that are straight lines, and the rate of the first optimizer, which has its own name too.
HIDDEN = re.compile(r"eta_seconds|tokens|epoch|epoch_time|lr")

Curve = tuple[str, int, Sequence[Point]]  # label, number of the colour, points
# As the template `figure` reads it: title, unit, axis; `lines`, each with its label, colour, last
# value and points in pixels, without a height in a gap; `columns` and `rows`, the lines of the grid
# as (pixel, label)
Chart = JsonDict


def charts_of(views: Sequence[RunView], stage: str) -> tuple[list[Chart], list[Chart]]:
    """(charts shown at once, folded charts) of a stage.

    One run: metrics of a group share a chart. Several: one metric a chart, one line a run. A group
    without a curve of two points has none.
    """
    groups: dict[tuple[int, str, str], list[Curve]] = {}
    is_alone = len(views) == 1
    for number, view in enumerate(views):
        for name, points in _curves(view, stage).items():
            position, title, unit = _group(name, stage)
            curves = groups.setdefault((position, title if is_alone else name, unit), [])
            label, colour = (name, len(curves)) if is_alone else (facts.letter(number), number)
            curves.append((label, colour, points))
    main: list[Chart] = []
    folded: list[Chart] = []
    for position, title, unit in sorted(groups):
        curves = groups[position, title, unit]
        if any(len(points) > 1 for _, _, points in curves):
            (main if position < MAIN else folded).append(draw(title, unit, curves))
    return main, folded


def draw(title: str, unit: str, curves: Sequence[Curve]) -> Chart:
    """Draw curves over tokens, or over time if there are none. Non-finite values are gaps."""
    has_tokens = any(point.tokens is not None for _, _, points in curves for point in points)
    places = [_places(thinned(points), has_tokens=has_tokens) for _, _, points in curves]
    low, high = _extent(x for line in places for x, _ in line)
    rows = ticks(*_extent(y for line in places for _, y in line), MOST_ROWS)
    across = _scale(low, high, LEFT, RIGHT)
    up = _scale(rows[0], rows[-1], BOTTOM, TOP)
    lines: list[JsonDict] = []
    for (label, colour, _), line in zip(curves, places, strict=True):
        path = [(across(x), up(y) if math.isfinite(y) else None) for x, y in line]
        last = next((f"{y:.5g}" for _, y in reversed(line) if math.isfinite(y)), "–")
        lines.append({"label": label, "colour": colour % COLOURS, "points": path, "last": last})
    return {
        "title": title,
        "unit": unit,
        "axis": "tokens" if has_tokens else "minutes",
        "lines": lines,
        "columns": [
            (across(x), _number(x)) for x in ticks(low, high, MOST_COLUMNS) if low <= x <= high
        ],
        "rows": [(up(y), _number(y)) for y in rows],
    }


def draw_rows(rows: Sequence[tuple[str, Sequence[float], tuple[float, float] | None]]) -> Chart:
    """Draw a row for each (label, points, interval), around a line at 0."""
    every = [
        0.0,
        *(value for _, points, interval in rows for value in (*points, *(interval or ()))),
    ]
    columns = ticks(*_extent(every), MOST_COLUMNS)
    across = _scale(columns[0], columns[-1], ROWS_LEFT, RIGHT_OF_ROWS)
    drawn: list[JsonDict] = []
    for number, (label, points, interval) in enumerate(rows):
        drawn.append(
            {
                "y": ROW_HEIGHT * (number + 0.5),
                "label": label,
                "points": [across(value) for value in points],
                "mean": across(math.fsum(points) / len(points)) if points else None,
                "ends": [across(end) for end in interval or ()],
            }
        )
    return {
        "rows": drawn,
        "columns": [(across(value), _number(round(value, 9))) for value in columns],
        "zero": across(0.0),
        "height": ROW_HEIGHT * len(rows),
    }


def thinned(points: Sequence[Point]) -> list[Point]:
    """About `POINTS` points: the ends, and extremes and gaps of each stretch."""

    def height(point: Point) -> float:
        return point.value if math.isfinite(point.value) else -math.inf

    size = max(1, 2 * len(points) // POINTS)
    kept = {*points[:1], *points[-1:]}
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        kept |= {min(stretch, key=height), max(stretch, key=height)}
    return sorted(kept, key=lambda point: point.step)


def ticks(low: float, high: float, most: int) -> list[float]:
    """About `most` values that enclose a range; steps are 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(
        factor * power for factor in (1, 2, 5, 10) if (high - low) / (factor * power) <= most
    )
    first = math.floor(round(low / step, 9))
    return [number * step for number in range(first, math.ceil(round(high / step, 9)) + 1)]


# Of quick validations, the points on all rows are those of the full ones.
def _curves(view: RunView, stage: str) -> dict[str, list[Point]]:
    curves = {
        name: view.curve(stage, name) for name in view.curves(stage) if not HIDDEN.fullmatch(name)
    }
    for name, points in curves.items():
        if name.endswith(QUICK):
            full = {point.step for point in curves.get(name.removesuffix(QUICK), ())}
            curves[name] = [point for point in points if point.step not in full]
    return curves


def _group(name: str, stage: str) -> tuple[int, str, str]:
    for position, (title, unit, pattern) in enumerate(GROUPS):
        if re.fullmatch(pattern, name):
            row = TRAINING_STAGES.get(stage)
            is_per_pair = unit == PER_TARGET and row is not None and row.rows == "pairs"
            return position, title, PER_PAIR if is_per_pair else unit
    return len(GROUPS), re.sub(r"[_/.]?\d+(?=$|[_/.])", "", name) or name, ""


def _places(points: Sequence[Point], *, has_tokens: bool) -> list[tuple[float, float]]:
    if has_tokens:
        return [(point.tokens, point.value) for point in points if point.tokens is not None]
    return [((point.time - points[0].time) / MINUTE, point.value) for point in points]


def _extent(values: Iterable[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)] or [1.0]
    low = min(finite)
    apart = 0.0 if low < max(finite) else abs(low) / 10 or 1.0
    return low - apart, max(finite) + apart


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: round(start + (end - start) * (value - low) / (high - low), 2)


def _number(value: float) -> str:
    return facts.short(value) if abs(value) >= LARGE else f"{value:.6g}"
