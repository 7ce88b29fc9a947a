"""A sweep as tables and JSON. Trials in, text out; pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ttrain.core.text import format_duration, truncated
from ttrain.experiments.measure import Measure
from ttrain.experiments.records import RUNNING, Sweep, Trial, best_of, ranked
from ttrain.experiments.space import Space, assignment, format_value

SHORT = 100  # characters of an error in a table


def trial_table(trials: Sequence[Trial], space: Space, measure: Measure) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(header, rows): the best trial first, with its settings, its metric, how it ended and its run."""
    header = ("trial", *space.dimensions, measure.metric, "outcome", "time", "run")
    done = ranked(trials, maximize=measure.maximize)
    rows = [
        (
            f"{trial.number}{' *' if trial in done[:1] else ''}",
            *(format_value(trial.values[key]) for key in space.dimensions),
            "" if trial.value is None else f"{trial.value:.4f}",
            outcome(trial),
            format_duration(trial.seconds),
            trial.run or "",
        )
        for trial in [*done, *(trial for trial in trials if trial not in done)]
    ]
    return header, rows


def outcome(trial: Trial) -> str:
    """How a trial ended, and why it failed."""
    if trial.outcome == RUNNING:
        return "to go on" if trial.run else "begun"
    short = truncated((trial.error or "").partition("\n")[0], SHORT)
    return f"{trial.outcome}: {short}" if short else trial.outcome


def verdict(trials: Sequence[Trial], measure: Measure) -> str:
    """One sentence: which trial is best, and how far the others are from it."""
    done = ranked(trials, maximize=measure.maximize)
    if not done:
        return "no trial has completed"
    best, worst = done[0], done[-1]
    settings = ", ".join(assignment(key, value) for key, value in best.values.items())
    spread = f"; the worst has {worst.value:.4f}" if len(done) > 1 else ""
    return f"trial {best.number} is best: {measure.metric} {best.value:.4f} with {settings}{spread}"


def command(sweep: Sweep, trial: Trial) -> str:
    """The command that runs the whole pipeline with a trial's settings; what the trial made comes from the store."""
    arguments = ["ttrain", "pipeline", "run", "full", *(sweep["arguments"] or [])]
    arguments += [assignment(key, value) for key, value in trial.values.items()]
    return " ".join(map(shlex.quote, arguments))


def sweep_json(sweep: Sweep) -> dict[str, Any]:
    """The object that `show --json` prints."""
    measure = sweep.measure
    best = best_of(sweep.trials, maximize=measure.maximize)
    return {
        "sweep": sweep.name,
        "outcome": sweep.outcome,
        "started": sweep["started"],
        "space": dict(sweep.space.texts),
        "metric": measure.metric,
        "direction": measure.direction,
        "sampler": sweep["request"]["sampler"],
        "best": asdict(best) if best else None,
        "command": command(sweep, best) if best else None,
        "trials": [asdict(trial) for trial in sweep.trials],
        "tracking": sweep["tracking"],
    }
