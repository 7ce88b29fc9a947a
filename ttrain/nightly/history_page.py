"""The last nights as one page: how the models went on, what each night learnt and lost, and the figures by text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ttrain.core.text import ABSENT, first_of, format_time
from ttrain.data import locations
from ttrain.nightly import history
from ttrain.nightly.history import NightHistory
from ttrain.reports import html
from ttrain.reports.drawings import Scatter
from ttrain.reports.sections import Cell, Table

NAMED_FILES = 3  # of a night
NAMED_TEXTS = 3  # that a night lost
SHORT_NAME = 28  # characters that fit into a line of the table


def render(name: str, nights: Sequence[NightHistory]) -> str:
    """The page as HTML; `nights` are the newest first."""
    page = html.Page(f"nights of {name}", runs=[])
    page.section("Challenger and champion", page.charts(_charts(nights)))
    page.section("What each night learnt and lost", _table(nights))
    page.section(
        "Figures on the held-out text of each night and source and by other metrics, with the change against the champion",
        *_texts(nights),
    )
    return page.render(_head(name, nights))


def _head(name: str, nights: Sequence[NightHistory]) -> html.Markup:
    newest = next((night for night in nights if night.figure is not None), None)
    champion = next((night for night in nights if night.outcome == "promoted"), None)
    figures: list[tuple[str, object]] = [("nights", len(nights))]
    if champion:
        figures.append((f"{champion.metric} of {champion.night}, promoted last", _figure(champion.figure)))
    if newest and newest is not champion:
        figures.append((f"{newest.metric} of the challenger of {newest.night}", _figure(newest.figure)))
    promoted = sum(night.outcome == "promoted" for night in nights)
    figures.append(("promoted", promoted))
    verdict = html.tag("p", history.summary_line(nights), class_="verdict")
    return html.joined([html.tag("h1", f"Nights of {name}"), verdict, html.tiles(figures)])


def _charts(nights: Sequence[NightHistory]) -> list[Scatter]:
    """A chart for each metric: challengers as dots, those that were promoted marked; the champion before as a line."""
    charts = []
    metrics = Counter(night.metric for night in nights if night.figure is not None)
    for metric, _ in metrics.most_common():
        decided = [night for night in reversed(nights) if night.metric == metric and night.figure is not None]
        dots: list[tuple[str | float, float, str, bool]] = [
            (
                _number(night),
                night.figure or 0.0,
                f"{night.night}: {night.outcome}, {night.reason}",
                night.outcome == "promoted",
            )
            for night in decided
        ]
        line = [(_number(night), night.champion_figure) for night in decided if night.champion_figure is not None]
        charts.append(Scatter(f"{metric}; large: promoted; line: champion before", dots, line=line, is_whole=True))
    return charts


def _number(night: NightHistory) -> float:
    return float(night.night.rpartition("-")[2] or 0)


def _table(nights: Sequence[NightHistory]) -> Table:
    header = ("night", "outcome", "learnt", "challenger", "lost", "why")
    rows = []
    for night in nights:
        version = f"version {night.version}" if night.version else ""
        rows.append((
            _stacked(night.night, format_time(night.began)),
            html.joined([html.pill(night.outcome), html.tag("div", html.tag("small", version))]),
            _learnt(night),
            _stacked(_figure(night.figure), _champion(night)),
            _lost(night),
            _reason(night),
        ))  # fmt: skip
    return Table(header, rows, numbers=(3,))


def _stacked(text: str, small: str) -> html.Markup:
    """A text with a small one below it: side by side they take the room of the reasons."""
    return html.tag("div", text, html.tag("div", html.tag("small", small)), class_="short")


def _learnt(night: NightHistory) -> html.Markup:
    """The files that a night read, and what was new in them."""
    names = first_of([locations.name(file) for file in night.files], NAMED_FILES)
    units = {
        "documents": "documents", "tokens": "tokens", "left_out": "rows left out", "replayed_tokens": "tokens replayed",
        "chats": "chats",
    }  # fmt: skip
    counts = [f"{night.learnt[figure]:,} {unit}" for figure, unit in units.items() if night.learnt.get(figure)]
    return html.joined([names or ABSENT, html.tag("div", html.tag("small", ", ".join(counts)))])


def _champion(night: NightHistory) -> str:
    return "" if night.champion_figure is None else f"champion {night.champion_figure:.4f}"


def _lost(night: NightHistory) -> html.Markup:
    """The names of texts, each on a line of its own: a name that is broken at its hyphen is hard to read."""
    names = night.lost[:NAMED_TEXTS] or history.lost_text(night).split("; ")
    more = [f"and {len(night.lost) - NAMED_TEXTS} more"] if len(night.lost) > NAMED_TEXTS else []
    lines = [html.tag("div", name, class_="short" if len(name) <= SHORT_NAME else "") for name in (*names, *more)]
    return html.tag("div", html.joined(lines), class_="lost" if night.lost else "")


def _reason(night: NightHistory) -> html.Markup:
    base = f" Base model: {night.base}." if night.base else ""
    return html.joined([night.reason or ABSENT, html.tag("small", base)])


def _texts(nights: Sequence[NightHistory]) -> list[Table]:
    """A row for each held-out text, a column for each night that was measured on it.

    The newest is the first: thirty nights are wider than a screen.
    """
    measured = [night for night in nights if night.texts]
    names = dict.fromkeys((text.kind, text.name) for night in measured for text in night.texts)
    rows = []
    for kind, name in sorted(names, key=lambda name: (name[0] == "metric", name[0])):  # metrics last
        cells: list[object] = [name]
        for night in measured:
            text = next((text for text in night.texts if (text.kind, text.name) == (kind, name)), None)
            change = "" if text is None or text.change is None else f"{text.change:+.1%}"
            style = "number lost" if text and text.lost else "number"
            cells.append(Cell(ABSENT, "number") if text is None else Cell(_figure(text.challenger), style, change))
        rows.append(cells)
    header = ("held-out text or metric", *(night.night for night in measured))
    return [Table(header, rows, range(1, len(header)))] if rows else []


def _figure(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.4f}"
