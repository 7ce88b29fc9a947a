"""Curves as a picture: PNG by matplotlib, which MLflow brings along."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrain.errors import UsageError
from ttrain.pages import charts, figures
from ttrain.pages.charts import Chart, Line
from ttrain.pages.compare import labels
from ttrain.pages.comparison import TITLES
from ttrain.tracking import Point, RunView

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AXES = ("tokens", "step", "time")
SHOWN = ("loss", "perplexity", "learning rate")  # of one run, where no metric is asked for
PANEL = (5.2, 3.2)  # inches
DOTS_PER_INCH = 130
MARKED = 40  # points up to which each is marked
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
            drawn = [_over(views, stage, metric) for metric in ("loss", "validation_loss") if metric in names]
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


def draw(rows: Sequence[Sequence[Chart]], *, axis: str = "tokens", log: bool = False, title: str = "") -> Figure:
    """The picture. A loss that is no number leaves a gap; an axis that a curve does not know gives way to that of steps."""
    from matplotlib.figure import Figure

    columns = max(map(len, rows))
    with _plain():
        figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * len(rows)), layout="constrained")
        for row, panels in enumerate(rows):
            for column, panel in enumerate(panels):
                _panel(figure.add_subplot(len(rows), columns, row * columns + column + 1), panel, axis, log)
        if title:
            figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return figure


def _panel(axes: Any, panel: Chart, axis: str, log: bool) -> None:
    compares = len({line.run for line in panel.lines}) > 1
    shown = axis if all(_x(point, axis, 0.0) is not None for line in panel.lines for point in line.points) else "step"
    for number, line in enumerate(panel.lines):
        began = line.points[0].time
        x = [_x(point, shown, began) for point in line.points]
        y = [point.value for point in line.points]
        colour = COLOURS[(line.run if compares else number) % len(COLOURS)]
        axes.plot(x, y, color=colour, linewidth=1.6, marker="." if len(x) <= MARKED else "", label=line.label)
    axes.set_title(panel.title, fontsize=10, fontweight="bold", loc="left")
    axes.set_xlabel({"time": "seconds"}.get(shown, shown))
    axes.set_ylabel(panel.unit)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if log:
        axes.set_yscale("log")
    if shown != "time":
        axes.xaxis.set_major_formatter(lambda value, _: figures.short(value))
    if len(panel.lines) > 1:
        axes.legend(fontsize=7 if compares else 8, frameon=False)


def save(figure: Figure, path: Path) -> None:
    """Write it as PNG, whatever the name ends in."""
    with _plain():
        figure.savefig(path, format="png", dpi=DOTS_PER_INCH)


def _plain() -> AbstractContextManager[None]:
    """Names are no mathematics, also with a "$" in them."""
    from matplotlib import rc_context

    return rc_context({"text.parse_math": False})


def _x(point: Point, axis: str, began: float) -> float | None:
    return point.time - began if axis == "time" else point.tokens if axis == "tokens" else float(point.step)
