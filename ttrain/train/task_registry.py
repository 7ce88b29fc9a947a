"""How a task is found by its name: an entry point that some installed package has, or `module:Class`. Loads no torch."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points

from ttrain.errors import UsageError

GROUP = "ttrain.tasks"


def known() -> dict[str, EntryPoint]:
    """The tasks of the installed packages, by name."""
    return {point.name: point for point in sorted(entry_points(group=GROUP))}


def find(name: str) -> EntryPoint:
    """The task that is meant; nothing is imported yet. Raises UsageError with the known names where there is none."""
    if ":" in name:
        return EntryPoint(name, name, GROUP)
    found = known()
    if name not in found:
        raise UsageError(f"there is no task '{name}'{near(name, [*found])}; the tasks are {listed()}")
    return found[name]


def near(name: str, names: Sequence[str]) -> str:
    """A question that names the nearest one, where one is near."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    return f" (did you mean '{close[0]}'?)" if close else ""


def listed() -> str:
    """All of them, for a message."""
    names = ", ".join(known()) or "none"
    return f"{names}, or any module:Class; a package adds one by an entry point of the group {GROUP}"
