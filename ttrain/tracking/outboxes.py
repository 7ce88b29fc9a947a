"""All outboxes of a home: which there are, which may be taken, what they wait to tell; nothing is locked or changed."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from ttrain.core.files import read_json
from ttrain.tracking import journal
from ttrain.tracking.journal import Entry
from ttrain.tracking.outbox import FOLDER, ID

IDLE_DAYS: Final = 7  # an outbox of another machine, which shares this home, is left alone for so long


def found(home: Path) -> list[Path]:
    """The directories of all outboxes, the oldest run first."""
    with contextlib.suppress(OSError):
        return sorted((path for path in (home / FOLDER).iterdir() if ID.fullmatch(path.name)), key=_began)
    return []


def may_be_taken(directory: Path) -> bool:
    """Whether its process may be gone: locks of other machines are not to be relied on, so those are left a week."""
    about = read_json(directory / "run.json")
    if not isinstance(about, dict):
        return False
    return about.get("host") == platform.node() or time.time() - last_change(directory) > 86400 * IDLE_DAYS


def last_change(directory: Path) -> float:
    """Seconds since 1970."""
    with contextlib.suppress(OSError):
        changes = (path.stat().st_mtime for path in directory.iterdir() if path.name != "lock")
        return max(changes, default=time.time())
    return time.time()


def children_first(directories: Iterable[Path]) -> list[Path]:
    """The same, each run after those that are parts of it: its models are registered from their runs, not once more."""
    known = {path: read_json(path / "run.json") for path in directories}
    about = {path: told for path, told in known.items() if isinstance(told, dict)}
    roots = {str(told.get("id")): float(told.get("started", 0)) for told in about.values() if not told.get("parent")}

    def place(path: Path) -> tuple[float, bool]:
        told = about.get(path, {})
        return roots.get(str(told.get("parent") or told.get("id")), float(told.get("started", 0))), not told.get("parent")

    return sorted(known, key=place)


def entries_of(directory: Path) -> list[Entry]:
    """What is still to be told, also where a process has the outbox."""
    return list(journal.read(directory).values())


def waiting_keys(home: Path) -> frozenset[str]:
    """Keys of the artifacts whose files are still to be sent."""
    paths = [entry.data.get("path") for box in found(home) for entry in entries_of(box)]
    parts = [Path(path).parts for path in paths if path]
    return frozenset(part[2] for part in parts if len(part) > 2 and part[0] == "store")


def _began(directory: Path) -> float:
    about = read_json(directory / "run.json")
    return float(about.get("started", 0)) if isinstance(about, dict) else 0.0
