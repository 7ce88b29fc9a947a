"""A sweep as one page: what each setting does to the metric, how the sweep went on, the curves of its trials."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ttrain.core.text import format_duration
from ttrain.reports import html
from ttrain.reports.charts import Chart, Line
from ttrain.reports.html import Markup, tag
from ttrain.sweep import summary
from ttrain.sweep.records import Sweep
from ttrain.sweep.space import Dimension, IntegerRange, Interval, ValueList, format_value
from ttrain.sweep.study import COMPLETED, Trial, best_of
from ttrain.tracking import Point

CURVES = 16  # of trials on one chart, the best of them


def render(sweep: Sweep, trials: Sequence[Trial], importances: Mapping[str, float]) -> str:
    """The page as HTML."""
    measure, space = sweep.measure, sweep.space
    best = best_of(list(trials), maximize=measure.maximize)
    curves = [trial for trial in summary.ranked(trials, maximize=measure.maximize) if len(trial.curve) > 1][:CURVES]
    page = html.Page(sweep.name, runs=[f"trial {trial.number}" for trial in curves], compares=True)
    done = [trial for trial in trials if trial.outcome == COMPLETED and trial.value is not None]
    plots = [
        scatter(
            key,
            [Dot(_position(dimension, t.values[key]), t.value or 0.0, _tooltip(t, key), t == best) for t in done],
            labels=_labels(dimension),
            log=_is_log(dimension),
        )
        for key, dimension in space.dimensions.items()
    ]
    if len(done) > 1:
        values = [trial.value or 0.0 for trial in done]
        standing = list(accumulate(values, max if measure.maximize else min))
        dots = [Dot(trial.number, trial.value or 0.0, _tooltip(trial, None), trial == best) for trial in done]
        line = [(float(trial.number), value) for trial, value in zip(done, standing, strict=True)]
        plots.append(scatter("trial, and the best so far", dots, line=line, whole=True))
    if done:
        page.section(f"What each setting does to {measure.metric}", html.tag("div", *plots, class_="charts"))
    if importances:
        rows = [(name, f"{100 * share:.0f} %") for name, share in importances.items()]
        page.section("How much of the difference each setting explains", html.table(("setting", "share"), rows, numbers=[1]))
    page.section("While the trials trained", page.charts(_curves(curves, measure.metric)))
    header, cells = summary.trial_table(trials, space, measure)
    numbers = [*range(2 + len(space.dimensions)), len(header) - 2]
    page.section(
        "Trials", html.table(header, ([*row[:-1], html.tag("td", row[-1], class_="short")] for row in cells), numbers)
    )
    if best:
        page.section("The best one again", html.tag("pre", summary.command(sweep, best)))
    return page.render(_head(sweep, trials, best))


def _head(sweep: Sweep, trials: Sequence[Trial], best: Trial | None) -> html.Markup:
    measure = sweep.measure
    took = sum(trial.seconds or 0.0 for trial in trials)
    figures = [(measure.metric, summary.figure(best)), ("best trial", best.number)] if best else []
    title = html.tag("h1", sweep.name, " ", html.pill(sweep.outcome))
    varied = html.tag("p", ", ".join(f"{key}={text}" for key, text in sweep.space.texts.items()), class_="faint")
    verdict = html.tag("p", summary.verdict(trials, measure), class_="verdict")
    tiles = html.tiles(
        [*figures, (f"trials: {summary.counts(trials)}", len(trials)), ("of all trials", format_duration(took))]
    )
    return html.joined([title, varied, verdict, tiles])


def _curves(trials: Sequence[Trial], metric: str) -> list[Chart]:
    lines = [
        Line(
            f"trial {trial.number}",
            number,
            tuple(Point(tokens, float(tokens), 0.0, value) for tokens, value in sorted(trial.curve.items())),
        )
        for number, trial in enumerate(trials)
    ]
    return [Chart(metric, "by tokens", tuple(lines))] if lines else []


def _tooltip(trial: Trial, key: str | None) -> str:
    """The tooltip of a trial's dot."""
    values = ", ".join(f"{name}={format_value(value)}" for name, value in trial.values.items() if key is None or name == key)
    return f"trial {trial.number}: {summary.figure(trial)} with {values}"


def _position(dimension: Dimension, value: object) -> float:
    """The position of a value on its axis; a value of a list by its index."""
    if isinstance(dimension, ValueList) and not _is_number(dimension):
        return float(dimension.values.index(value))
    assert isinstance(value, int | float), "the values of intervals are numbers"
    return float(value)


def _labels(dimension: Dimension) -> dict[float, str]:
    """Labels by position on the axis of a list; none for a list of numbers."""
    if isinstance(dimension, ValueList) and not _is_number(dimension):
        return {float(position): format_value(value) for position, value in enumerate(dimension.values)}
    return {}


def _is_number(dimension: ValueList) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in dimension.values)


def _is_log(dimension: Dimension) -> bool:
    """Whether its axis is logarithmic: where values were drawn so, or where the listed numbers span a factor of ten."""
    if isinstance(dimension, Interval | IntegerRange):
        return dimension.log
    if not _is_number(dimension) or min(dimension.values) <= 0:
        return False
    return bool(math.log10(max(dimension.values) / min(dimension.values)) >= 1)


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 240, 58, 14, 12, 34

FAINT_LINE = {"stroke": "currentColor", "stroke_opacity": 0.15}

TICKS = 5

STEPS = (1, 2, 5, 10)

MARGIN = 0.06  # of an axis, beyond its outermost values


@dataclass(frozen=True)
class Dot:
    """One point of the plot, with its tooltip."""

    x: float
    y: float
    tooltip: str
    best: bool = False


def scatter(
    title: str,
    dots: Sequence[Dot],
    *,
    labels: Mapping[float, str] | None = None,
    log: bool = False,
    line: Sequence[tuple[float, float]] = (),
    whole: bool = False,
) -> Markup:
    """A figure with the dots, the best one marked, and a line where there is one; `labels` name positions on the x axis."""
    x = _Axis([dot.x for dot in dots], LEFT, WIDTH - RIGHT, log=log)
    y = _Axis([dot.y for dot in dots if math.isfinite(dot.y)], HEIGHT - BOTTOM, TOP)
    ticks = labels or {tick: f"{tick:g}" for tick in x.ticks(whole=whole)}
    parts: list[object] = []
    for tick in y.ticks():
        parts.append(tag("line", **FAINT_LINE, x1=LEFT, x2=WIDTH - RIGHT, y1=y.at(tick), y2=y.at(tick)))
        parts.append(tag("text", f"{tick:g}", class_="faint", x=LEFT - 6, y=y.at(tick) + 4, text_anchor="end"))
    for tick, label in ticks.items():
        parts.append(tag("text", label, class_="faint", x=x.at(tick), y=HEIGHT - BOTTOM + 18, text_anchor="middle"))
    if line:
        points = " ".join(f"{x.at(px)},{y.at(py)}" for px, py in line)
        drawn = {"fill": "none", "stroke": "currentColor", "stroke_width": 1.5}
        parts.append(tag("polyline", class_="run0", points=points, **drawn))
    for dot in sorted(dots, key=lambda dot: dot.best):
        if math.isfinite(dot.y):
            colour, radius = ("run1", 6) if dot.best else ("run0", 4)
            tooltip = tag("title", dot.tooltip)
            parts.append(
                tag("circle", tooltip, class_=colour, fill="currentColor", cx=x.at(dot.x), cy=y.at(dot.y), r=radius)
            )
    shape = {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "height": HEIGHT, "preserveAspectRatio": "xMinYMid meet"}  # never enlarged
    drawing = tag("svg", *parts, class_="times", **shape, role="img", aria_label=title)
    return tag("figure", tag("figcaption", title), drawing)


class _Axis:
    """Maps values to pixels."""

    def __init__(self, values: Sequence[float], first: float, last: float, *, log: bool = False) -> None:
        self._log = log
        placed = [self._scaled(value) for value in values] or [0.0, 1.0]
        low, high = min(placed), max(placed)
        margin = MARGIN * (high - low) or abs(high) * MARGIN or 1.0
        self._low, self._high, self._first, self._last = low - margin, high + margin, first, last

    def at(self, value: float) -> float:
        """The pixel of a value."""
        share = (self._scaled(value) - self._low) / (self._high - self._low)
        return round(self._first + share * (self._last - self._first), 1)

    def ticks(self, *, whole: bool = False) -> list[float]:
        """Round values within the axis."""
        if self._log:
            return self._powers()
        size = (self._high - self._low) / TICKS
        power = 10 ** math.floor(math.log10(size))
        step = next(power * factor for factor in STEPS if power * factor >= size)
        if whole:
            step = max(1.0, round(step))
        first = math.ceil(self._low / step)
        return [round(multiple * step, 12) for multiple in range(first, math.floor(self._high / step) + 1)]

    def _powers(self) -> list[float]:
        """1, 2 and 5 times the powers of ten; the powers alone where these are many."""
        exponents = range(math.floor(self._low), math.ceil(self._high) + 1)
        candidates = [factor * 10.0**exponent for exponent in exponents for factor in STEPS[:3]]
        inside = [value for value in candidates if self._low <= math.log10(value) <= self._high]
        powers = [value for value in inside if math.log10(value) == round(math.log10(value))]
        return inside if len(inside) <= TICKS + 1 or len(powers) < 2 else powers

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self._log else value
