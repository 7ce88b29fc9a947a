"""A sweep as one page: what each setting does to the metric, how the sweep went on, the curves of its trials."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

from ttrain.reports import html
from ttrain.reports import summary as report
from ttrain.reports.charts import Chart, Line
from ttrain.sweep import summary
from ttrain.sweep.records import Sweep
from ttrain.sweep.scatter import Dot, scatter
from ttrain.sweep.space import Dimension, Interval, Listed, Whole, shown
from ttrain.sweep.study import COMPLETED, Trial, best_of
from ttrain.tracking import Point

CURVES = 16  # of trials on one chart, the best of them


def render(sweep: Sweep, trials: Sequence[Trial], importances: Mapping[str, float]) -> str:
    """The page as HTML."""
    measure, space = sweep.measure, sweep.space
    best = best_of(list(trials), maximize=measure.maximize)
    curves = [trial for trial in summary.ranked(trials, maximize=measure.maximize) if len(trial.curve) > 1][:CURVES]
    page = html.Page(sweep.name, runs=[f"trial {trial.number}" for trial in curves], compares=True)
    done = [trial for trial in trials if trial.outcome == COMPLETED and trial.value is not None]
    plots = [
        scatter(
            key,
            [Dot(_place(dimension, t.values[key]), t.value or 0.0, _told(t, key), t == best) for t in done],
            labels=_labels(dimension),
            log=_is_log(dimension),
        )
        for key, dimension in space.dimensions.items()
    ]
    if len(done) > 1:
        values = [trial.value or 0.0 for trial in done]
        standing = list(accumulate(values, max if measure.maximize else min))
        dots = [Dot(trial.number, trial.value or 0.0, _told(trial, None), trial == best) for trial in done]
        line = [(float(trial.number), value) for trial, value in zip(done, standing, strict=True)]
        plots.append(scatter("trial, and the best so far", dots, line=line, whole=True))
    if done:
        page.section(f"What each setting does to {measure.metric}", html.tag("div", *plots, class_="charts"))
    if importances:
        rows = [(name, f"{100 * share:.0f} %") for name, share in importances.items()]
        page.section("How much of the difference each setting explains", html.table(("setting", "share"), rows, numbers=[1]))
    page.section("While the trials trained", page.charts(_curves(curves, measure.metric)))
    header, cells = summary.trial_table(trials, space, measure)
    numbers = [*range(2 + len(space.dimensions)), len(header) - 2]
    page.section(
        "Trials", html.table(header, ([*row[:-1], html.tag("td", row[-1], class_="short")] for row in cells), numbers)
    )
    if best:
        page.section("The best one again", html.tag("pre", summary.command(sweep, best)))
    return page.render(_head(sweep, trials, best))


def _head(sweep: Sweep, trials: Sequence[Trial], best: Trial | None) -> html.Markup:
    measure = sweep.measure
    took = sum(trial.seconds or 0.0 for trial in trials)
    figures = [(measure.metric, summary.figure(best)), ("best trial", best.number)] if best else []
    title = html.tag("h1", sweep.name, " ", html.pill(sweep.outcome))
    varied = html.tag("p", ", ".join(f"{key}={text}" for key, text in sweep.space.texts.items()), class_="faint")
    verdict = html.tag("p", summary.verdict(trials, measure), class_="verdict")
    tiles = html.tiles(
        [*figures, (f"trials: {summary.counts(trials)}", len(trials)), ("of all trials", report.seconds(took))]
    )
    return html.joined([title, varied, verdict, tiles])


def _curves(trials: Sequence[Trial], metric: str) -> list[Chart]:
    lines = [
        Line(
            f"trial {trial.number}",
            place,
            tuple(Point(tokens, float(tokens), 0.0, value) for tokens, value in sorted(trial.curve.items())),
        )
        for place, trial in enumerate(trials)
    ]
    return [Chart(metric, "by tokens", tuple(lines))] if lines else []


def _told(trial: Trial, key: str | None) -> str:
    """What a dot says when it is pointed at."""
    values = ", ".join(f"{name}={shown(value)}" for name, value in trial.values.items() if key is None or name == key)
    return f"trial {trial.number}: {summary.figure(trial)} with {values}"


def _place(dimension: Dimension, value: object) -> float:
    """Where a value stands on its axis; one of a list by its place in the list."""
    if isinstance(dimension, Listed) and not _is_number(dimension):
        return float(dimension.values.index(value))
    assert isinstance(value, int | float), "the values of intervals are numbers"
    return float(value)


def _labels(dimension: Dimension) -> dict[float, str]:
    """Names of the places on the axis of a list; none where it is one of numbers."""
    if isinstance(dimension, Listed) and not _is_number(dimension):
        return {float(place): shown(value) for place, value in enumerate(dimension.values)}
    return {}


def _is_number(dimension: Listed) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in dimension.values)


def _is_log(dimension: Dimension) -> bool:
    """Whether its axis is logarithmic: where it was drawn so, or where the listed numbers span a factor of ten."""
    if isinstance(dimension, Interval | Whole):
        return dimension.log
    if not _is_number(dimension) or min(dimension.values) <= 0:
        return False
    return bool(math.log10(max(dimension.values) / min(dimension.values)) >= 1)
