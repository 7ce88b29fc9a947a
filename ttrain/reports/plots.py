"""Curves as a picture: the charts of the pages as PNG, drawn by vl-convert."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ttrain.core.terminal import escaped
from ttrain.errors import UsageError
from ttrain.reports import charts, vega_charts
from ttrain.reports.charts import Chart, Line
from ttrain.reports.compare import labels
from ttrain.reports.compare_page import TITLES
from ttrain.tracking import Point, RunView

LOSSES = ("loss", "validation_loss", "validation_loss_quick")  # of several runs over each other
SHOWN = ("loss", "perplexity", "learning rate")  # of one run, where no metric is asked for
WIDTH, HEIGHT = 430, 240  # of the plot of a panel, before it is enlarged
SCALE = 2.0  # pixels of the picture for each of these
INK, FAINT, GRID = "#16202c", "#5d6b7c", "#edf1f5"  # as on a light page
COLOURS = ("#2563eb", "#d9480f", "#0f8a5f", "#9333ea", "#b7791f", "#0891b2", "#db2777", "#4b5563")


def panels_of(views: Sequence[RunView], metrics: Sequence[str] = (), stages: Sequence[str] = ()) -> list[list[Chart]]:
    """What to draw, a list for each stage that has curves: of one run its losses, perplexities and learning rates, of
    several the losses over each other, or the named metrics. Raises UsageError that lists the curves there are."""
    there = list(dict.fromkeys(name for view in views for name in view.stages if view.curves(name)))
    if unknown := [stage for stage in stages if stage not in there]:
        raise UsageError(f"the stage {unknown[0]} has no curves; those that have are {', '.join(there) or 'none'}")
    rows, known = [], set[str]()
    for stage in stages or there:
        names = {name for view in views if stage in view.stages for name in view.curves(stage)}
        known |= names
        if metrics:
            drawn = [_over(views, stage, metric) for metric in metrics if metric in names]
        elif len(views) == 1:
            drawn = [chart for group in charts.charts_of(views[0], stage) for chart in group if chart.title in SHOWN]
            drawn.sort(key=lambda chart: SHOWN.index(chart.title))
        else:
            drawn = [_over(views, stage, metric) for metric in LOSSES if metric in names]
            drawn = [chart for chart in drawn if any(len(line.points) > 1 for line in chart.lines)]
        if drawn:
            rows.append([Chart(f"{TITLES.get(stage, stage)}: {one.title}", one.unit, one.lines) for one in drawn])
    if not rows:
        asked = f"no stage has a curve {' or '.join(metrics)}" if metrics else "there is no curve to draw"
        raise UsageError(f"{asked}; the curves are {', '.join(sorted(known)) or 'none: no stage of the run trains'}")
    return rows


def _over(views: Sequence[RunView], stage: str, metric: str) -> Chart:
    """A metric of a stage, a line a run."""
    lines = []
    for place, (label, view) in enumerate(zip(labels(len(views)), views, strict=True)):
        if points := view.curve(stage, metric):
            lines.append(Line(f"{label}  {view.name}" if len(views) > 1 else metric, place, tuple(points)))
    return Chart(metric, charts.unit_of(metric), tuple(lines))


def draw(rows: Sequence[Sequence[Chart]], *, axis: str = "tokens", log: bool = False, title: str = "") -> dict[str, Any]:
    """The picture as a Vega-Lite specification. A loss that is no number leaves a gap; an axis that a curve does not know
    gives way to that of steps. Texts are escaped: one with a letter that XML does not know ends the process that draws."""
    look = vega_charts.config(FAINT, GRID, list(COLOURS))
    look["background"] = "white"
    look["axis"] |= {"titleColor": FAINT, "titleFontWeight": "normal"}
    look["title"] = {"anchor": "start", "color": INK, "fontSize": 13, "offset": 12}
    apart = {"spacing": 28, "resolve": {"scale": {"color": "independent"}}}
    return {
        "vconcat": [{"hconcat": [_panel(panel, axis, log) for panel in panels], **apart} for panels in rows],
        **apart,
        "padding": 16,
        "config": look,
        **({"title": {"text": escaped(title), "fontWeight": "normal", "offset": 16}} if title else {}),
    }


def _panel(panel: Chart, axis: str, log: bool) -> dict[str, Any]:
    compares = len({line.run for line in panel.lines}) > 1
    shown = axis if all(_x(point, axis, 0.0) is not None for line in panel.lines for point in line.points) else "step"
    spec = vega_charts.chart(shown, log=log)
    spec |= {"width": WIDTH, "height": HEIGHT, "title": {"text": escaped(panel.title)}}
    spec["data"] = {"values": [row for number, line in enumerate(panel.lines) for row in _rows(line, number, shown, log)]}
    coding = spec["encoding"]
    coding["x"]["axis"]["title"] = shown
    coding["y"]["axis"]["title"] = panel.unit or None
    colours = [COLOURS[(line.run if compares else number) % len(COLOURS)] for number, line in enumerate(panel.lines)]
    legend = {"title": None, "orient": "bottom", "columns": 1 if compares else 0, "labelLimit": 0, "symbolType": "stroke"}
    coding["color"] = {
        "field": "label",
        "type": "nominal",
        "scale": {"domain": [escaped(line.label) for line in panel.lines], "range": colours},
        "legend": legend if len(panel.lines) > 1 else None,
    }
    return spec


def _rows(line: Line, number: int, axis: str, log: bool) -> Iterator[dict[str, Any]]:
    """The points of a line as the specification has them."""
    points = charts.thinned(line.points)
    for point in points:
        there = math.isfinite(point.value) and not (log and point.value <= 0)
        yield {
            "x": _x(point, axis, points[0].time),
            "y": point.value if there else None,
            "line": number,
            "label": escaped(line.label),
            "faint": False,
            "dot": len(points) < vega_charts.MARKED,
        }


def save(picture: Mapping[str, Any], path: Path) -> None:
    """Write it as PNG, whatever the name ends in."""
    import vl_convert

    path.write_bytes(vl_convert.vegalite_to_png(dict(picture), scale=SCALE))


def _x(point: Point, axis: str, began: float) -> float | None:
    """In milliseconds where it is a time."""
    return 1000 * (point.time - began) if axis == "time" else point.tokens if axis == "tokens" else float(point.step)
