"""A recipe, and what a plan says of one of its stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttrain.config import Settings
from ttrain.pipeline import resume
from ttrain.stages import Stage
from ttrain.store.layout import Artifact

Recipe = Callable[["Callable[..., Any]", Settings], Any]


@dataclass(frozen=True)
class Planned:
    """What will happen to one stage."""

    stage: Stage
    state: str  # "cached" or "run"
    why: tuple[str, ...]
    key: str | None = None  # None: an input must be built first
    artifact: Artifact | None = None
    ingredients: Mapping[str, Any] = field(default_factory=dict)
    forced: bool = False
    inputs: Mapping[str, Artifact] = field(default_factory=dict)
    start_from: Path | None = None  # a checkpoint of a shorter run, where --extend found one
    waits_for: tuple[str, ...] = ()  # stages whose artifacts it reads and that are still to run
    goes_on_with: resume.Work | None = None  # what --continue names
    taken: bool = False  # it must be in the store, since what was selected leaves it out

    def to_json(self) -> dict[str, Any]:
        """The form that `plan --json` prints."""
        path = str(self.artifact.path) if self.artifact else None
        return {"name": self.stage.name, "state": self.state, "key": self.key, "path": path, "why": list(self.why)}
