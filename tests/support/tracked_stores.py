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


def steps(client: Any, run_id: str, key: str = "loss") -> list[int]:
    return sorted(metric.step for metric in client.get_metric_history(run_id, key))


def runs_of(client: Any, identity: str) -> list[Any]:
    experiment = client.get_experiment_by_name("outages").experiment_id
    found: list[Any] = client.search_runs([experiment], f"tags.`ttrain.id` = '{identity}'")
    return found
