"""Sweeps on disk: `sweeps/<sweep>/` under the home, with `sweep.json` (the request), the study, its lock, its page."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ttrain.core.files import exclusive, read_object, write_json
from ttrain.core.hashing import digest_of
from ttrain.errors import UsageError
from ttrain.store import references, runs
from ttrain.sweep.measure import Measure
from ttrain.sweep.space import Space, parse

DIRECTORY, FILE, JOURNAL, PAGE = "sweeps", "sweep.json", "study.journal", "sweep.html"
BEGIN = "begin with `ttrain sweep full 'pretrain.optim.lr=log(1e-4,3e-3)'`"


class Sweep:
    """One sweep's directory. The request does not change; the sweep's progress is recorded beside it."""

    def __init__(self, path: Path, data: dict[str, Any]) -> None:
        self.path, self._data = path, data
        self.journal, self.page = path / JOURNAL, path / PAGE
        self.name: str = data["sweep"]

    def __getitem__(self, name: str) -> Any:
        return self._data.get(name)

    @property
    def space(self) -> Space:
        """The settings that vary."""
        texts: Mapping[str, str] = self._data["asked"]["space"]
        return Space({key: parse(key, text) for key, text in texts.items()}, texts)

    @property
    def measure(self) -> Measure:
        """The metric by which its trials are compared."""
        return Measure(**self._data["asked"]["measure"])

    @property
    def outcome(self) -> str:
        """running, completed, interrupted or failed; crashed where it is recorded as running, but its process is gone."""
        word, process = str(self._data["outcome"]), self._data["process"]
        is_local = process["host"] == platform.node()
        return "crashed" if word == "running" and is_local and not runs.is_alive(process) else word

    @property
    def has_current_page(self) -> bool:
        """Whether its page is newer than all that it shows."""
        if not self.page.exists():
            return False
        shown = [path for path in (self.path / FILE, self.journal) if path.exists()]
        return self.page.stat().st_mtime_ns > max(path.stat().st_mtime_ns for path in shown)

    def note(self, **values: Any) -> None:
        """Record values about the sweep."""
        self._data.update(values)
        write_json(self.path / FILE, self._data)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock of the one process that works on a sweep. Raises UsageError where another holds it."""

        def taken() -> None:
            process = (read_object(self.path / FILE) or self._data)["process"]
            raise UsageError(f"the sweep {self.name} is running in process {process['pid']} on {process['host']}")

        with exclusive(self.path / "lock", waiting=taken):
            self._data = read_object(self.path / FILE) or self._data  # as the holder before has left it
            yield


def begin(home: Path, request: Mapping[str, Any], ingredients: Mapping[str, Any]) -> Sweep:
    """Create a sweep. `request`: what was asked for, as JSON; `ingredients`: digests of the data and code of each stage."""
    name = runs.new_name("sweep", (sweep.name for sweep in list_sweeps(home)))
    path = home / DIRECTORY / name
    path.mkdir(parents=True)
    data = {
        "sweep": name,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "outcome": "running",
        "process": runs.this_process(),
        "asked": request,
        "asked_digest": digest_of(request),
        "ingredients": ingredients,
    }
    sweep = Sweep(path, data)
    sweep.note()
    return sweep


def list_sweeps(home: Path) -> list[Sweep]:
    """All sweeps, the newest first."""
    records = ((path.parent, read_object(path)) for path in (home / DIRECTORY).glob(f"*/{FILE}"))
    sweeps = [Sweep(path, data) for path, data in records if "asked" in data]
    return sorted(sweeps, key=lambda sweep: sweep.name, reverse=True)


def find_same(home: Path, request: Mapping[str, Any]) -> Sweep | None:
    """The newest sweep of an equal request, whatever its data and code were."""
    digest = digest_of(request)
    return next((sweep for sweep in list_sweeps(home) if sweep["asked_digest"] == digest), None)


def find_sweep(home: Path, name: str = references.LATEST) -> Sweep:
    """The sweep of this name, or the only one whose name begins or ends so, or the latest. Raises UsageError."""
    sweeps = {sweep.name: sweep for sweep in list_sweeps(home)}
    match = references.matching(name, list(sweeps), "sweep")
    if match is None:
        raise references.unknown("sweep", name, sweeps, begin=BEGIN, also="; `ttrain sweep list` has all" if sweeps else "")
    return sweeps[match]


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The differences between the ingredients of two sweeps: "code of pretrain"."""
    return [
        f"{ingredient} of {stage}"
        for stage in new
        for ingredient in new[stage]
        if (old.get(stage) or {}).get(ingredient) != new[stage][ingredient]
    ]
