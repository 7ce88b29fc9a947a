"""Curves of runs as charts: which belong together on a page. Views in, plain values out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ttrain.config.training import TRAINING_STAGES
from ttrain.reports import facts
from ttrain.reports.compare import labels
from ttrain.reports.facts import QUICK
from ttrain.store.run_views import Point, RunView

TITLES = {name: row.label for name, row in TRAINING_STAGES.items()}


MAX_RUNS_WITH_ALL_CURVES = 8  # up to so many runs all curves are drawn, above only the main ones

PER_TARGET = "nats per target"
LOSS_UNITS = {"pairs": "per pair or rated answer"}  # by kind of rows, where the loss is not PER_TARGET

# What a run's page shows at once: title, unit, the metrics of one chart, by pattern.
GROUPS = (
    ("loss", PER_TARGET, r"loss|validation_loss(_quick)?"),
    ("accuracy of the next token", "share of tokens", r"validation_accuracy(_quick)?"),
    ("chosen answer leads", "share of pairs", r"(validation_)?reward_accuracy"),
    ("lead of the chosen answer", "reward", r"(validation_)?reward_margin"),
    ("learning rate", "", r"lr(_.+)?"),
    ("gradient norm", "", r"grad_norm"),
    ("speed", "tokens per second", r"tokens_per_second"),
)

MORE_GROUPS = (
    ("parts of the loss", PER_TARGET, r"loss_.+|logits_loss|aux_loss"),
    ("perplexity", "", r"perplexity"),
    ("log-probability of answers", "nats", r"(validation_)?log_probability_(chosen|rejected)"),
    ("reward of answers", "", r"(validation_)?reward_(chosen|rejected)"),
    ("KL to the reference", "nats", r"(validation_)?kl_to_reference"),
    ("length of answers", "tokens", r"(validation_)?answer_tokens_(chosen|rejected)"),
    ("shares of the time", "", r"mfu|data_wait_fraction"),
    ("time of a step", "seconds", r"step_seconds|step_time"),
    ("memory", "bytes", r"memory_bytes"),
    ("use of the machine", "percent", r"system/(node_\d+/)?(cpu|gpu_\d+)_utilization_percentage"),
    ("memory of the machine", "percent", r"system/(node_\d+/)?(system|gpu_\d+)_memory_usage_percentage"),
    ("temperature", "°C", r"system/.*_temperature_celsius"),
)
# What a comparison shows at once, in this order.
COMPARISON_METRICS = ("validation_loss", "validation_loss_quick", "loss", "grad_norm", "tokens_per_second")

STRAIGHT_CURVES = re.compile(r"eta_seconds|tokens|epoch|epoch_time")  # curves that are straight lines


@dataclass(frozen=True)
class Line:
    """One line of a chart: `run` is the number of its run, which gives the colour where runs are compared."""

    label: str
    run: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Chart:
    """Lines on common axes."""

    title: str
    unit: str
    lines: tuple[Line, ...]


def charts_of(view: RunView, stage: str) -> tuple[list[Chart], list[Chart]]:
    """(main charts, other charts) of a stage of one run."""
    names = [name for name in view.curves(stage) if not STRAIGHT_CURVES.fullmatch(name)]
    first = list(_grouped(view, stage, names, GROUPS))
    others = list(_grouped(view, stage, names, MORE_GROUPS))
    drawn_names = {line.label.partition(" (")[0] for chart in (*first, *others) for line in chart.lines}
    drawn_names |= {f"{name}{QUICK}" for name in drawn_names}
    families: dict[str, list[str]] = {}
    for name in names:
        if name not in drawn_names:
            families.setdefault(_family(name), []).append(name)
    for family, members in families.items():
        others += _chart(view, stage, family, "", members)
    return first, others


def comparison_charts(views: Sequence[RunView], stage: str) -> tuple[list[Chart], list[Chart]]:
    """(main charts, other charts) that compare several runs in a stage: a chart per metric, a line per run."""
    names = sorted({name for view in views for name in view.curves(stage) if not STRAIGHT_CURVES.fullmatch(name)})
    others = [name for name in names if name not in COMPARISON_METRICS and len(views) <= MAX_RUNS_WITH_ALL_CURVES]
    shown = [*(name for name in COMPARISON_METRICS if name in names), *others]
    drawn = [chart for name in shown if _is_line(chart := _over(views, stage, name, labels(len(views))))]
    main = [chart for chart in drawn if chart.title in COMPARISON_METRICS]
    return main, drawn[len(main) :]


def _over(views: Sequence[RunView], stage: str, metric: str, names: Sequence[str]) -> Chart:
    """A metric of a stage, a line of this name for each run that has it."""
    curves = [_curve(view, stage, metric)[1] for view in views]
    lines = [Line(names[number], number, tuple(points)) for number, points in enumerate(curves) if points]
    return Chart(metric, unit_of(metric), tuple(lines))


def _is_line(chart: Chart) -> bool:
    """Whether any line has more than one point: single values are in tables."""
    return any(len(line.points) > 1 for line in chart.lines)


def _grouped(view: RunView, stage: str, names: Sequence[str], groups: Iterable[tuple[str, str, str]]) -> Iterator[Chart]:
    row = TRAINING_STAGES.get(stage)
    for title, usual_unit, pattern in groups:
        unit = LOSS_UNITS.get(row.rows, usual_unit) if row and usual_unit == PER_TARGET else usual_unit
        metrics = [name for name in names if re.fullmatch(pattern, name)]
        if len(metrics) > 1:  # "lr" is the rate of the first optimizer, which is there under its own name too
            metrics = [name for name in metrics if name != "lr"]
        yield from _chart(view, stage, title, unit, metrics)


def _chart(view: RunView, stage: str, title: str, unit: str, metrics: Sequence[str]) -> Iterator[Chart]:
    """The chart of some metrics of one run, where there is a line to draw."""
    curves = [_curve(view, stage, metric) for metric in metrics]
    chart = Chart(title, unit, tuple(Line(label, 0, tuple(points)) for label, points in curves if points))
    if _is_line(chart):
        yield chart


def _curve(view: RunView, stage: str, metric: str) -> tuple[str, list[Point]]:
    """(label, points) of a metric. A validation at the end alone is one curve with the quick ones before it, which are of a
    few rows: they are moved to end where it does, and are no curve of their own."""
    name = metric.removesuffix(QUICK)
    if f"{name}{QUICK}" not in view.curves(stage):
        return metric, view.curve(stage, metric)
    whole, quick = view.curve(stage, name), view.curve(stage, f"{name}{QUICK}")
    offset = facts.quick_offset([point.value for point in quick], whole[-1].value) if len(whole) == 1 else None
    if offset is None:
        return (f"{metric} (a few rows)", quick) if metric != name else (metric, whole)
    if metric != name:
        return metric, []
    moved = [point._replace(value=point.value + offset) for point in quick[:-1]]
    return f"{name} (until the end a few rows, moved by {offset:+.3f})", [*moved, whole[0]]


def _family(name: str) -> str:
    """The name without numbers, which shares a chart: "system/cpu" of "system/cpu_3", "moe_load" of "moe_load_0"."""
    return re.sub(r"[_/.]?\d+(?=$|[_/.])", "", name) or name


def unit_of(name: str) -> str:
    """The unit of a metric's axis; "" where its name says it."""
    return next((unit for _, unit, pattern in (*GROUPS, *MORE_GROUPS) if unit and re.fullmatch(pattern, name)), "")
