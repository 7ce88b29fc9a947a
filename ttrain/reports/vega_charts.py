"""Charts of curves as Vega-Lite specifications (https://vega.github.io/vega-lite/docs/spec.html): plain data, in this one
place for the pages, whose script fills in the rows, and for pictures.

A row of the data is a point: `x` (tokens, steps or milliseconds), `y` (null is a gap), `line` and `colour` (numbers),
`faint` (what smoothing was made of), `dot` (whether the point is marked, as where a line has few).
"""

from __future__ import annotations

from typing import Any

AXES = ("tokens", "step", "time")
COLOURS = 8  # --run0 ... of page.css; lines beyond take them again
DATA = "points"  # name of the rows
MARKED = 60  # points up to which each of a line is marked

COUNT = "format(datum.value, '~s')"  # 950, 12.8k, 1.5M
# A scale of dates has round ticks of seconds, minutes and hours; these are times since the beginning of a training.
CLOCK = (
    "datum.value < 60000 ? format(datum.value / 1000, '~r') + ' s' : "
    "datum.value < 3600000 ? format(datum.value / 60000, '~r') + ' min' : format(datum.value / 3600000, '~r') + ' h'"
)
FIGURE = "abs(datum.value) >= 10000 ? format(datum.value, '~s') : format(datum.value, '~g')"


def chart(axis: str, *, log: bool) -> dict[str, Any]:
    """Lines with a gap where there is no number, over tokens, steps or time; on a logarithmic axis where asked for."""
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
    """How charts look, in the colours of the ground that they stand on."""
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
