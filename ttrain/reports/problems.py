"""What went wrong in a run: failures, retries, kills, skipped steps, gaps in a loss, rows that were left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ttrain.reports import facts
from ttrain.tracking import RunView

UNFINISHED = ("crashed", "failed", "interrupted")

STATUS_PHRASES: Mapping[str, str] = {"crashed": "was killed", "failed": "failed", "interrupted": "was stopped"}


@dataclass(frozen=True)
class Problem:
    """A problem: its stage ("" for the run), its description, and whether it is resolved."""

    stage: str
    description: str
    is_resolved: bool = True

    def __str__(self) -> str:
        return f"{self.stage}: {self.description}" if self.stage else self.description


def find_problems(view: RunView, earlier: Iterable[Mapping[str, Any]] = ()) -> list[Problem]:
    """All recorded problems of a run. `earlier`: records of other runs, some of which worked on the same stages."""
    problems = list(_of_run(view))
    for name, stage in view.stages.items():
        problems += (Problem(name, *problem) for problem in _of_attempts(view, name, earlier))
        error, done = stage.record.get("error"), stage.status not in UNFINISHED
        if error:
            outcome = "failed and was retried" if done else STATUS_PHRASES[stage.status]
            problems.append(Problem(name, f"{outcome}: {error}", done))
        elif not done:
            problems.append(Problem(name, STATUS_PHRASES[stage.status], is_resolved=False))
        if step := stage.record.get("resumed_from_step"):
            problems.append(Problem(name, f"resumed at step {step:,}"))
        problems += (Problem(name, *problem) for problem in _of_artifact(view.manifest(name)))
        problems += (Problem(name, description) for description in _gaps(view, name))
    return list(dict.fromkeys(problems))


def _of_run(view: RunView) -> Iterator[Problem]:
    if stopped := view.record.get("stopped"):
        yield Problem("", f"the run was stopped: {stopped}", is_resolved=False)
    error = view.record.get("error")
    if error and not any(stage.record.get("error") == error for stage in view.stages.values()):
        yield Problem("", str(error), is_resolved=False)
    if view.status == "crashed":
        yield Problem("", "the run's process was killed, or the machine went down", is_resolved=False)


def _of_attempts(view: RunView, stage: str, earlier: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, bool]]:
    """Earlier runs that began the same work and did not finish it."""
    key = view.stages[stage].key
    for run in earlier:
        if run["run"] == view.name or run["started_unix"] > view.started or not key:
            continue
        for stage_record in run["stages"]:
            if stage_record["name"] == stage and stage_record.get("key") == key and stage_record["outcome"] in UNFINISHED:
                yield f"the run {run['run']} began the same work and {STATUS_PHRASES[stage_record['outcome']]}", True


def _of_artifact(manifest: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    result = manifest.get("result", {})
    for source in manifest.get("continued") or ():
        key = str(source.get("key", source) if isinstance(source, dict) else source)
        yield f"continued the work of {key[:12]}, made by other code", True
    if skipped := result.get("skipped_steps"):
        yield f"{skipped:,} steps were skipped: their gradient was not finite", True
    for guard, count in (result.get("guard_warnings") or {}).items():
        yield f"the guard {guard.replace('_', ' ')} warned {count:,} times", False
    if result.get("stop_reason") not in (None, "completed"):
        yield f"training ended early: {result['stop_reason']}", True
    for role, tally in facts.row_tallies(result).items():
        if rejected := tally.get("rejected"):
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in rejected.items())
            of = f" of the {role} data" if role != "train" else ""
            yield f"{sum(rejected.values()):,} bad rows{of} were left out: {reasons}", True


def _gaps(view: RunView, stage: str) -> Iterator[str]:
    for metric in ("loss", "validation_loss"):
        steps = [point.step for point in view.curve(stage, metric) if not math.isfinite(point.value)]
        if steps:
            shown = ", ".join(f"{step:,}" for step in steps[:5]) + (", ..." if steps[5:] else "")
            yield f"the {metric.replace('_', ' ')} was not finite at step {shown}"
