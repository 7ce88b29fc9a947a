"""What became of the last nights: what each learnt and lost, promoted or not and why, as rows of a table and as one page.

Reads the nights' own records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from ttrain.core.text import ABSENT, counted, first_of, format_time
from ttrain.data import locations
from ttrain.errors import UsageError
from ttrain.evaluate.few_records import not_judged
from ttrain.nightly.records import NightRecord, Nights
from ttrain.reports import html
from ttrain.reports.drawings import Scatter
from ttrain.reports.sections import Cell, Table, Text
from ttrain.stages import REPLAY, SHARDS_PRETRAIN
from ttrain.store.layout import Artifact, Artifacts

NIGHTS = 30  # that are shown
NAMED_FILES = 3  # of a night
NAMED_TEXTS = 3  # that a night lost
SHORT_NAME = 28  # characters that fit into a line of the table


def learnt_of(artifacts: Artifacts, chats: Artifact | None) -> dict[str, int]:
    """What a night learnt, for its record: new documents and their tokens, rows that were left out, the tokens that the
    training read, those of them that were learnt before, and the conversations in `chats`, shards that SFT learnt.
    Without those of documents where the base model stays."""
    shards, pretrain, replay = (artifacts.get(name) for name in (SHARDS_PRETRAIN.name, "pretrain", REPLAY.name))
    of_chats = {"chats": chats.result.get("train", {}).get("rows", 0)} if chats else {}
    if shards is None:
        return of_chats
    train, tally = shards.result.get("train", {}), shards.result.get("rows", {}).get("train", {})
    left_out = sum(sum(tally.get(kind, {}).values()) for kind in ("skipped", "rejected"))
    read, sample = (one.result if one else {} for one in (pretrain, replay))
    return {
        "documents": train.get("rows", 0),
        "tokens": train.get("tokens", 0),
        "left_out": left_out,
        "read_tokens": read.get("tokens", 0),
        "replayed_tokens": round(read.get("tokens", 0) * sample.get("share", 0.0)) if sample.get("records") else 0,
        **of_chats,
    }


@dataclass(frozen=True)
class TextHistory:
    """The figures on one held-out text in one night. `change` is the loss as a share of the champion's figure; below 0: a
    gain."""

    name: str
    kind: str
    records: int
    challenger: float | None
    champion: float | None
    change: float | None
    lost: bool

    @property
    def not_judged(self) -> str:
        """Why nothing is said of the change: the text has too few records. A loss that was found counts on few, too."""
        return "" if self.lost else not_judged(self.records)


@dataclass(frozen=True)
class NightHistory:
    """One night."""

    night: str
    began: float | None
    outcome: str
    reason: str
    files: tuple[str, ...]
    learnt: Mapping[str, int]
    champion: str | None
    version: str | None
    run: str | None
    metric: str
    figure: float | None
    champion_figure: float | None
    lost: tuple[str, ...] = ()
    texts: tuple[TextHistory, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """What `models history --json` prints for it."""
        return asdict(self)

    @property
    def worst(self) -> TextHistory | None:
        """The text on which the challenger is worse than the champion by most; None where it is on none."""
        worse = [text for text in self.texts if not text.not_judged and text.change is not None and text.change > 0]
        return max(worse, key=lambda text: text.change or 0.0, default=None)


def history(home: Path, name: str | None, most: int = NIGHTS) -> tuple[str, list[NightHistory]]:
    """(name of the pipeline, its last nights, the newest first). Raises UsageError where there is none, or no single one."""
    names = sorted(path.name for path in (home / "nightly").glob("*") if path.is_dir())
    if name is None and len(names) != 1:
        if not names:
            raise UsageError("there was no night yet; `ttrain pipeline run nightly` runs one")
        raise UsageError(f"there are nights of {', '.join(names)}; choose one with --name, for example --name {names[0]}")
    if name is not None and name not in names:
        raise UsageError(f"there was no night of {name} yet; there are nights of {', '.join(names) or 'no pipeline'}")
    chosen = name or names[0]
    return chosen, [of_record(night.as_it_is_now()) for night in islice(Nights(home, chosen).newest_first(), most)]


def of_record(night: NightRecord) -> NightHistory:
    """A night as its record tells it."""
    data, decision = night.data, night.data.get("decision") or {}
    frozen, tries = data["frozen"], data["tries"]
    files = (file["location"] for listed in frozen["files"].values() for file in listed)
    return NightHistory(
        night=night.name,
        began=tries[0]["began"],
        outcome=night.outcome,
        reason=data["reason"] or tries[-1].get("reason", ""),
        files=tuple(dict.fromkeys(files)),
        learnt=data.get("learnt", {}),
        champion=frozen["champion"] and frozen["champion"]["version"],
        version=data.get("version"),
        run=data.get("run") or tries[-1].get("run"),
        metric=decision.get("metric", ""),
        figure=decision.get("challenger"),
        champion_figure=decision.get("champion"),
        lost=tuple(decision.get("lost") or ()),
        texts=tuple(_text(text) for text in data.get("texts") or ()),
    )


def _text(text: Mapping[str, Any]) -> TextHistory:
    names = ("name", "kind", "records", "challenger", "champion", "lost")
    champion, difference = text["champion"], text["difference"]
    change = None if champion is None or difference is None else -difference / (abs(champion) or 1.0) + 0.0
    return TextHistory(**{name: text[name] for name in names}, change=change)


HEADER = (
    "night", "began", "outcome", "files", "new documents", "new tokens", "chats", "metric", "challenger", "champion", "lost",
    "why",
)  # fmt: skip


def row(night: NightHistory) -> tuple[str, ...]:
    """A night as a row of the table below HEADER."""
    learnt = night.learnt
    return (
        night.night,
        format_time(night.began),
        night.outcome + (f" as version {night.version}" if night.outcome == "promoted" else ""),
        f"{len(night.files):,}",
        *(f"{learnt[figure]:,}" if figure in learnt else ABSENT for figure in ("documents", "tokens", "chats")),
        night.metric or ABSENT,
        ABSENT if night.figure is None else f"{night.figure:.4f}",
        ABSENT if night.champion_figure is None else f"{night.champion_figure:.4f}",
        lost_text(night),
        night.reason,
    )


def lost_text(night: NightHistory) -> str:
    """What the night lost: the texts beyond the bound; where there is none, also the one that became worse by most."""
    if night.lost:
        return first_of(night.lost, 3)
    if not night.texts:
        return ABSENT
    most = max(night.texts, key=lambda text: text.records)
    if most.not_judged:
        return most.not_judged
    return "nothing" + (f"; worst: {night.worst.name} {night.worst.change:+.1%}" if night.worst else "")


def summary_line(nights: Sequence[NightHistory]) -> str:
    """How many nights came to what, and what the champion learnt in them."""
    promoted = [night for night in nights if night.outcome == "promoted"]
    documents, tokens = (sum(night.learnt.get(figure, 0) for night in promoted) for figure in ("documents", "tokens"))
    kinds = {outcome: sum(night.outcome == outcome for night in nights) for outcome in [n.outcome for n in nights]}
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in kinds.items())
    return f"{counted(len(nights), 'night')}: {outcomes}; promoted models learnt {documents:,} documents, {tokens:,} tokens"


# --- the page -----------------------------------------------------------------------------------------------------------


def render(name: str, nights: Sequence[NightHistory]) -> str:
    """The page as HTML; `nights` are the newest first."""
    page = html.Page(f"nights of {name}", runs=[])
    page.section("Challenger and champion", page.charts(_charts(nights)))
    page.section("What each night learnt and lost", _table(nights))
    page.section(
        "Figures by held-out text and metric", Text("In small: the change against the champion.", "faint"), *_texts(nights)
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
    verdict = html.tag("p", summary_line(nights), class_="verdict")
    return html.joined([html.tag("h1", f"Nights of {name}"), verdict, html.tiles(figures)])


def _charts(nights: Sequence[NightHistory]) -> list[Scatter]:
    """A chart for each metric: challengers as dots, those that were promoted marked; the champion before as a line."""
    charts = []
    metrics = Counter(night.metric for night in nights if night.figure is not None)
    for metric, _ in metrics.most_common():
        decided = [night for night in reversed(nights) if night.metric == metric and night.figure is not None]
        dots: list[tuple[str | float, float, str, bool]] = []
        for night in decided:
            about = f"{night.night}: {night.outcome}, {night.reason}"
            dots.append((_number(night), night.figure or 0.0, about, night.outcome == "promoted"))
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
        champion = "" if night.champion_figure is None else f"champion {night.champion_figure:.4f}"
        rows.append((
            _stacked(night.night, format_time(night.began)),
            html.joined([html.pill(night.outcome), html.tag("div", html.tag("small", version))]),
            _learnt(night),
            _stacked(_figure(night.figure), champion),
            _lost(night),
            night.reason or ABSENT,
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


def _lost(night: NightHistory) -> html.Markup:
    """The names of texts, each on a line of its own: a name that is broken at its hyphen is hard to read."""
    names = night.lost[:NAMED_TEXTS] or lost_text(night).split("; ")
    more = [f"and {len(night.lost) - NAMED_TEXTS} more"] if len(night.lost) > NAMED_TEXTS else []
    lines = [html.tag("div", name, class_="short" if len(name) <= SHORT_NAME else "") for name in (*names, *more)]
    return html.tag("div", html.joined(lines), class_="lost" if night.lost else "")


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
            change = "" if text is None or text.change is None else text.not_judged or f"{text.change:+.1%}"
            style = "number lost" if text and text.lost else "number"
            cells.append(Cell(ABSENT, "number") if text is None else Cell(_figure(text.challenger), style, change))
        rows.append(cells)
    header = ("held-out text or metric", *(night.night for night in measured))
    return [Table(header, rows, range(1, len(header)))] if rows else []


def _figure(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.4f}"
