"""The page of a comparison: what differs, which is better, the curves over each other, the samples side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ttrain.core.terminal import escaped
from ttrain.core.text import format_duration, format_number, format_time
from ttrain.errors import UsageError
from ttrain.reports import charts, figures
from ttrain.reports.charts import Chart, Line
from ttrain.reports.compare import ComparedMetric, Difference, RunComparison, compare, labels
from ttrain.reports.html import Markup, Page, details, joined, letter, pill, table, tag
from ttrain.tracking import Point, RunView

TITLES = {"pretrain": "pretraining", "sft": "SFT", "lora": "LoRA"}


def page_of(views: Sequence[RunView], comparison: RunComparison | None = None) -> str:
    """The page as HTML."""
    comparison = comparison or compare(views)
    page = Page("compared: " + ", ".join(comparison.runs), runs=comparison.runs, compares=True)
    names = [letter(label, number) for number, label in enumerate(labels(len(views)))]
    page.section(
        "Settings that differ", _differences(comparison.settings, names, "All settings that shape a result are the same.")
    )
    page.section("Figures", _metrics(comparison, names))
    page.section("Curves", *_curves(page, views))
    page.section("Data", _differences(comparison.data, names, "The same files, the same rows."))
    page.section("Samples", *_samples(comparison, names))
    page.section(
        "Code and machine", _differences(comparison.code, names, "The same code and libraries on the same kind of machine.")
    )
    if comparison.settings_aside:
        page.section("Settings that shape no result", _differences(comparison.settings_aside, names, ""))
    return page.render(_head(comparison, views, names))


def _head(comparison: RunComparison, views: Sequence[RunView], names: Sequence[Markup]) -> Markup:
    rows = (
        (
            names[number],
            tag("td", view.name, class_="short mono"),
            pill(view.status),
            tag("td", format_time(view.started), class_="short"),
            tag("td", format_duration(view.seconds), class_="short"),
        )
        for number, view in enumerate(views)
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
    change = figures.change(figure.percent[number]) if number else ""
    value = format_number(figure.values[number], figure.name)
    small = tag("small", f" {change}") if change else ""
    return tag("td", value, small, class_="number best" if number == figure.best else "number")


def _differences(differences: Sequence[Difference], names: Sequence[Markup], empty_text: str) -> Markup:
    if not differences:
        return tag("p", empty_text, class_="faint") if empty_text else Markup()
    return table(("", *names), ((difference.name, *difference.values) for difference in differences))


def _curves(page: Page, views: Sequence[RunView]) -> Iterator[Markup]:
    parts: list[Markup] = []
    for stage in charts.TRAININGS:
        first, others = charts.comparison_charts(views, stage)
        if not first and not others:
            continue
        parts += [tag("h3", TITLES.get(stage, stage)), page.charts(first)]
        if others:
            parts.append(details(f"{len(others)} more charts", page.charts(others)))
    if parts:
        yield page.controls()
        yield from parts


def _samples(comparison: RunComparison, names: Sequence[Markup]) -> Iterator[Markup]:
    for model in dict.fromkeys(sample.model for sample in comparison.samples):
        yield tag("h3", f"{model} model")
        for sample in comparison.samples:
            if sample.model == model:
                yield tag("p", sample.prompt, class_="prompt")
                answers = (
                    tag("div", tag("h4", name), tag("pre", answer))
                    for name, answer in zip(names, sample.answers, strict=True)
                )
                yield tag("div", *answers, class_="answers")


LOSSES = ("loss", "validation_loss", "validation_loss_quick")  # of several runs over each other

SHOWN = ("loss", "perplexity", "learning rate")  # of one run, where no metric is asked for

WIDTH, HEIGHT = 430, 240  # of the plot of a panel, before it is enlarged

SCALE = 2.0  # pixels of the picture for each of these

INK, FAINT, GRID = "#16202c", "#5d6b7c", "#edf1f5"  # as on a light page

COLOURS = ("#2563eb", "#d9480f", "#0f8a5f", "#9333ea", "#b7791f", "#0891b2", "#db2777", "#4b5563")


def panels_of(views: Sequence[RunView], metrics: Sequence[str] = (), stages: Sequence[str] = ()) -> list[list[Chart]]:
    """The charts to draw, a list for each stage that has curves: of one run its losses, perplexities and learning rates, of
    several the losses over each other, or the named metrics. Raises UsageError that lists the curves there are."""
    curve_stages = list(dict.fromkeys(name for view in views for name in view.stages if view.curves(name)))
    if unknown := [stage for stage in stages if stage not in curve_stages]:
        raise UsageError(f"the stage {unknown[0]} has no curves; those that have are {', '.join(curve_stages) or 'none'}")
    rows, metric_names = [], set[str]()
    for stage in stages or curve_stages:
        names = {name for view in views if stage in view.stages for name in view.curves(stage)}
        metric_names |= names
        if metrics:
            drawn = [_over(views, stage, metric) for metric in metrics if metric in names]
        elif len(views) == 1:
            drawn = [chart for group in charts.charts_of(views[0], stage) for chart in group if chart.title in SHOWN]
            drawn.sort(key=lambda chart: SHOWN.index(chart.title))
        else:
            drawn = [_over(views, stage, metric) for metric in LOSSES if metric in names]
            drawn = [chart for chart in drawn if any(len(line.points) > 1 for line in chart.lines)]
        if drawn:
            rows.append([Chart(f"{TITLES.get(stage, stage)}: {chart.title}", chart.unit, chart.lines) for chart in drawn])
    if not rows:
        problem = f"no stage has a curve {' or '.join(metrics)}" if metrics else "there is no curve to draw"
        raise UsageError(
            f"{problem}; the curves are {', '.join(sorted(metric_names)) or 'none: no stage of the run trains'}"
        )
    return rows


def _over(views: Sequence[RunView], stage: str, metric: str) -> Chart:
    """A metric of a stage, a line a run."""
    lines = []
    for number, (label, view) in enumerate(zip(labels(len(views)), views, strict=True)):
        if points := view.curve(stage, metric):
            lines.append(Line(f"{label}  {view.name}" if len(views) > 1 else metric, number, tuple(points)))
    return Chart(metric, charts.unit_of(metric), tuple(lines))


def draw(rows: Sequence[Sequence[Chart]], *, axis: str = "tokens", log: bool = False, title: str = "") -> dict[str, Any]:
    """The picture as a Vega-Lite specification. A loss that is not finite leaves a gap; where a curve lacks the axis, steps
    are used. Texts are escaped: a character that XML does not allow ends the process that draws."""
    look = charts.config(FAINT, GRID, list(COLOURS))
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
    spec = charts.chart(shown, log=log)
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
        is_drawable = math.isfinite(point.value) and not (log and point.value <= 0)
        yield {
            "x": _x(point, axis, points[0].time),
            "y": point.value if is_drawable else None,
            "line": number,
            "label": escaped(line.label),
            "faint": False,
            "dot": len(points) < charts.MARKED,
        }


def save(picture: Mapping[str, Any], path: Path) -> None:
    """Write the picture as PNG, whatever suffix the path has."""
    import vl_convert

    path.write_bytes(vl_convert.vegalite_to_png(dict(picture), scale=SCALE))


def _x(point: Point, axis: str, began: float) -> float | None:
    """The x value of a point; a time is in milliseconds since `began`."""
    return 1000 * (point.time - began) if axis == "time" else point.tokens if axis == "tokens" else float(point.step)
