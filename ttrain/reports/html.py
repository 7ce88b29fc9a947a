"""One page that needs nothing else: its style, its scripts and its data inside, and no way to reach a network.

Everything that comes from a run is text: escaped in HTML, JSON without "<" in the data, and the policy in the page lets no
script run but the two that are named by their digests, and none make another from text.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from ttrain import __version__
from ttrain.core.terminal import harmless
from ttrain.reports import vega, vega_charts
from ttrain.reports.charts import Chart

TILES = 7  # in a row at most; .of4 ... of page.css
LONG = 30  # characters of a cell that may be broken into lines anywhere
MARKS = re.compile("<[^>]*>")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape(value: object) -> Markup:
    """As text of a page: nothing in it is obeyed by a browser, and what turns the direction of writing is shown."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(harmless(str(value))))


def tag(name: str, *inside: object, **attributes: object) -> Markup:
    """An element; `class_` is written for class."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items() if value is not None
    )
    return Markup(f"<{name}{words}>{joined(inside)}</{name}>")


def joined(parts: Iterable[object]) -> Markup:
    """One after the other."""
    return Markup("".join(map(escape, parts)))


def table(header: Sequence[object], rows: Iterable[Sequence[object]], numbers: Sequence[int] = ()) -> Markup:
    """A table that scrolls by itself where the screen is narrow; the columns `numbers` are aligned to the right.

    A cell is a text, or the Markup of a whole <td>.
    """

    def cell(place: int, value: object) -> Markup:
        if isinstance(value, Markup) and value.startswith("<td"):
            return value
        shown = MARKS.sub("", value) if isinstance(value, Markup) else str(value)
        kind = "number" if place in numbers else "long" if len(shown) > LONG else None
        return tag("td", value, class_=kind)

    head = (tag("th", name, class_="number" if place in numbers else None) for place, name in enumerate(header))
    body = (tag("tr", *(cell(place, value) for place, value in enumerate(row))) for row in rows)
    return tag("div", tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body)), class_="scroll")


def letter(label: str, run: int) -> Markup:
    """The short name of a run in its colour."""
    return tag("span", label, class_=f"letter run{run % vega_charts.COLOURS}")


def pill(status: str) -> Markup:
    """How a run or a stage ended, in the colour that says whether that is good."""
    colour = {"completed": "good", "equal": "good", "failed": "bad", "crashed": "bad", "different": "bad"}.get(
        status, "plain"
    )
    return tag("span", status, class_=f"pill {colour}")


def tiles(figures: Iterable[tuple[str, object]]) -> Markup:
    """The figures that matter most: (what, value); on a wide screen in rows of about as many each."""
    shown = [tag("div", tag("b", value), tag("span", what), class_="tile") for what, value in figures]
    rows = math.ceil(len(shown) / TILES)
    return tag("div", *shown, class_=f"tiles of{math.ceil(len(shown) / rows)}") if shown else Markup()


def details(summary: object, *inside: object) -> Markup:
    """What is folded away at first."""
    return tag("details", tag("summary", summary), *inside)


class Page:
    """A page in the making: sections in their order, and charts that its script draws."""

    def __init__(self, title: str, *, runs: Sequence[str], compares: bool = False) -> None:
        self._title, self._runs, self._compares = title, list(runs), compares
        self._sections: list[tuple[str, Markup]] = []
        self._charts: list[Chart] = []

    def section(self, title: str, *inside: object) -> None:
        """A part of the page under a heading; left out where there is nothing in it."""
        content = joined(inside)
        if content:
            self._sections.append((title, content))

    def charts(self, charts: Sequence[Chart]) -> Markup:
        """The places of some charts, one beside the other."""
        if not charts:
            return Markup()
        first = len(self._charts)
        self._charts += charts
        return tag("div", *(_figure(first + place, chart) for place, chart in enumerate(charts)), class_="charts")

    def controls(self) -> Markup:
        """What changes all charts at once; nothing where there are no charts yet."""
        axes = (tag("label", Markup(f'<input type="radio" name="axis" value="{axis}">'), axis) for axis in vega_charts.AXES)
        return tag(
            "div",
            tag("fieldset", *axes),
            tag("label", Markup('<input type="checkbox" id="log">'), "logarithmic"),
            tag("label", "smooth", Markup('<input type="range" id="smooth" min="0" max="0.98" step="0.02" value="0">')),
            tag("span", "drag: zoom, double click: back, click a name: hide", class_="faint"),
            class_="controls",
        )

    def render(self, head: object) -> str:
        """The whole page; `head` stands above the sections."""
        style = _asset("page.css")
        scripts = [vega.script(), _asset("page.js")] if self._charts else []
        policy = (
            f"default-src 'none'; script-src {_digests(scripts)}; style-src {_digests([style])}; img-src data:; "
            f"base-uri 'none'; form-action 'none'"
        )
        headings = [tag("a", title, href=f"#s{place}") for place, (title, _) in enumerate(self._sections)]
        sections = (
            tag("section", tag("h2", title, id=f"s{place}"), content)
            for place, (title, content) in enumerate(self._sections)
        )
        text = [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            f"<title>{escape(self._title)}</title>\n<style>{style}</style>\n</head>\n<body>\n",
            f"<header>{escape(head)}</header>\n{tag('nav', *headings)}\n",
            "\n".join(sections),
            tag("footer", f"ttrain {__version__}. This page is whole: it loads nothing, and can be sent as it is."),
            f'\n<script type="application/json" id="data">{inert(self._data())}</script>\n' if self._charts else "\n",
            *(f"<script>{script}</script>\n" for script in scripts),
            "</body>\n</html>\n",
        ]
        return "".join(text)

    def _data(self) -> dict[str, Any]:
        """What the script draws, and as what: its specifications come from here alone, and never from a run."""
        names = [f"--run{number}" for number in range(vega_charts.COLOURS)]
        return {
            "charts": [chart.to_json() for chart in self._charts],
            "runs": self._runs,
            "compares": self._compares,
            "axis": "tokens" if self._count_tokens() else "step",
            "specs": vega_charts.charts(),
            "config": vega_charts.config("--faint", "--grid", names),
            "rows": vega_charts.DATA,
            "marked": vega_charts.MARKED,
        }

    def _count_tokens(self) -> bool:
        return any(point.tokens is not None for chart in self._charts for line in chart.lines for point in line.points)


def inert(value: Any) -> str:
    """JSON that may stand in a script element: no "<" that could end it, no line end that a script would see."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for letter_ in "<>&\u2028\u2029":
        text = text.replace(letter_, f"\\u{ord(letter_):04x}")
    return text.encode("utf-8", errors="replace").decode("utf-8")  # half a pair is no text


def _figure(number: int, chart: Chart) -> Markup:
    caption = tag(
        "figcaption", chart.title, tag("span", chart.unit, class_="unit") if chart.unit else "", tag("span", class_="where")
    )
    over = [tag("div", class_=name, hidden="") for name in ("brush", "rule")]
    plot = tag("div", tag("div", class_="drawing"), *over, tag("div", class_="spots"), class_="plot")
    return tag("figure", caption, plot, tag("div", class_="legend"), data_chart=number)


def _digests(texts: Sequence[str]) -> str:
    found = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in found) or "'none'"


def _asset(name: str) -> str:
    return resources.files("ttrain.reports").joinpath(name).read_text(encoding="utf-8").strip()
