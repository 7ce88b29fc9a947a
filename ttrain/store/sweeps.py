"""Sweeps on disk: `sweeps/<name>/sweep.json` has the request, the changes and all trials."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ttrain.core.files import (
    JsonDict,
    JsonObject,
    Taken,
    exclusive,
    read_object,
    refuse,
    write_json,
)
from ttrain.core.text import truncated
from ttrain.store import name_syntax, runs

DIRECTORY = "sweeps"
FILE = "sweep.json"
BEGIN = "begin with `ttrain sweep full sft.optim.lr=1e-3,2e-3,4e-3 --seeds 5`"
SHORT = 100  # characters of an error in a table
COMPLETED, DIVERGED, FAILED, RUNNING = "completed", "diverged", "failed", "running"
Place = tuple[int, int]  # of a trial: the number of its change, and its seed


@dataclass(frozen=True)
class Trial:
    """One change with one seed, and its outcome."""

    change: int  # its number among the changes; 0: the baseline
    seed: int
    outcome: str = RUNNING  # also of one that was interrupted, and will continue
    value: float | None = None  # of the metric, on all held-out records
    halves: Sequence[
        float
    ] = ()  # the metric on each half of the held-out records; empty if there are few
    seconds: float = 0.0
    run: str | None = None  # its newest pipeline run
    evaluation: str | None = None  # key of the evaluation whose records the metric is of
    error: str | None = None

    @property
    def place(self) -> Place:
        """(change, seed), the identity of the trial."""
        return self.change, self.seed

    @property
    def reason(self) -> str:
        """Why it failed, in one line."""
        return truncated((self.error or "").partition("\n")[0], SHORT)


class Experiment:
    """One experiment's record.

    Several processes, also of several machines with one home, may work on it: each change is made
    under its lock, and a trial belongs to the holder of the trial's own lock.
    """

    def __init__(self, path: Path, data: JsonDict) -> None:
        self.path = path
        self._data = data
        self.name: str = data["sweep"]

    def __getitem__(self, name: str) -> Any:
        return self._data.get(name)

    @property
    def trials(self) -> list[Trial]:
        return [Trial(**entry) for entry in self["trials"]]

    @property
    def outcome(self) -> str:
        """running, completed, interrupted, failed, or crashed if its process is gone."""
        word = str(self["outcome"])
        return "crashed" if word == "running" and runs.is_gone(self["process"]) else word

    def note(self, **values: Any) -> None:
        with self._changing():
            self._data.update(values)

    def end(self, outcome: str, verdicts: JsonObject) -> None:
        """Record how this process ended; after an early end only the latest sets the outcome."""
        with self._changing():
            is_last = outcome == "completed" or self["process"] == runs.this_process()
            self._data.update(verdicts, **({"outcome": outcome} if is_last else {}))

    def put(self, trial: Trial) -> Trial:
        """Record a trial in place of the one with its change and seed, and return it."""
        with self._changing():
            trials = {each.place: each for each in self.trials} | {trial.place: trial}
            self._data["trials"] = [asdict(each) for each in trials.values()]
        return trial

    def extend(self, seeds: int) -> None:
        """Request more seeds, and count one more look at the results.

        Each repeated look raises the evidence that a verdict needs.
        """
        with self._changing():
            if seeds > self["seeds"]:
                self._data.update(seeds=seeds, looks=self["looks"] + 1)

    def add(self, draw: Callable[[], JsonDict], number: int) -> None:
        """Add the change that `draw` returns, unless another process has added that number."""
        with self._changing():
            if len(self["changes"]) == number:
                self["changes"].append(draw())

    @contextlib.contextmanager
    def claimed(self, place: Place, outcome: str = RUNNING) -> Iterator[Trial | None]:
        """Lock a trial and yield it; None if its outcome differs or another process holds it."""
        change, seed = place
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(exclusive(self.path / "locks" / f"{change}-{seed}", refuse))
            except Taken:
                yield None
                return
            self.reload()
            trial = next((each for each in self.trials if each.place == place), Trial(change, seed))
            yield trial if trial.outcome == outcome else None

    def reload(self) -> None:
        self._data = read_object(self.path / FILE) or self._data

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with exclusive(self.path / "lock"):
            self.reload()
            yield
            write_json(self.path / FILE, self._data)


def find_or_begin(home: Path, request: JsonObject) -> Experiment:
    """The newest experiment with the identity of this request, or a new one.

    `request`: identity, metric, changes and further values, as JSON.
    """
    with exclusive(home / DIRECTORY / "lock"):
        if same := find_same(home, request["identity"]):
            return same
        name = runs.new_name("sweep")
        path = home / DIRECTORY / name
        path.mkdir(parents=True)
        started = datetime.now(UTC).isoformat(timespec="seconds")
        experiment = Experiment(
            path, {"sweep": name, "trials": [], "looks": 0, "started": started, **request}
        )
        experiment.note(outcome="running", process=runs.this_process())
        return experiment


def sweep_file(home: Path, name: str) -> Path:
    return home / DIRECTORY / name / FILE


def list_experiments(home: Path) -> list[Experiment]:
    records = ((path.parent, read_object(path)) for path in (home / DIRECTORY).glob(f"*/{FILE}"))
    experiments = [Experiment(path, data) for path, data in records if "changes" in data]
    return sorted(experiments, key=lambda each: each.name, reverse=True)


def find_same(home: Path, identity: str) -> Experiment | None:
    """The newest experiment of an equal request."""
    return next((each for each in list_experiments(home) if each["identity"] == identity), None)


def find_experiment(home: Path, name: str = name_syntax.LATEST) -> Experiment:
    """The experiment of this name or part of it, or the latest. Raises UsageError."""
    experiments = {each.name: each for each in list_experiments(home)}
    match = name_syntax.matching(name, list(experiments), "sweep")
    if match is None:
        raise name_syntax.unknown("sweep", name, experiments, begin=BEGIN)
    return experiments[match]
