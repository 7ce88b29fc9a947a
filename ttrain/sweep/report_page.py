"""A sweep as one page: what each setting does to the metric, how the sweep went on, the curves of its trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from ttrain.core.text import format_duration, is_number
from ttrain.reports import html
from ttrain.reports.charts import Chart, Line
from ttrain.reports.drawings import Scatter
from ttrain.reports.sections import Cell
from ttrain.store.run_views import Point
from ttrain.sweep import summary
from ttrain.sweep.records import Sweep
from ttrain.sweep.space import Dimension, IntegerRange, Interval, ValueList, format_value
from ttrain.sweep.study import COMPLETED, Trial, best_of

CURVES = 16  # of trials on one chart, the best of them


def render(sweep: Sweep, trials: Sequence[Trial]) -> str:
    """The page as HTML."""
    measure, space = sweep.measure, sweep.space
    best = best_of(trials, maximize=measure.maximize)
    curves = [trial for trial in summary.ranked(trials, maximize=measure.maximize) if len(trial.curve) > 1][:CURVES]
    page = html.Page(sweep.name, runs=[f"trial {trial.number}" for trial in curves])
    done = [trial for trial in trials if trial.outcome == COMPLETED and trial.value is not None]
    plots = [
        Scatter(
            key,
            [(_position(dimension, t.values[key]), t.value or 0.0, _tooltip(t, key), t == best) for t in done],
            log=_is_log(dimension),
        )
        for key, dimension in space.dimensions.items()
    ]
    if len(done) > 1:
        values = [trial.value or 0.0 for trial in done]
        standing = list(accumulate(values, max if measure.maximize else min))
        dots = [(float(trial.number), trial.value or 0.0, _tooltip(trial, None), trial == best) for trial in done]
        line = [(float(trial.number), value) for trial, value in zip(done, standing, strict=True)]
        plots.append(Scatter("trial, and the best so far", dots, line=line, is_whole=True))
    if done:
        page.section(f"What each setting does to {measure.metric}", page.charts(plots))
    page.section("While the trials trained", page.charts(_curves(curves, measure.metric)))
    header, cells = summary.trial_table(trials, space, measure)
    numbers = [*range(2 + len(space.dimensions)), len(header) - 2]
    page.section("Trials", html.table(header, ([*row[:-1], Cell(row[-1], "short")] for row in cells), numbers))
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
        [*figures, (f"trials: {summary.counts(trials)}", len(trials)), ("of all trials", format_duration(took))]
    )
    return html.joined([title, varied, verdict, tiles])


def _curves(trials: Sequence[Trial], metric: str) -> list[Chart]:
    lines = [
        Line(
            f"trial {trial.number}",
            number,
            tuple(Point(tokens, float(tokens), 0.0, value) for tokens, value in sorted(trial.curve.items())),
        )
        for number, trial in enumerate(trials)
    ]
    return [Chart(metric, "by tokens", tuple(lines))] if lines else []


def _tooltip(trial: Trial, key: str | None) -> str:
    """The tooltip of a trial's dot."""
    values = ", ".join(f"{name}={format_value(value)}" for name, value in trial.values.items() if key is None or name == key)
    return f"trial {trial.number}: {summary.figure(trial)} with {values}"


def _position(dimension: Dimension, value: object) -> float | str:
    """The position of a value on its axis; a value of a list of words is a word."""
    if isinstance(dimension, ValueList) and not _is_number(dimension):
        return format_value(value)
    assert isinstance(value, int | float), "the values of intervals are numbers"
    return float(value)


def _is_number(dimension: ValueList) -> bool:
    return all(map(is_number, dimension.values))


def _is_log(dimension: Dimension) -> bool:
    """Whether its axis is logarithmic: where values were drawn so, or where the listed numbers span a factor of ten."""
    if isinstance(dimension, Interval | IntegerRange):
        return dimension.log
    if not _is_number(dimension) or min(dimension.values) <= 0:
        return False
    return bool(math.log10(max(dimension.values) / min(dimension.values)) >= 1)
