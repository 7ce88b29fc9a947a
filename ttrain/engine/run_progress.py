"""How far the stages of a run in progress are, from any process: the newest progress among its events."""

from __future__ import annotations

from dataclasses import dataclass

from ttrain.core.files import JsonDict
from ttrain.core.text import format_duration
from ttrain.store.runs import RecordedRun


@dataclass(frozen=True)
class StageProgress:
    """`per_second`, in `unit`s, is since the stage began or continued; None before there is one, or without a total."""

    stage: str
    done: float
    unit: str
    percent: float | None = None
    per_second: float | None = None
    seconds_left: float | None = None

    def __str__(self) -> str:
        parts = [f"{self.done:,.0f} {self.unit}" if self.percent is None else f"{self.percent:.0f} %"]
        if self.per_second is not None:
            parts.append(f"{self.per_second:,.0f} {self.unit}/s")
        if self.seconds_left is not None:
            parts.append(f"{format_duration(self.seconds_left)} left")
        return ", ".join(parts)


def progress_of(run: RecordedRun) -> list[StageProgress]:
    """The progress of the stages that are running, in the order of the run; stages that have told nothing are left out."""
    if run["outcome"] != "running":
        return []
    at_work = (stage for stage in run["stages"] if stage["outcome"] == "running" and stage.get("progress"))
    return [_progress(stage["name"], stage["progress"]) for stage in at_work]


def _progress(stage: str, progress: JsonDict) -> StageProgress:
    done, total, new = progress["done"], progress["total"], progress["done"] - progress["first"]
    rate = new / progress["seconds"] if new > 0 and progress["seconds"] > 0 else None
    percent = 100 * done / total if total else None
    left = (total - done) / rate if rate and total else None
    return StageProgress(stage, done, progress["unit"], percent, rate, left)
