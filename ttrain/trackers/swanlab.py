"""An experiment of SwanLab for a training; SWANLAB_MODE and the like count as always.

Offline, its files are left under `run/swanlab`, for `swanlab sync`. One that continues goes on in the same experiment, by
its id.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import swanlab

from ttrain.trackers.following import Kept


def open_run(task: Mapping[str, Any]) -> Run:
    """The experiment that this training had before, or a new one; offline where the service cannot be reached."""
    return Run(task, Path(task["directory"]))


@final
class Run:
    """One experiment, in a directory of the training."""

    def __init__(self, task: Mapping[str, Any], directory: Path) -> None:
        self._directory = directory / "swanlab"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._kept = Kept(directory / "loggers" / "swanlab.json")
        self.steps = self._kept.steps
        try:
            self._run = self._open(task, os.environ.get("SWANLAB_MODE"))
        except Exception as error:  # SwanLab has no error of its own for a missing key, and asks for one on a terminal
            print(f"swanlab: {error}; the run is kept offline, in run/swanlab of what the stage leaves", flush=True)
            self._run = self._open(task, "offline")
        self._kept.continued(Path(self._run.dir), online=self._run.mode == "online")

    def _open(self, task: Mapping[str, Any], mode: str | None) -> Any:
        return swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT", task["project"]),
            group=task["group"],
            job_type=task["kind"],
            name=task["name"],
            config=task["config"],
            id=self._kept.id,
            resume="allow",
            mode=mode,
            log_dir=str(self._directory),
            settings=swanlab.Settings(interactive=False),
        )

    def log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        self._run.log(dict(values), step=step)

    def flush(self) -> None:
        self._kept.write()

    def finish(self, *, failed: bool) -> None:
        if failed:
            swanlab.finish(state="crashed", error="the training failed or was killed")
        else:
            swanlab.finish()
