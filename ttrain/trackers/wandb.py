"""A run of Weights & Biases for a training; WANDB_MODE, WANDB_PROJECT and the like count as always.

Offline, its files are left under `run/wandb`, for `wandb sync`. One that continues goes on in the same run, by its id.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import wandb

from ttrain.trackers.following import Kept

CONNECT_SECONDS = 10.0  # then another ten until its service process lets go


def open_run(task: Mapping[str, Any]) -> Run:
    """The run that this training had before, or a new one; offline where the service cannot be reached."""
    return Run(task, Path(task["directory"]))


@final
class Run:
    """One run, in a directory of the training."""

    def __init__(self, task: Mapping[str, Any], directory: Path) -> None:
        self._directory = directory / "wandb"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._kept = Kept(directory / "loggers" / "wandb.json")
        self.steps = self._kept.steps
        try:
            self._run = self._open(task, os.environ.get("WANDB_MODE"))
        except wandb.Error as error:
            print(f"wandb: {error}; the run is kept offline, in run/wandb of what the stage leaves", flush=True)
            wandb.teardown()  # of the service process, which holds on to the id
            self._run = self._open(task, "offline")
        online = not self._run.offline
        last = self._run.starting_step - 1 if online and self._run.resumed else -1 if online else None
        self._kept.continued(Path(self._run.sync_dir), online=online, last=last)

    def _open(self, task: Mapping[str, Any], mode: Any) -> Any:
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", task["project"]),
            group=task["group"],
            job_type=task["kind"],
            name=task["name"],
            config=task["config"],
            id=self._kept.id,
            resume="allow",
            mode=mode,
            dir=str(self._directory.parent),
            settings=wandb.Settings(console="off", symlink=False, disable_git=True, init_timeout=CONNECT_SECONDS),
        )

    def log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        self._run.log(dict(values), step=step)

    def flush(self) -> None:
        self._kept.write()

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
        for path in self._directory.rglob("*"):
            if path.is_symlink():  # to a log in the cache directory; an artifact has files of its own only
                path.unlink()
