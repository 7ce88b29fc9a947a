"""The page of a comparison: what differs, which is better, the curves over each other, the samples side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from ttrain.reports import charts, figures
from ttrain.reports.compare import Comparison, Difference, Figure, compare, labels
from ttrain.reports.html import Markup, Page, details, joined, letter, pill, table, tag
from ttrain.tracking import RunView

TITLES = {"pretrain": "pretraining", "sft": "SFT", "lora": "LoRA"}


def page_of(views: Sequence[RunView], found: Comparison | None = None) -> str:
    """The page as HTML."""
    found = found or compare(views)
    page = Page("compared: " + ", ".join(found.runs), runs=found.runs, compares=True)
    names = [letter(label, place) for place, label in enumerate(labels(len(views)))]
    page.section(
        "Settings that differ", _differences(found.settings, names, "All settings that shape a result are the same.")
    )
    page.section("Figures", _metrics(found, names))
    page.section("Curves", *_curves(page, views))
    page.section("Data", _differences(found.data, names, "The same files, the same rows."))
    page.section("Samples", *_samples(found, names))
    page.section(
        "Code and machine", _differences(found.code, names, "The same code and libraries on the same kind of machine.")
    )
    if found.settings_aside:
        page.section("Settings that shape no result", _differences(found.settings_aside, names, ""))
    return page.render(_head(found, views, names))


def _head(found: Comparison, views: Sequence[RunView], names: Sequence[Markup]) -> Markup:
    rows = (
        (
            names[place],
            tag("td", view.name, class_="short mono"),
            pill(view.status),
            tag("td", _date(view.started), class_="short"),
            tag("td", figures.duration(view.seconds), class_="short"),
        )
        for place, view in enumerate(views)
    )
    remarks = [tag("p", remark, class_="remark") for remark in found.remarks]
    remarks += [tag("p", note, class_="note") for note in found.notes]
    runs = table(("", "run", "outcome", "began", "took"), rows)
    return joined([tag("h1", f"{len(views)} runs compared"), tag("p", found.verdict, class_="verdict"), *remarks, runs])


def _metrics(found: Comparison, names: Sequence[Markup]) -> Markup:
    rows = [(figure.name, *(_cell(figure, place) for place in range(len(names)))) for figure in found.metrics]
    if not rows:
        return tag("p", "All figures are the same.")
    same = tag("p", f"The same in all: {', '.join(found.same_metrics)}.", class_="faint") if found.same_metrics else ""
    return joined([table(("", *names), rows, numbers=range(1, len(names) + 1)), same])


def _cell(figure: Figure, place: int) -> Markup:
    """The value, by how much it differs from the first run's, and whether it is the best."""
    change = figures.change(figure.percent[place]) if place else ""
    value = figures.number(figure.values[place], figure.name)
    small = tag("small", f" {change}") if change else ""
    return tag("td", value, small, class_="number best" if place == figure.best else "number")


def _differences(found: Sequence[Difference], names: Sequence[Markup], none: str) -> Markup:
    if not found:
        return tag("p", none, class_="faint") if none else Markup()
    return table(("", *names), ((one.name, *one.values) for one in found))


def _curves(page: Page, views: Sequence[RunView]) -> Iterator[Markup]:
    parts: list[Markup] = []
    for stage in charts.TRAININGS:
        first, more = charts.compared(views, stage)
        if not first and not more:
            continue
        parts += [tag("h3", TITLES.get(stage, stage)), page.charts(first)]
        if more:
            parts.append(details(f"{len(more)} more charts", page.charts(more)))
    if parts:
        yield page.controls()
        yield from parts


def _samples(found: Comparison, names: Sequence[Markup]) -> Iterator[Markup]:
    for model in dict.fromkeys(sample.model for sample in found.samples):
        yield tag("h3", f"{model} model")
        for sample in found.samples:
            if sample.model == model:
                yield tag("p", sample.prompt, class_="prompt")
                answers = (
                    tag("div", tag("h4", name), tag("pre", answer))
                    for name, answer in zip(names, sample.answers, strict=True)
                )
                yield tag("div", *answers, class_="answers")


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M")
