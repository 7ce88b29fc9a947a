"""Charts as Vega-Lite specifications, and these drawn: as SVG for pages, as PNG for pictures."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import Any

from ttrain.core.files import output_file, parse_json
from ttrain.core.terminal import escaped
from ttrain.errors import TTrainError
from ttrain.reports import drawing_process
from ttrain.reports.charts import Chart, Line
from ttrain.store.run_views import Point

Spec = dict[str, Any]  # of Vega-Lite

WIDTH, HEIGHT = 480, 250  # of a drawing in a page, which the page scales

PANEL_WIDTH, PANEL_HEIGHT = 430, 240  # of a plot in a picture, which SCALE enlarges

SCALE = 2.0

POINTS = 1000  # per line, two for each pixel; the lowest and highest of each stretch are kept

POINTS_OF_CHART = 12_000  # of all lines

MARKED = 60  # points up to which each of a line is marked

COLOURS = (  # those of page.css on a light page
    "#2563eb", "#d9480f", "#0f8a5f", "#9333ea", "#b7791f", "#0891b2", "#db2777", "#4b5563",
)  # fmt: skip

INK, FAINT, GRID = "#16202c", "#5d6b7c", "#edf1f5"

COUNT = "format(datum.value, '~s')"  # 950, 12.8k, 1.5M
# A scale of dates has round ticks of seconds, minutes and hours; these are times since the beginning of a training.
CLOCK = (
    "datum.value < 60000 ? format(datum.value / 1000, '~r') + ' s' : "
    "datum.value < 3600000 ? format(datum.value / 60000, '~r') + ' min' : format(datum.value / 3600000, '~r') + ' h'"
)
FIGURE = "abs(datum.value) >= 10000 ? format(datum.value, '~s') : format(datum.value, '~g')"

PACKAGE = "vl-convert-python"

SIZE = re.compile(r'^<svg [^>]*?(viewBox="[^"]*")>')
UNSEEN = re.compile(r'<path class="foreground"[^>]*/>')


def colour_of(chart: Chart, number: int) -> int:
    """The colour of a line: that of its run where runs are compared."""
    runs = [line.run for line in chart.lines]
    return (runs[number] if any(runs) else number) % len(COLOURS)


def axis_of(chart: Chart, axis: str) -> str:
    """The axis of a chart: what a machine does is measured by the clock and has no tokens."""
    return axis if any(_x(point, axis, 0.0) is not None for line in chart.lines for point in line.points) else "time"


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


def rows_of(chart: Chart, axis: str, *, log: bool = False) -> list[list[tuple[float, float | None]]]:
    """(x, y) of the points of each line that are drawn; y is None where there is a gap."""
    most = min(POINTS, max(100, POINTS_OF_CHART // len(chart.lines)))
    return [list(_rows(line, axis, most, log)) for line in chart.lines]


def _rows(line: Line, axis: str, most: int, log: bool) -> Iterator[tuple[float, float | None]]:
    points = thinned(line.points, most)
    for point in points:
        x = _x(point, axis, points[0].time)
        if x is not None:
            is_drawable = math.isfinite(point.value) and not (log and point.value <= 0)
            yield x, float(f"{point.value:.7g}") if is_drawable else None


def _x(point: Point, axis: str, began: float) -> float | None:
    """The x value of a point; a time is in milliseconds since `began`."""
    return round(1000 * (point.time - began)) if axis == "time" else point.tokens if axis == "tokens" else point.step


def curves_spec(chart: Chart, axis: str, *, log: bool, colours: Sequence[str], key: str = "line") -> Spec:
    """Lines with gaps where values are missing. `key` is the field that tells lines apart: their number or their label.

    Labels are escaped: a character that XML does not allow ends the process that draws.
    """
    axis = axis_of(chart, axis)
    is_time = axis == "time"
    values = [
        {"x": x, "y": y, "line": number, "label": escaped(chart.lines[number].label), "dot": len(rows) < MARKED}
        for number, rows in enumerate(rows_of(chart, axis, log=log))
        for x, y in rows
    ]
    across = {"labelExpr": CLOCK if is_time else COUNT, **({} if is_time else {"tickMinStep": 1})}
    up = {"labelExpr": FIGURE, "tickCount": 5, **({"labelOverlap": "greedy"} if log else {})}
    x_scale = {"type": "utc" if is_time else "linear", "nice": False, "zero": False}
    names = [number if key == "line" else escaped(line.label) for number, line in enumerate(chart.lines)]
    lines = {"domain": names, "range": [colours[colour_of(chart, number)] for number in range(len(chart.lines))]}
    return {
        "data": {"values": values},
        "layer": [
            {"mark": {"type": "line", "strokeWidth": 1.6, "strokeJoin": "round"}},
            {"mark": {"type": "point", "filled": True, "size": 24, "opacity": 1}, "transform": [{"filter": "datum.dot"}]},
        ],
        "encoding": {
            "x": {
                "field": "x",
                "type": "temporal" if is_time else "quantitative",
                "scale": x_scale,
                "axis": {"title": None, "labelFlush": True, "tickCount": 7, **across},
            },
            "y": {
                "field": "y",
                "type": "quantitative",
                "scale": {"type": "log" if log else "linear", "zero": False, "nice": not log},
                "axis": {"title": None, "minExtent": 34, **up},
            },
            "color": {"field": key, "type": "nominal", "scale": lines, "legend": None},
            "detail": {"field": "line", "type": "nominal"},
            "description": {"field": "line"},
        },
    }


def _look(ink: str, grid: str, size: float) -> Spec:
    axis = {"labelColor": ink, "labelFontSize": size, "gridColor": grid, "domain": False, "ticks": False}
    axis |= {"labelPadding": 6, "labelOverlap": True}
    return {"background": None, "view": {"stroke": None}, "axis": axis}


def page_drawings(charts: Sequence[Chart], *, axis: str, log: bool) -> list[str]:
    """The drawings of a page as SVG elements, in the colours of its style sheet. Raises TTrainError."""
    colours = [f"var(--run{number})" for number in range(len(COLOURS))]
    frame = {"width": WIDTH, "height": HEIGHT, "autosize": {"type": "fit", "contains": "padding"}, "padding": 2}
    frame["config"] = _look("var(--faint)", "var(--grid)", 10.5)
    if not charts:
        return []
    specs = (curves_spec(chart, axis, log=log, colours=colours) for chart in charts)
    try:
        svgs = map(parse_json, drawing_process.draw(json.dumps(frame | spec) for spec in specs))
    except RuntimeError as error:
        raise TTrainError(
            f"{PACKAGE} {version(PACKAGE)}, which draws charts, does not work here: {error}; "
            f"`pip install --force-reinstall {PACKAGE}`"
        ) from None
    # Without a size, so that a drawing takes that of its place.
    return [UNSEEN.sub("", SIZE.sub(r'<svg class="drawing" \1>', svg)) for svg in svgs]


def picture(rows: Sequence[Sequence[Chart]], *, axis: str = "tokens", log: bool = False, title: str = "") -> Spec:
    """The specification of a picture with rows of charts, each with its title, its axes and its legend."""
    look = _look(FAINT, GRID, 11.5)
    look["background"] = "white"
    look["axis"] |= {"titleColor": FAINT, "titleFontWeight": "normal"}
    look["title"] = {"anchor": "start", "color": INK, "fontSize": 13, "offset": 12}
    apart = {"spacing": 28, "resolve": {"scale": {"color": "independent"}}}
    return {
        "vconcat": [{"hconcat": [_panel(chart, axis, log) for chart in charts], **apart} for charts in rows],
        **apart,
        "padding": 16,
        "config": look,
        **({"title": {"text": escaped(title), "fontWeight": "normal", "offset": 16}} if title else {}),
    }


def _panel(chart: Chart, axis: str, log: bool) -> Spec:
    spec = curves_spec(chart, axis, log=log, colours=COLOURS, key="label")
    spec |= {"width": PANEL_WIDTH, "height": PANEL_HEIGHT, "title": {"text": escaped(chart.title)}}
    coding = spec["encoding"]
    coding["x"]["axis"]["title"] = axis_of(chart, axis)
    coding["y"]["axis"]["title"] = chart.unit or None
    if len(chart.lines) > 1:
        columns = 1 if any(line.run for line in chart.lines) else 0
        coding["color"]["legend"] = {"title": None, "orient": "bottom", "columns": columns, "labelLimit": 0}
        coding["color"]["legend"]["symbolType"] = "stroke"
    return spec


def save(specification: Spec, path: Path) -> None:
    """Write a picture as PNG, whatever suffix the path has."""
    import vl_convert

    picture = vl_convert.vegalite_to_png(dict(specification), scale=SCALE)
    with output_file(path) as file:
        file.write(picture)
