"""MLflow's table of runs: a saved view for each `name`, whose columns say which run is better."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ttrain.tracking import views
from ttrain.tracking.mlflow_mirror import FAILED, FINISHED, Mirror, TrackedRun

BITS, CHAT_LOSS = "eval/bits_per_byte", "eval/chat_loss_sft"


@pytest.fixture(scope="module")
def mirror(
    tmp_path_factory: pytest.TempPathFactory, add_database: Callable[[Path], None]
) -> Mirror:
    home = tmp_path_factory.mktemp("home")
    add_database(home)
    mirror, lr = Mirror(home), {"sft.optim.lr": 1e-3}
    runs: list[tuple[str, str, dict[str, object]]] = [
        ("mine", FINISHED, {**lr}),
        ("mine", FINISHED, {**lr, "sft.epochs": 3}),
        ("mine", FAILED, {**lr, "model.layers": 9}),
        ("other", FINISHED, {"model.layers": 3}),
    ]
    for number, (name, status, params) in enumerate(runs):
        run = TrackedRun(f"run-{number}", f"run-{number}", "ttrain", 1e9 + number, status, 2e9)
        run.tags = {views.NAME: name}
        run.params = params
        run.summary = {BITS: 1.5, CHAT_LOSS: 4.1, "sft/validation_loss": 4.2}
        mirror.push(run)
    for name in ("mine", "other"):
        views.refresh_view(mirror, "ttrain", name)
    return mirror


def view(mirror: Mirror, name: str) -> dict[str, Any]:
    tags = mirror.client.get_experiment_by_name("ttrain").tags
    saved: dict[str, Any] = json.loads(tags[f"mlflow.sharedViewState.ttrain-{name}"])
    return {**saved, "state": json.loads(saved["state"])}


def test_a_view_has_description_metrics_and_the_settings_that_differ(mirror: Mirror) -> None:
    saved = view(mirror, "mine")
    assert saved["name"] == "mine: which is better, and why"
    metrics = [f"metrics.`{name}`" for name in (BITS, CHAT_LOSS)]
    columns = ["attributes.`Description`", *metrics, "params.`sft.epochs`"]
    assert saved["state"]["selectedColumns"] == columns
    assert saved["state"]["columnOrder"] == ["attributes.`Run Name`", *columns]
