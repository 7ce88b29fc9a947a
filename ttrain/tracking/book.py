"""What was pushed where: `mlflow/pushed.json` in the home. It spares work and can be deleted: pushes compare anyway.

By the address of an MLflow: of each run its ids there and the size that its events had, by which a later change is seen; the
aliases that were pushed last, by which one that somebody moved on MLflow's page is seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from ttrain.core.files import PRIVATE_FILE, JsonDict, exclusive, read_object, write_json
from ttrain.core.redact import without_user
from ttrain.store import events
from ttrain.tracking.client import database_of, own_uri


class Book:
    """The notes about one MLflow."""

    def __init__(self, home: Path, uri: str) -> None:
        self._home = home.resolve()
        self._path = self._home / "mlflow" / "pushed.json"
        self._own = uri == own_uri(self._home)
        self._name = "own" if self._own else without_user(uri)

    @property
    def runs(self) -> JsonDict:
        """By run: `run_id`, `experiment_id`, `stages` (run ids by stage), `noted` (bytes that were pushed)."""
        pushed: JsonDict = self._read().get("runs", {})
        return pushed

    def aliases(self, name: str) -> dict[str, str] | None:
        """The aliases of a registered model, as they were pushed last; None if they never were."""
        noted: dict[str, str] | None = self._read().get("aliases", {}).get(name)
        return noted

    def is_seen(self) -> bool:
        """Whether MLflow is as the last push left it; asked of the home's own database alone."""
        return self._own and self._read().get("state") == self._state()

    def note_run(self, run: str, **values: object) -> None:
        with self._changing() as notes:
            notes.setdefault("runs", {}).setdefault(run, {}).update(values)

    def note_pushed(self, run: str) -> None:
        """Note that MLflow has all of a run as it is now."""
        self.note_run(run, noted=noted_bytes(self._home, run))
        self.note_seen()

    def note_aliases(self, name: str, aliases: JsonDict) -> None:
        with self._changing() as notes:
            notes.setdefault("aliases", {})[name] = aliases

    def note_seen(self) -> None:
        """Note the state of the home's own database."""
        if self._own:
            with self._changing() as notes:
                notes["state"] = self._state()

    def forget(self) -> None:
        """MLflow was made anew: everything is to be pushed."""
        with self._changing() as notes:
            notes.clear()

    def lacking(self, runs: Sequence[str]) -> list[str]:
        """Those that have changed since their last push, here or to the MLflow that they were for."""
        everything = [notes.get("runs", {}) for notes in read_object(self._path).values()]
        mine = self.runs
        candidates = [run for run in runs if run in mine or not any(run in theirs for theirs in everything)]
        return [run for run in candidates if mine.get(run, {}).get("noted") != noted_bytes(self._home, run)]

    def note_untracked(self, runs: Sequence[str]) -> None:
        """Note that there is nothing to push of these runs as they are."""
        if runs:
            with self._changing() as notes:
                pushed = notes.setdefault("runs", {})
                pushed |= {run: {"noted": noted_bytes(self._home, run)} for run in runs}

    def _read(self) -> JsonDict:
        notes: JsonDict = read_object(self._path).get(self._name, {})
        return notes

    @contextlib.contextmanager
    def _changing(self) -> Iterator[JsonDict]:
        with exclusive(self._path.with_suffix(".lock"), mode=PRIVATE_FILE):
            everything = read_object(self._path)
            yield everything.setdefault(self._name, {})
            write_json(self._path, everything, PRIVATE_FILE)

    def _state(self) -> list[int]:
        with contextlib.suppress(OSError):
            status = database_of(self._home).stat()
            return [status.st_size, status.st_mtime_ns]
        return []


def noted_bytes(home: Path, run: str) -> int:
    """Bytes of what the home has noted of a run, its record and events, which only grow: the same number is the same run."""
    record = home / "runs" / f"{run}.json"
    paths = [record, events.path_of(record)]
    return sum(path.stat().st_size for path in paths if path.exists())
