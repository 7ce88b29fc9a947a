"""Sweeps on disk: `sweeps/<sweep>/` under the home, with `sweep.json` (what was asked), the study, its lock, its page."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ttrain.core.files import exclusive, read_json, write_json
from ttrain.core.hashing import digest_of
from ttrain.errors import UsageError
from ttrain.store import runs
from ttrain.sweep.measure import Measure
from ttrain.sweep.space import Space, parse

DIRECTORY, FILE, JOURNAL, PAGE = "sweeps", "sweep.json", "study.journal", "sweep.html"
LATEST = "latest"
SHOWN_SWEEPS = 5


class Sweep:
    """One sweep's directory. What was asked does not change; what became of it is noted beside it."""

    def __init__(self, path: Path, data: dict[str, Any]) -> None:
        self.path, self._data = path, data
        self.name: str = data["sweep"]

    def __getitem__(self, name: str) -> Any:
        return self._data.get(name)

    @property
    def space(self) -> Space:
        """What varies."""
        texts: Mapping[str, str] = self._data["asked"]["space"]
        return Space({key: parse(key, text) for key, text in texts.items()}, texts)

    @property
    def measure(self) -> Measure:
        """By what its trials are compared."""
        return Measure(**self._data["asked"]["measure"])

    @property
    def journal(self) -> Path:
        """Of the study."""
        return self.path / JOURNAL

    @property
    def page(self) -> Path:
        """What to look at."""
        return self.path / PAGE

    @property
    def outcome(self) -> str:
        """running, completed, interrupted or failed; crashed where it says it is running, but its process is gone."""
        word, process = str(self._data["outcome"]), self._data["process"]
        here = process["host"] == platform.node()
        return "crashed" if word == "running" and here and not runs.is_alive(process) else word

    def note(self, **values: Any) -> None:
        """Note something about the sweep."""
        self._data.update(values)
        write_json(self.path / FILE, self._data)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """One process at a time works on a sweep. Raises UsageError where another does."""

        def taken() -> None:
            process = (read_json(self.path / FILE) or self._data)["process"]
            raise UsageError(f"the sweep {self.name} is running in process {process['pid']} on {process['host']}")

        with exclusive(self.path / "lock", waiting=taken):
            self._data = read_json(self.path / FILE) or self._data  # as who had it before has left it
            yield


def process_here() -> dict[str, Any]:
    """What tells this process from all others."""
    return {"pid": os.getpid(), "started": runs.process_started(os.getpid()), "host": platform.node()}


def begin(home: Path, asked: Mapping[str, Any], ingredients: Mapping[str, Any]) -> Sweep:
    """A new sweep. `asked`: what was asked for, as JSON; `ingredients`: digests of the data and code of each stage."""
    now = datetime.now(UTC)
    name = f"sweep-{now:%Y%m%d-%H%M%S}-{now.microsecond // 1000:03x}{secrets.token_hex(1)}"
    path = home / DIRECTORY / name
    path.mkdir(parents=True)
    data = {
        "sweep": name,
        "started": now.isoformat(timespec="seconds"),
        "outcome": "running",
        "process": process_here(),
        "asked": asked,
        "asked_digest": digest_of(asked),
        "ingredients": ingredients,
    }
    sweep = Sweep(path, data)
    sweep.note()
    return sweep


def listed(home: Path) -> list[Sweep]:
    """All sweeps, the newest first."""
    found = ((path.parent, read_json(path)) for path in (home / DIRECTORY).glob(f"*/{FILE}"))
    sweeps = [Sweep(path, data) for path, data in found if isinstance(data, dict) and "asked" in data]
    return sorted(sweeps, key=lambda sweep: sweep.name, reverse=True)


def same(home: Path, asked: Mapping[str, Any]) -> Sweep | None:
    """The newest sweep of the same question, whatever its data and code were."""
    digest = digest_of(asked)
    return next((sweep for sweep in listed(home) if sweep["asked_digest"] == digest), None)


def named(home: Path, name: str = LATEST) -> Sweep:
    """The sweep of this name, or the only one whose name begins or ends so, or the latest. Raises UsageError."""
    sweeps = listed(home)
    if name == LATEST and sweeps:
        return sweeps[0]
    found = [sweep for sweep in sweeps if sweep.name.startswith(name) or sweep.name.endswith(name)]
    exact = [sweep for sweep in found if sweep.name == name]
    if len(exact or found) == 1:
        return (exact or found)[0]
    if not sweeps:
        raise UsageError(
            f"there is no sweep in {home} yet; begin one with `ttrain sweep full 'pretrain.optim.lr=log(1e-4,3e-3)'`"
        )
    names = ", ".join(sweep.name for sweep in (found or sweeps)[:SHOWN_SWEEPS])
    rule = "means several sweeps" if found else "is no sweep; the newest are"
    raise UsageError(f"'{name}' {rule}: {names}; `ttrain sweep list` has all")


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between the ingredients of two sweeps: "code of pretrain"."""
    return [
        f"{part} of {stage}" for stage in new for part in new[stage] if (old.get(stage) or {}).get(part) != new[stage][part]
    ]
