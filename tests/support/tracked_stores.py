"""The tracker of a home, as tests open it, and what they tell it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ttrain.tracking import MlflowStore, TrackedRun, open_store


def opened(home: Path, experiment: str = "ttrain") -> MlflowStore:
    store = open_store(home, experiment)
    assert isinstance(store, MlflowStore)
    return store


def started(store: MlflowStore, name: str = "stage") -> TrackedRun:
    return store.start_run(name, tags={}, params={"lr": 0.02})


def row(step: int) -> dict[str, Any]:
    """A line of a curve."""
    return {"step": step, "tokens": step, "time": 1.7e9 + step, "metrics": {"loss": 1.0 / step}}
