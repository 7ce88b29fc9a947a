"""Sweeps on disk: `sweeps/<sweep>/sweep.json` under the home has the request and the trials."""

import contextlib
import platform
import shlex
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import starmap
from pathlib import Path
from typing import Any

from ttrain.core.files import exclusive, read_object, write_json
from ttrain.core.text import format_duration, truncated
from ttrain.errors import UsageError
from ttrain.experiments.measure import Measure
from ttrain.experiments.space import Space, Values, assignment, format_value, parse
from ttrain.store import name_syntax, runs

DIRECTORY, FILE = "sweeps", "sweep.json"
BEGIN = "begin with `ttrain sweep full 'pretrain.optim.lr=log(1e-4,3e-3)'`"
SHORT = 100  # characters of an error in a table
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

    @property
    def description(self) -> str:
        """How the trial ended, and why it failed."""
        if self.outcome == RUNNING:
            return "to go on" if self.run else "begun"
        short = truncated((self.error or "").partition("\n")[0], SHORT)
        return f"{self.outcome}: {short}" if short else self.outcome


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

    @property
    def ranked(self) -> list[Trial]:
        """The trials with a metric, the best first, the earlier of equals."""
        sign = -1 if self.measure.maximize else 1
        done = [trial for trial in self.trials if trial.outcome == COMPLETED and trial.value is not None]
        return sorted(done, key=lambda trial: (sign * (trial.value or 0.0), trial.number))

    @property
    def best(self) -> Trial | None:
        """The trial with the best metric; None if there is none with one."""
        return next(iter(self.ranked), None)

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """(header, rows): the best trial first, with its settings, its metric, how it ended and its run."""
        done, dimensions = self.ranked, self.space.dimensions
        rows = [
            (
                f"{trial.number}{' *' if trial in done[:1] else ''}",
                *(format_value(trial.values[key]) for key in dimensions),
                "" if trial.value is None else f"{trial.value:.4f}",
                trial.description,
                format_duration(trial.seconds),
                trial.run or "",
            )
            for trial in [*done, *(trial for trial in self.trials if trial not in done)]
        ]
        return ("trial", *dimensions, self.measure.metric, "outcome", "time", "run"), rows

    def verdict(self) -> str:
        """One sentence: which trial is best, and how far the others are from it."""
        done = self.ranked
        if not done:
            return "no trial has completed"
        best, worst = done[0], done[-1]
        settings = ", ".join(starmap(assignment, best.values.items()))
        spread = f"; the worst has {worst.value:.4f}" if len(done) > 1 else ""
        return f"trial {best.number} is best: {self.measure.metric} {best.value:.4f} with {settings}{spread}"

    def command(self, trial: Trial) -> str:
        """The command that runs the whole pipeline with a trial's settings; what the trial made comes from the store."""
        arguments = ["ttrain", "pipeline", "run", "full", *(self["arguments"] or [])]
        return shlex.join([*arguments, *starmap(assignment, trial.values.items())])

    def to_json(self) -> dict[str, Any]:
        """The object that `show --json` prints."""
        best = self.best
        return {
            "sweep": self.name,
            "outcome": self.outcome,
            "started": self["started"],
            "space": dict(self.space.texts),
            "metric": self.measure.metric,
            "direction": self.measure.direction,
            "sampler": self["request"]["sampler"],
            "best": asdict(best) if best else None,
            "command": self.command(best) if best else None,
            "trials": [asdict(trial) for trial in self.trials],
            "tracking": self["tracking"],
        }

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
