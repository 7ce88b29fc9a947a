"""The store of a home together with the place where artifacts that it lacks are looked for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrain.store.artifacts import Store
from ttrain.store.layout import Elsewhere

if TYPE_CHECKING:
    from ttrain.config import Settings


class InTracker:
    """What MLflow holds of one experiment (None: of all); a `ttrain.store.layout.Elsewhere`.

    It is loaded at the first key that the store lacks.
    """

    def __init__(self, home: Path, experiment: str | None = None) -> None:
        self._home, self._experiment = home, experiment

    def manifest(self, stage: str, key: str) -> Mapping[str, Any] | None:
        return self._tracked.manifest(stage, key)

    def fetch(self, stage: str, key: str, name: str, to: Path) -> None:
        self._tracked.fetch(stage, key, name, to)

    @cached_property
    def _tracked(self) -> Elsewhere:
        from ttrain.tracking.artifact_source import Tracked

        return Tracked(self._home, self._experiment)


def store_of(home: Path, settings: Settings) -> Store:
    """The store of a home; what it lacks is looked for in MLflow, where that is told of runs."""
    tracking = settings.tracking
    return Store(home, InTracker(home, tracking.experiment) if tracking.enabled else None)
