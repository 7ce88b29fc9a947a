"""What did not go as planned in a run: failures, retries, kills, steps that were skipped, rows that were left out. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ttrain.tracking import RunView

UNFINISHED = ("crashed", "failed", "interrupted")
WORDS: Mapping[str, str] = {"crashed": "was killed", "failed": "failed", "interrupted": "was stopped"}


@dataclass(frozen=True)
class Trouble:
    """One thing: the stage that it happened in ("" for the run), what it was, and whether it is over and mended."""

    stage: str
    what: str
    mended: bool = True


def troubles(view: RunView, earlier: Iterable[Mapping[str, Any]] = ()) -> list[Trouble]:
    """All that is on record. `earlier` are the records of other runs, among them those that worked on the same stages."""
    found = list(_of_run(view))
    for name, stage in view.stages.items():
        found += (Trouble(name, *one) for one in _of_tries(view, name, earlier))
        error, done = stage.noted.get("error"), stage.status not in UNFINISHED
        if error:
            found.append(
                Trouble(name, f"failed and was tried again: {error}" if done else f"{WORDS[stage.status]}: {error}", done)
            )
        elif not done:
            found.append(Trouble(name, WORDS[stage.status], mended=False))
        if step := stage.noted.get("resumed_from_step"):
            found.append(Trouble(name, f"continued inside itself at step {step:,}"))
        found += (Trouble(name, what, mended) for what, mended in _of_artifact(view.manifest(name)))
        found += (Trouble(name, what) for what in _gaps(view, name))
    return list(dict.fromkeys(found))


def _of_run(view: RunView) -> Iterator[Trouble]:
    if stopped := view.noted.get("stopped"):
        yield Trouble("", f"the run was stopped: {stopped}", mended=False)
    error = view.noted.get("error")
    if error and not any(stage.noted.get("error") == error for stage in view.stages.values()):
        yield Trouble("", str(error), mended=False)
    if view.status == "crashed":
        yield Trouble("", "the run's process was killed, or the machine went down", mended=False)


def _of_tries(view: RunView, stage: str, earlier: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, bool]]:
    """Runs before this one that began the same work and did not end it."""
    key = view.stages[stage].key
    for run in earlier:
        if run["run"] == view.name or run["started_unix"] > view.started or not key:
            continue
        for one in run["stages"]:
            if one["name"] == stage and one.get("key") == key and one["outcome"] in UNFINISHED:
                yield f"the run {run['run']} began the same work and {WORDS[one['outcome']]}", True


def _of_artifact(manifest: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    result = manifest.get("result", {})
    for one in manifest.get("continued") or ():
        yield (
            f"took over the work of {str(one.get('key', one) if isinstance(one, dict) else one)[:12]}, made by other code",
            True,
        )
    if skipped := result.get("skipped_steps"):
        yield f"{skipped:,} steps were skipped: their gradient was no number", True
    for guard, count in (result.get("guard_warnings") or {}).items():
        yield f"the guard {guard.replace('_', ' ')} warned {count:,} times", False
    if result.get("stop_reason") not in (None, "completed"):
        yield f"training ended early: {result['stop_reason']}", True
    tallies = result.get("rows") or {}
    for role, tally in ({"": tallies} if "rejected" in tallies else tallies).items():
        if isinstance(tally, dict) and (rejected := tally.get("rejected")):
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in rejected.items())
            of = f" of the {role} data" if role not in ("", "train") else ""
            yield f"{sum(rejected.values()):,} bad rows{of} were put aside: {reasons}", True


def _gaps(view: RunView, stage: str) -> Iterator[str]:
    for metric in ("loss", "validation_loss"):
        steps = [point.step for point in view.curve(stage, metric) if not math.isfinite(point.value)]
        if steps:
            shown = ", ".join(f"{step:,}" for step in steps[:5]) + (", ..." if steps[5:] else "")
            yield f"the {metric.replace('_', ' ')} was no number at step {shown}"
