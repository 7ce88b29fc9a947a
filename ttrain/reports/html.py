"""A self-contained HTML page: its style, drawings and script are inside, and it cannot reach a network.

Everything that comes from a run is text: escaped in HTML, JSON without "<" in the data, and the policy in the page lets no
script run but the one that is named by its digest.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from ttrain.core.machine import VERSION
from ttrain.core.terminal import escape_control_characters
from ttrain.reports import drawings
from ttrain.reports.charts import TITLES, Chart
from ttrain.reports.drawings import COLOURS
from ttrain.reports.sections import Answers, Block, Cell, Code, Fold, Heading, Table

TILES = 7  # per row at most; .of4 ... of page.css

STATUS_COLOURS = {
    **dict.fromkeys(("completed", "equal", "promoted"), "good"),
    **dict.fromkeys(("failed", "crashed", "different", "refused"), "bad"),
}

LONG = 30  # characters above which a cell's text may break anywhere

MARKS = re.compile("<[^>]*>")

PLACE = re.compile(r"<!--drawing (\d+)-->")  # no text of a run has this form: its "<" is escaped


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape(value: object) -> Markup:
    """Escape a value for HTML; control characters, such as those that turn the direction of writing, are made visible."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(escape_control_characters(str(value))))


def tag(name: str, *inside: object, **attributes: object) -> Markup:
    """An element; `class_` is written for class."""
    attribute_text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items() if value is not None
    )
    return Markup(f"<{name}{attribute_text}>{joined(inside)}</{name}>")


def joined(parts: Iterable[object]) -> Markup:
    """Join the parts; those that are not Markup are escaped."""
    return Markup("".join(map(escape, parts)))


def table(header: Sequence[object], rows: Iterable[Sequence[object]], numbers: Sequence[int] = ()) -> Markup:
    """A table that scrolls by itself where the screen is narrow; the columns `numbers` are aligned to the right."""

    def cell(column: int, value: object) -> Markup:
        if isinstance(value, Cell):
            return tag("td", value.text, tag("small", f" {value.small}") if value.small else "", class_=value.style)
        shown = MARKS.sub("", value) if isinstance(value, Markup) else str(value)
        kind = "number" if column in numbers else "long" if len(shown) > LONG else None
        return tag("td", value, class_=kind)

    head = (tag("th", name, class_="number" if column in numbers else None) for column, name in enumerate(header))
    body = (tag("tr", *(cell(column, value) for column, value in enumerate(row))) for row in rows)
    return tag("div", tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body)), class_="scroll")


def letter(label: str, run: int) -> Markup:
    """The short name of a run in its colour."""
    return tag("span", label, class_=f"letter run{run % len(COLOURS)}")


def pill(status: str) -> Markup:
    """The status of a run or a stage, in the colour of a good or bad one."""
    colour = STATUS_COLOURS.get(status, "plain")
    return tag("span", status, class_=f"pill {colour}")


def tiles(figures: Iterable[tuple[str, object]]) -> Markup:
    """The main figures as tiles, (label, value); on a wide screen in rows of about equal length."""
    shown = [tag("div", tag("b", value), tag("span", label), class_="tile") for label, value in figures]
    rows = math.ceil(len(shown) / TILES)
    return tag("div", *shown, class_=f"tiles of{math.ceil(len(shown) / rows)}") if shown else Markup()


def rendered(block: Block | Markup) -> Markup:
    """A block of a section as HTML."""
    match block:
        case Markup():
            return block
        case Table(header, rows, numbers):
            return table(header, rows, numbers)
        case Heading(text):
            return tag("h3", text)
        case Code(text):
            return tag("pre", text)
        case Answers(texts):
            return tag("div", *(tag("div", tag("h4", title), tag("pre", text)) for title, text in texts), class_="answers")
        case Fold(title, inside):
            return tag("details", tag("summary", title), rendered(inside))
    return tag("p", block.text, class_=block.style)


@dataclass
class Page:
    """A page being built: its sections in order, and its charts, which are drawn together at the end."""

    title: str
    runs: Sequence[str]
    axis: str = "tokens"
    log: bool = False
    _sections: list[tuple[str, Markup]] = field(default_factory=list)
    _charts: list[Chart] = field(default_factory=list)

    def section(self, title: str, *blocks: Block | Markup) -> None:
        """A part of the page under a heading; left out where there is nothing in it."""
        content = joined(map(rendered, blocks))
        if content:
            self._sections.append((title, content))

    def charts(self, charts: Sequence[Chart]) -> Markup:
        """The charts side by side, each with a place for its drawing."""
        first = len(self._charts)
        self._charts += charts
        return tag("div", *map(self._figure, range(first, len(self._charts))), class_="charts") if charts else Markup()

    def _figure(self, number: int) -> Markup:
        chart = self._charts[number]
        drawing = Markup(f"<!--drawing {number}-->")
        unit = tag("span", chart.unit, class_="unit") if chart.unit else ""
        caption = tag("figcaption", chart.title, unit, tag("span", class_="where"))
        return tag("figure", caption, drawing, tag("div", *self._legend(chart), class_="legend"), data_chart=number)

    def _legend(self, chart: Chart) -> Iterable[Markup]:
        """The names of the lines, to be clicked, with their colours and last values."""
        for number, line in enumerate(chart.lines):
            last = next((point.value for point in reversed(line.points) if math.isfinite(point.value)), None)
            swatch = tag("i", class_=f"run{drawings.colour_of(chart, number)}")
            value = tag("b", "–" if last is None else f"{last:.5g}", class_="value")
            name = self.runs[line.run] if line.run < len(self.runs) else None
            yield tag("button", swatch, line.label, value, type="button", title=name, aria_pressed="true")

    def curves(self, charts_by_stage: Mapping[str, tuple[Sequence[Chart], Sequence[Chart]]]) -> Markup:
        """The curves of each stage, (main charts, folded charts), below what a reader can do with them."""
        parts: list[Markup] = []
        for stage, (main, others) in charts_by_stage.items():
            parts += [tag("h3", TITLES.get(stage, stage)), self.charts(main)] if main else []
            if others:
                title = f"{len(others)} more charts" if main else f"{stage}: {len(others)} charts"
                parts.append(tag("details", tag("summary", title), self.charts(others)))
        slider = Markup('<input type="range" id="smooth" min="0" max="0.98" step="0.02" value="0">')
        hint = tag("span", "point at a curve: values; click a name: hide", class_="faint")
        return joined([tag("div", tag("label", "smooth", slider), hint, class_="controls"), *parts]) if parts else Markup()

    def render(self, head: object) -> str:
        """The whole page; `head` stands above the sections. Raises TTrainError where the charts cannot be drawn."""
        style = _asset("page.css")
        scripts = [_asset("page.js")] if self._charts else []
        policy = (
            f"default-src 'none'; script-src {_digests(scripts)}; style-src {_digests([style])}; "
            f"base-uri 'none'; form-action 'none'"
        )
        headings = [tag("a", title, href=f"#s{number}") for number, (title, _) in enumerate(self._sections)]
        sections = (
            tag("section", tag("h2", title, id=f"s{number}"), content)
            for number, (title, content) in enumerate(self._sections)
        )
        svgs = drawings.page_drawings(self._charts, axis=self.axis, log=self.log)
        text = [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            f"<title>{escape(self.title)}</title>\n<style>{style}</style>\n</head>\n<body>\n",
            f"<header>{escape(head)}</header>\n{tag('nav', *headings)}\n",
            PLACE.sub(lambda match: svgs[int(match[1])], "\n".join(sections)),
            tag("footer", f"ttrain {VERSION}. This page is self-contained: it loads nothing, and can be sent as it is."),
            f'\n<script type="application/json" id="data">{script_json(self._points())}</script>\n' if scripts else "\n",
            *(f"<script>{script}</script>\n" for script in scripts),
            "</body>\n</html>\n",
        ]
        return "".join(text)

    def _points(self) -> list[dict[str, Any]]:
        """The points of each chart, for the values under the pointer."""
        return [
            {
                "axis": drawings.axis_of(chart, self.axis),
                "lines": [list(zip(*rows, strict=True)) for rows in drawings.rows_of(chart, self.axis, log=self.log)],
            }
            for chart in self._charts
        ]


def script_json(value: Any) -> str:
    """JSON that is safe in a script element: no "<" that could end it, no line end that a script would see."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", errors="replace").decode("utf-8")  # an unpaired surrogate has no UTF-8 form


def _digests(texts: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"


def _asset(name: str) -> str:
    return resources.files("ttrain.reports").joinpath(name).read_text(encoding="utf-8").strip()
