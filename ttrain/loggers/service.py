"""The part that runs of Weights & Biases and SwanLab share: their id, their files, the arguments that start them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ttrain.loggers.process import LoggerState


class ServiceRun(ABC):
    """The run that a training had before, or a new one, with its files in `service` of the training's directory.

    It is offline where the service cannot be reached or has no key. `project_variable`: the environment variable of the
    project, which counts more than the task's.
    """

    def __init__(self, service: str, task: Mapping[str, Any], project_variable: str) -> None:
        directory = Path(task["directory"])
        self._directory = directory / service
        self._directory.mkdir(parents=True, exist_ok=True)
        self._state = LoggerState(directory / "loggers" / f"{service}.json")
        self.steps = self._state.steps
        self._init_arguments = {
            "project": os.environ.get(project_variable, task["project"]),
            "group": task["group"],
            "job_type": task["kind"],
            "name": task["name"],
            "config": task["config"],
            "id": self._state.id,
            "resume": "allow",
        }
        try:
            self._run = self._open(os.environ.get(f"{service.upper()}_MODE"))
        except Exception as error:  # SwanLab has no error of its own for a missing key
            print(f"{service}: {error}; the run is kept offline, in run/{service} of what the stage leaves", flush=True)
            self._run = self._open("offline")

    @abstractmethod
    def _open(self, mode: str | None) -> Any:
        """The service's run, begun with `_init_arguments`; its own default where `mode` is None."""

    def log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        self._run.log(dict(values), step=step)

    def flush(self) -> None:
        self._state.write()
