"""A self-contained HTML page: its style, scripts and data are inside, and it cannot reach a network.

Everything that comes from a run is text: escaped in HTML, JSON without "<" in the data, and the policy in the page lets no
script run but the two that are named by their digests, and none make another from text.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import logging
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ttrain import __version__
from ttrain.core.terminal import escape_control_characters
from ttrain.errors import TTrainError
from ttrain.reports import charts
from ttrain.reports.charts import Chart

TILES = 7  # per row at most; .of4 ... of page.css

LONG = 30  # characters above which a cell's text may break anywhere

MARKS = re.compile("<[^>]*>")


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
    """A table that scrolls by itself where the screen is narrow; the columns `numbers` are aligned to the right.

    A cell is a text, or the Markup of a whole <td>.
    """

    def cell(column: int, value: object) -> Markup:
        if isinstance(value, Markup) and value.startswith("<td"):
            return value
        shown = MARKS.sub("", value) if isinstance(value, Markup) else str(value)
        kind = "number" if column in numbers else "long" if len(shown) > LONG else None
        return tag("td", value, class_=kind)

    head = (tag("th", name, class_="number" if column in numbers else None) for column, name in enumerate(header))
    body = (tag("tr", *(cell(column, value) for column, value in enumerate(row))) for row in rows)
    return tag("div", tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body)), class_="scroll")


def letter(label: str, run: int) -> Markup:
    """The short name of a run in its colour."""
    return tag("span", label, class_=f"letter run{run % charts.COLOURS}")


def pill(status: str) -> Markup:
    """The status of a run or a stage, in the colour of a good or bad one."""
    colour = {"completed": "good", "equal": "good", "failed": "bad", "crashed": "bad", "different": "bad"}.get(
        status, "plain"
    )
    return tag("span", status, class_=f"pill {colour}")


def tiles(figures: Iterable[tuple[str, object]]) -> Markup:
    """The main figures as tiles, (label, value); on a wide screen in rows of about equal length."""
    shown = [tag("div", tag("b", value), tag("span", label), class_="tile") for label, value in figures]
    rows = math.ceil(len(shown) / TILES)
    return tag("div", *shown, class_=f"tiles of{math.ceil(len(shown) / rows)}") if shown else Markup()


def details(summary: object, *inside: object) -> Markup:
    """Content that is folded at first, under its summary."""
    return tag("details", tag("summary", summary), *inside)


class Page:
    """A page being built: its sections in order, and the charts that its script draws."""

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
        """Placeholders of the charts, side by side."""
        if not charts:
            return Markup()
        first = len(self._charts)
        self._charts += charts
        return tag("div", *(_figure(first + offset, chart) for offset, chart in enumerate(charts)), class_="charts")

    def controls(self) -> Markup:
        """The controls of all charts: axis, logarithmic scale, smoothing."""
        axes = (tag("label", Markup(f'<input type="radio" name="axis" value="{axis}">'), axis) for axis in charts.AXES)
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
        scripts = [script(), _asset("page.js")] if self._charts else []
        policy = (
            f"default-src 'none'; script-src {_digests(scripts)}; style-src {_digests([style])}; img-src data:; "
            f"base-uri 'none'; form-action 'none'"
        )
        headings = [tag("a", title, href=f"#s{number}") for number, (title, _) in enumerate(self._sections)]
        sections = (
            tag("section", tag("h2", title, id=f"s{number}"), content)
            for number, (title, content) in enumerate(self._sections)
        )
        text = [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            f"<title>{escape(self._title)}</title>\n<style>{style}</style>\n</head>\n<body>\n",
            f"<header>{escape(head)}</header>\n{tag('nav', *headings)}\n",
            "\n".join(sections),
            tag("footer", f"ttrain {__version__}. This page is self-contained: it loads nothing, and can be sent as it is."),
            f'\n<script type="application/json" id="data">{script_json(self._data())}</script>\n' if self._charts else "\n",
            *(f"<script>{script}</script>\n" for script in scripts),
            "</body>\n</html>\n",
        ]
        return "".join(text)

    def _data(self) -> dict[str, Any]:
        """The charts and their specifications for the page's script; no specification comes from a run."""
        names = [f"--run{number}" for number in range(charts.COLOURS)]
        return {
            "charts": [chart.to_json() for chart in self._charts],
            "runs": self._runs,
            "compares": self._compares,
            "axis": "tokens" if self._count_tokens() else "step",
            "specs": charts.charts(),
            "config": charts.config("--faint", "--grid", names),
            "rows": charts.DATA,
            "marked": charts.MARKED,
        }

    def _count_tokens(self) -> bool:
        return any(point.tokens is not None for chart in self._charts for line in chart.lines for point in line.points)


def script_json(value: Any) -> str:
    """JSON that is safe in a script element: no "<" that could end it, no line end that a script would see."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", errors="replace").decode("utf-8")  # an unpaired surrogate has no UTF-8 form


def _figure(number: int, chart: Chart) -> Markup:
    caption = tag(
        "figcaption", chart.title, tag("span", chart.unit, class_="unit") if chart.unit else "", tag("span", class_="where")
    )
    over = [tag("div", class_=name, hidden="") for name in ("brush", "rule")]
    plot = tag("div", tag("div", class_="drawing"), *over, tag("div", class_="spots"), class_="plot")
    return tag("figure", caption, plot, tag("div", class_="legend"), data_chart=number)


def _digests(texts: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"


def _asset(name: str) -> str:
    return resources.files("ttrain.reports").joinpath(name).read_text(encoding="utf-8").strip()


PACKAGE = "vl-convert-python"

LICENCES = "/* Vega, Vega-Lite, Vega-Embed: https://vega.github.io, BSD-3-Clause; D3: https://d3js.org, ISC */"

SNIPPET = "window.vegaEmbed=vegaEmbed;"  # the global that the script defines

BUNDLE = f"import sys, vl_convert; sys.stdout.buffer.write(vl_convert.javascript_bundle({SNIPPET!r}).encode())"

log = logging.getLogger(__name__)


def script() -> str:
    """The script's text: from the cache, else bundled and cached; where the cache cannot be written, only bundled."""
    path = cache_directory() / f"charts-{version(PACKAGE)}.js"
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        text = _bundle()
    try:
        _keep(path, text)
    except OSError as error:
        log.info("the library for charts could not be cached in %s: %s", path, error)
    return text


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/ttrain`, by default `~/.cache/ttrain` (https://specifications.freedesktop.org/basedir-spec/latest/)."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (root if root.is_absolute() else Path.home() / ".cache") / "ttrain"


def _bundle() -> str:
    """Bundle in a process of its own: the engine holds the interpreter's lock all the time, and never frees its memory."""
    process = subprocess.run([sys.executable, "-P", "-c", BUNDLE], capture_output=True, text=True, encoding="utf-8")
    package = f"{PACKAGE} {version(PACKAGE)}, which draws charts,"
    if process.returncode:
        error_lines = process.stderr.strip().splitlines() or [f"its process ended with {process.returncode}"]
        raise TTrainError(f"{package} does not work here: {error_lines[-1]}; `pip install --force-reinstall {PACKAGE}`")
    if "</script" in process.stdout.lower() or "<!--" in process.stdout:  # would end the script of a page
        raise TTrainError(f"{package} makes a script that a page cannot embed; `pip install {PACKAGE}==1.9.0.post1`")
    return f"{LICENCES}\n{process.stdout.strip()}"


def _keep(path: Path, text: str) -> None:
    """Write the file by one rename: a reader sees all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
