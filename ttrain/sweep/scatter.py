"""Dots on axes as SVG that stands in a page: drawn here, so that the page needs no script for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ttrain.reports.html import Markup, tag

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 240, 58, 14, 12, 34
FAINT_LINE = {"stroke": "currentColor", "stroke_opacity": 0.15}
TICKS = 5
STEPS = (1, 2, 5, 10)
MARGIN = 0.06  # of an axis, beyond its outermost values


@dataclass(frozen=True)
class Dot:
    """One value; `told` is what it says when it is pointed at."""

    x: float
    y: float
    told: str
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
    """A figure with the dots, the best one marked, and a line where there is one; `labels` name places on the x axis."""
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
    for dot in sorted(dots, key=lambda one: one.best):
        if math.isfinite(dot.y):
            colour, radius = ("run1", 6) if dot.best else ("run0", 4)
            told = tag("title", dot.told)
            parts.append(tag("circle", told, class_=colour, fill="currentColor", cx=x.at(dot.x), cy=y.at(dot.y), r=radius))
    shape = {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "height": HEIGHT, "preserveAspectRatio": "xMinYMid meet"}  # never enlarged
    drawing = tag("svg", *parts, class_="times", **shape, role="img", aria_label=title)
    return tag("figure", tag("figcaption", title), drawing)


class _Axis:
    """Values to pixels."""

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
        return [round(place * step, 12) for place in range(first, math.floor(self._high / step) + 1)]

    def _powers(self) -> list[float]:
        """1, 2 and 5 times the powers of ten; the powers alone where these are many."""
        exponents = range(math.floor(self._low), math.ceil(self._high) + 1)
        found = [factor * 10.0**exponent for exponent in exponents for factor in STEPS[:3]]
        inside = [value for value in found if self._low <= math.log10(value) <= self._high]
        powers = [value for value in inside if math.log10(value) == round(math.log10(value))]
        return inside if len(inside) <= TICKS + 1 or len(powers) < 2 else powers

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self._log else value
