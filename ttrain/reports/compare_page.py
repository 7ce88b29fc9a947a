"""The page of a comparison: what differs, which is better, the curves over each other, the samples side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ttrain.config.training import TRAININGS
from ttrain.reports import charts
from ttrain.reports.compare import ComparedMetric, Difference, RunComparison, compare, labels, run_rows
from ttrain.reports.html import Markup, Page, answers, joined, letter, pill, table, tag
from ttrain.tracking import RunView


def page_of(
    views: Sequence[RunView], comparison: RunComparison | None = None, *, axis: str = "tokens", log: bool = False
) -> str:
    """The page as HTML."""
    comparison = comparison or compare(views)
    page = Page("compared: " + ", ".join(comparison.runs), runs=comparison.runs, axis=axis, log=log)
    names = [letter(label, number) for number, label in enumerate(labels(len(views)))]
    page.section(
        "Settings that differ", _differences(comparison.settings, names, "All settings that shape a result are the same.")
    )
    page.section("Figures", _metrics(comparison, names))
    page.section("Curves", page.curves({stage: charts.comparison_charts(views, stage) for stage in TRAININGS}))
    page.section("Data", _differences(comparison.data, names, "The same files, the same rows."))
    page.section("Samples", *_samples(comparison, names))
    page.section(
        "Code and machine", _differences(comparison.code, names, "The same code and libraries on the same kind of machine.")
    )
    if comparison.settings_aside:
        page.section("Settings that shape no result", _differences(comparison.settings_aside, names, ""))
    return page.render(_head(comparison, views))


def _head(comparison: RunComparison, views: Sequence[RunView]) -> Markup:
    rows = (
        (
            letter(label, number),
            tag("td", name, class_="short mono"),
            pill(status),
            *(tag("td", text, class_="short") for text in when),
        )
        for number, (label, name, status, *when) in enumerate(run_rows(views))
    )
    remarks = [tag("p", remark, class_="remark") for remark in comparison.remarks]
    remarks += [tag("p", note, class_="note") for note in comparison.notes]
    runs = table(("", "run", "outcome", "began", "took"), rows)
    return joined([tag("h1", f"{len(views)} runs compared"), tag("p", comparison.verdict, class_="verdict"), *remarks, runs])


def _metrics(comparison: RunComparison, names: Sequence[Markup]) -> Markup:
    rows = [(figure.name, *(_cell(figure, number) for number in range(len(names)))) for figure in comparison.metrics]
    if not rows:
        return tag("p", "All figures are the same.")
    same = (
        tag("p", f"The same in all: {', '.join(comparison.same_metrics)}.", class_="faint")
        if comparison.same_metrics
        else ""
    )
    return joined([table(("", *names), rows, numbers=range(1, len(names) + 1)), same])


def _cell(figure: ComparedMetric, number: int) -> Markup:
    """A metric's value, its change against the first run, and whether it is the best."""
    value, change = figure.texts(number)
    small = tag("small", f" {change}") if change else ""
    return tag("td", value, small, class_="number best" if number == figure.best else "number")


def _differences(differences: Sequence[Difference], names: Sequence[Markup], empty_text: str) -> Markup:
    if not differences:
        return tag("p", empty_text, class_="faint") if empty_text else Markup()
    return table(("", *names), ((difference.name, *difference.values) for difference in differences))


def _samples(comparison: RunComparison, names: Sequence[Markup]) -> Iterator[Markup]:
    for model in dict.fromkeys(sample.model for sample in comparison.samples):
        yield tag("h3", f"{model} model")
        for sample in comparison.samples:
            if sample.model == model:
                yield tag("p", sample.prompt, class_="prompt")
                yield answers(zip(names, sample.answers, strict=True))
