"""A sweep as tables and JSON. Trials in, text out; pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ttrain.core.text import format_duration, truncated
from ttrain.sweep.measure import Measure
from ttrain.sweep.records import Sweep
from ttrain.sweep.space import Space, assignment, format_value
from ttrain.sweep.study import RUNNING, Trial, best_of, completed

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
SHORT = 100  # characters of an error in a table


def ranked(trials: Sequence[Trial], *, maximize: bool) -> list[Trial]:
    """The completed trials, the best first; then the others in their order."""
    done = completed(trials, maximize=maximize)
    return [*done, *(trial for trial in trials if trial not in done)]


def trial_table(trials: Sequence[Trial], space: Space, measure: Measure) -> Table:
    """(header, rows): the best trial first, with its settings, its metric, how it ended and its run."""
    header = ("trial", *space.dimensions, measure.metric, "outcome", "time", "run")
    best = best_of(trials, maximize=measure.maximize)
    rows = [
        (
            f"{trial.number}{' *' if trial == best else ''}",
            *(format_value(trial.values[key]) for key in space.dimensions),
            figure(trial),
            outcome(trial),
            format_duration(trial.seconds),
            trial.run or "",
        )
        for trial in ranked(trials, maximize=measure.maximize)
    ]
    return header, rows


def figure(trial: Trial) -> str:
    """The metric of a trial; in brackets where the trial was stopped early."""
    if trial.value is not None:
        return f"{trial.value:.4f}"
    return f"({trial.last:.4f})" if trial.last is not None else ""


def outcome(trial: Trial) -> str:
    """How a trial ended, and why it failed."""
    if trial.outcome == RUNNING:
        return "to go on" if trial.run else "begun"
    first = (trial.error or "").partition("\n")[0]
    short = truncated(first, SHORT)
    return f"{trial.outcome}: {short}" if short else trial.outcome


def counts(trials: Sequence[Trial]) -> str:
    """How many trials ended how: "6 completed, 2 pruned"."""
    outcomes = Counter("unfinished" if trial.outcome == RUNNING else trial.outcome for trial in trials)
    return ", ".join(f"{count} {word}" for word, count in outcomes.items()) or "no trials yet"


def verdict(trials: Sequence[Trial], measure: Measure) -> str:
    """One sentence: which trial is best, and how far the others are from it."""
    done = completed(trials, maximize=measure.maximize)
    if not done:
        return "no trial has completed"
    best, worst = done[0], done[-1]
    settings = ", ".join(assignment(key, value) for key, value in best.values.items())
    spread = f"; the worst has {worst.value:.4f}" if len(done) > 1 else ""
    return f"trial {best.number} is best: {measure.metric} {best.value:.4f} with {settings}{spread}"


def command(sweep: Sweep, trial: Trial) -> str:
    """The command that runs the whole pipeline with a trial's settings; what the trial made comes from the store."""
    arguments = ["ttrain", "pipeline", "run", sweep["asked"]["pipeline"], *(sweep["words"] or [])]
    arguments += [assignment(key, value) for key, value in trial.values.items()]
    return " ".join(map(shlex.quote, arguments))


def sweep_json(sweep: Sweep, trials: Sequence[Trial]) -> dict[str, Any]:
    """The object that `show --json` prints."""
    measure = sweep.measure
    best = best_of(trials, maximize=measure.maximize)
    return {
        "sweep": sweep.name,
        "outcome": sweep.outcome,
        "started": sweep["started"],
        "pipeline": sweep["asked"]["pipeline"],
        "space": dict(sweep.space.texts),
        "metric": measure.metric,
        "direction": "maximize" if measure.maximize else "minimize",
        "sampler": sweep["asked"]["sampler"],
        "best": best.to_json() if best else None,
        "command": command(sweep, best) if best else None,
        "trials": [trial.to_json() for trial in trials],
        "page": str(sweep.page) if sweep.page.exists() else None,
        "tracking": sweep["tracking"],
    }
