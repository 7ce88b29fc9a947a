"""The history of pipeline runs: one JSON file each, `runs/<run>.json`, readable while the run goes on and after a crash."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ttrain.store import read_json, write_json


class RunRecord:
    """The file of one run, rewritten at each change."""

    def __init__(self, home: Path, pipeline: str, stages: list[str], settings: Mapping[str, Any]) -> None:
        self.run = f"{pipeline}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        self.path = home / "runs" / f"{self.run}.json"
        self._lock = threading.Lock()
        self._data: dict[str, Any] = {
            "run": self.run,
            "pipeline": pipeline,
            "outcome": "running",
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "started_unix": time.time(),
            "seconds": None,
            "process": {"pid": os.getpid(), "started": process_started(os.getpid())},
            "stages": [{"name": name, "outcome": "pending"} for name in stages],
            "metrics": {},
            "settings": settings,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self._data)

    def stage(self, name: str, **values: Any) -> None:
        """Note something about a stage: outcome, seconds, key, path, log, metric, error."""
        with self._lock:
            entry = next(stage for stage in self._data["stages"] if stage["name"] == name)
            entry.update(values)
            write_json(self.path, self._data)

    def note(self, **values: Any) -> None:
        """Note something about the run."""
        with self._lock:
            self._data.update(values)
            write_json(self.path, self._data)

    def finish(self, outcome: str, metrics: Mapping[str, float]) -> None:
        """The end of the run."""
        self.note(outcome=outcome, seconds=round(time.time() - self._data["started_unix"], 2), metrics=dict(metrics))


def history(home: Path) -> list[dict[str, Any]]:
    """All runs, newest first; one that says it is running, but whose process is gone, has crashed."""
    runs = [run for path in (home / "runs").glob("*.json") if isinstance(run := read_json(path), dict)]
    for run in runs:
        if run["outcome"] == "running" and not is_alive(run["process"]):
            run["outcome"] = "crashed"
            for stage in run["stages"]:
                if stage["outcome"] == "running":
                    stage["outcome"] = "crashed"
    return sorted(runs, key=lambda run: run["started_unix"], reverse=True)


def settle(home: Path) -> list[dict[str, Any]]:
    """Write down which runs have crashed; returns those that were not yet known to have."""
    found = [run for run in history(home) if run["outcome"] == "crashed"]
    new = [run for run in found if not run.get("settled")]
    for run in new:
        write_json(home / "runs" / f"{run['run']}.json", {**run, "settled": True})
    return new


def equal_run(home: Path, keys: Mapping[str, str | None]) -> str | None:
    """The newest run whose stages left these very artifacts."""
    for run in history(home):
        if run["outcome"] == "completed" and {stage["name"]: stage.get("key") for stage in run["stages"]} == keys:
            return str(run["run"])
    return None


def record_cached(
    home: Path,
    pipeline: str,
    stages: Sequence[Any],
    settings: Mapping[str, Any],
    metrics: Mapping[str, float],
    equals: str | None,
) -> None:
    """Note a run that found everything cached; it is listed, but not tracked."""
    record = RunRecord(home, pipeline, [planned.stage.name for planned in stages], settings)
    record.note(
        equals=equals,
        stages=[
            {"name": planned.stage.name, "outcome": "cached", "key": planned.key, "path": str(planned.artifact.path)}
            for planned in stages
        ],
    )
    record.finish("cached", metrics)


def is_alive(process: Mapping[str, Any]) -> bool:
    """Whether this very process still runs; a recycled number does not count."""
    started = process_started(process["pid"])
    return started is not None and bool(started == process["started"])


def process_started(pid: int) -> float | None:
    """When the process began: on Linux in ticks since the machine did, which no change of the clock moves, elsewhere in
    seconds since the epoch; None where there is no such process."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state == "Z" else float(fields[18])  # a zombie has ended
    import psutil

    try:
        return round(float(psutil.Process(pid).create_time()), 1)
    except psutil.Error:
        return None
