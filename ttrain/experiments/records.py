"""Sweeps on disk: `sweeps/<sweep>/sweep.json` under the home has the request and the trials."""

from __future__ import annotations

import contextlib
import platform
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ttrain.core.files import exclusive, read_object, write_json
from ttrain.errors import UsageError
from ttrain.experiments.measure import Measure
from ttrain.experiments.space import Space, Values, parse
from ttrain.store import name_syntax, runs

DIRECTORY, FILE = "sweeps", "sweep.json"
BEGIN = "begin with `ttrain sweep full 'pretrain.optim.lr=log(1e-4,3e-3)'`"
COMPLETED, DIVERGED, FAILED, RUNNING = "completed", "diverged", "failed", "running"


@dataclass(frozen=True)
class Trial:
    """One choice of settings, and its outcome."""

    number: int  # from 1
    values: Values
    outcome: str = RUNNING  # also of one that was interrupted, and will continue
    value: float | None = None
    seconds: float | None = None
    run: str | None = None  # its newest pipeline run
    error: str | None = None


class Sweep:
    """One sweep's record. The request does not change; trials and progress are noted beside it, also by threads."""

    def __init__(self, path: Path, data: dict[str, Any]) -> None:
        self.path, self._data = path, data
        self.name: str = data["sweep"]
        self._noting = threading.RLock()

    def __getitem__(self, name: str) -> Any:
        return self._data.get(name)

    @property
    def trials(self) -> list[Trial]:
        """All trials, by their numbers."""
        return [Trial(**entry) for entry in self._data["trials"]]

    @property
    def space(self) -> Space:
        """The settings that vary."""
        texts: Mapping[str, str] = self._data["request"]["space"]
        return Space({key: parse(key, text) for key, text in texts.items()}, texts)

    @property
    def measure(self) -> Measure:
        """The metric by which its trials are compared."""
        return Measure(**self._data["request"]["measure"])

    @property
    def outcome(self) -> str:
        """running, completed, interrupted or failed; crashed where it is recorded as running, but its process is gone."""
        word, process = str(self._data["outcome"]), self._data["process"]
        is_local = process["host"] == platform.node()
        return "crashed" if word == "running" and is_local and not runs.is_alive(process) else word

    def note(self, **values: Any) -> None:
        """Record values about the sweep."""
        with self._noting:
            self._data.update(values)
            write_json(self.path / FILE, self._data)

    def put(self, trial: Trial) -> Trial:
        """Record a trial in place of the one of its number, and return it."""
        with self._noting:
            trials = {each.number: each for each in self.trials} | {trial.number: trial}
            self.note(trials=[asdict(each) for _, each in sorted(trials.items())])
        return trial

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock of the one process that works on a sweep. Raises UsageError where another holds it."""

        def taken() -> None:
            process = (read_object(self.path / FILE) or self._data)["process"]
            raise UsageError(f"the sweep {self.name} is running in process {process['pid']} on {process['host']}")

        with exclusive(self.path / "lock", waiting=taken):
            self._data = read_object(self.path / FILE) or self._data  # as the holder before has left it
            yield


def begin(home: Path, request: Mapping[str, Any]) -> Sweep:
    """Create a sweep. `request`: what identifies it, as JSON."""
    name = runs.new_name("sweep")
    path = home / DIRECTORY / name
    path.mkdir(parents=True)
    sweep = Sweep(path, {"sweep": name, "request": request, "trials": []})
    started = datetime.now(UTC).isoformat(timespec="seconds")
    sweep.note(started=started, outcome="running", process=runs.this_process())
    return sweep


def list_sweeps(home: Path) -> list[Sweep]:
    """All sweeps, the newest first."""
    records = ((path.parent, read_object(path)) for path in (home / DIRECTORY).glob(f"*/{FILE}"))
    sweeps = [Sweep(path, data) for path, data in records if "trials" in data]
    return sorted(sweeps, key=lambda sweep: sweep.name, reverse=True)


def find_same(home: Path, request: Mapping[str, Any]) -> Sweep | None:
    """The newest sweep of an equal request."""
    return next((sweep for sweep in list_sweeps(home) if sweep["request"] == request), None)


def find_sweep(home: Path, name: str = name_syntax.LATEST) -> Sweep:
    """The sweep of this name, or the only one whose name begins or ends so, or the latest. Raises UsageError."""
    sweeps = {sweep.name: sweep for sweep in list_sweeps(home)}
    match = name_syntax.matching(name, list(sweeps), "sweep")
    if match is None:
        raise name_syntax.unknown("sweep", name, sweeps, begin=BEGIN)
    return sweeps[match]


def ranked(trials: Iterable[Trial], *, maximize: bool) -> list[Trial]:
    """The trials with a metric, the best first, the earlier of equals."""
    done = [trial for trial in trials if trial.outcome == COMPLETED and trial.value is not None]
    return sorted(done, key=lambda trial: (-(trial.value or 0.0) if maximize else trial.value or 0.0, trial.number))


def best_of(trials: Iterable[Trial], *, maximize: bool) -> Trial | None:
    """The trial with the best metric; None if there is none with one."""
    return next(iter(ranked(trials, maximize=maximize)), None)
