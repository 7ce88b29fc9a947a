"""The part that runs of Weights & Biases and SwanLab share: their id, their files, the arguments that start them."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ttrain.core.files import JsonObject, parse_json, write_json

ID_BYTES = 10  # 20 letters, which all services take


class LoggerState:
    """The state of a logger, kept for the next attempt of the same training: the id of its run, the steps that it reached,
    and whether its service has seen the run.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.id, self.steps, self.online = secrets.token_hex(ID_BYTES), dict[str, int](), False
        with contextlib.suppress(OSError, ValueError, KeyError):
            state = parse_json(path.read_text(encoding="utf-8"))
            self.id, self.online = str(state["id"]), bool(state["online"])
            self.steps = {name: int(step) for name, step in state["steps"].items()}
        self.write()

    def continued(self, present: Path, *, online: bool, last: int | None = None) -> None:
        """Continue the run, with its files in the directory `present`; `last` is the step that its service has, if known.

        A run that is only in files is written again: those of a killed attempt lack what was not yet on the disk, though
        the steps say otherwise. What the service has cannot be taken back, and only what is after it is sent.
        """
        if last is not None:
            self.steps.update({name: min(step, last) for name, step in self.steps.items()})
        elif not self.online:
            self.steps.clear()
            for path in present.parent.glob(f"*{self.id}"):
                if path != present:
                    shutil.rmtree(path, ignore_errors=True)
        self.online |= online
        self.write()

    def write(self) -> None:
        """Replace the file whole."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, {"id": self.id, "online": self.online, "steps": self.steps})


class ServiceRun(ABC):
    """The run that a training had before, or a new one, with its files in `service` of the training's directory.

    It is offline where the service cannot be reached or has no key. `project_variable`: the environment variable of the
    project, which counts more than the task's.
    """

    def __init__(self, service: str, task: JsonObject, project_variable: str) -> None:
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

    @abstractmethod
    def _shown(self, text: str) -> Any:
        """A text as the service shows it."""

    def log_text(self, name: str, text: str, step: int) -> None:
        self._run.log({name: self._shown(text)}, step=step)

    def flush(self) -> None:
        self._state.write()
