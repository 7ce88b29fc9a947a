"""The tracker of a home, as tests open it."""

from __future__ import annotations

from pathlib import Path

from ttrain.tracking import MlflowStore, open_store


def opened(home: Path, experiment: str = "ttrain") -> MlflowStore:
    store = open_store(home, experiment)
    assert isinstance(store, MlflowStore)
    return store
