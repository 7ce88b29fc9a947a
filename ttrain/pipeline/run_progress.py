"""How far the stages of a run in progress are, from any process: read from the files that the stages write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ttrain.core.files import JsonDict, misfit, read_object
from ttrain.core.text import format_duration
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.runs import RecordedRun

FILE = "progress.json"  # in the work directory of a stage
NUMBER = int | float
TYPES = {**dict.fromkeys(("done", "total", "first", "seconds"), NUMBER), "unit": str}


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


def progress_of(home: Path, run: RecordedRun) -> list[StageProgress]:
    """The progress of the stages that are running, in the order of the run; stages that have told nothing are left out."""
    if run["outcome"] != "running":
        return []
    store, found = ArtifactStore(home), []
    for stage in run["stages"]:
        if stage["outcome"] == "running" and stage.get("key"):
            progress = read_object(store.work(stage["name"], stage["key"]) / FILE)
            if misfit(progress, TYPES) is None:
                found.append(_progress(stage["name"], progress))
    return found


def _progress(stage: str, progress: JsonDict) -> StageProgress:
    done, total, new = progress["done"], progress["total"], progress["done"] - progress["first"]
    rate = new / progress["seconds"] if new > 0 and progress["seconds"] > 0 else None
    percent = 100 * done / total if total else None
    left = (total - done) / rate if rate and total else None
    return StageProgress(stage, done, progress["unit"], percent, rate, left)
