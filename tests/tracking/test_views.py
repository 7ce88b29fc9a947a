"""MLflow's table of runs: one saved view for each `name`, whose columns say which run is better, and why."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ttrain.tracking import views
from ttrain.tracking.mlflow_mirror import FAILED, FINISHED, Mirror, TrackedRun

METRICS = {"eval/bits_per_byte": 1.5, "eval/chat_loss_sft": 4.1, "sft/validation_loss": 4.2}


@pytest.fixture(scope="module")
def mirror(
    tmp_path_factory: pytest.TempPathFactory, add_database: Callable[[Path], None]
) -> Mirror:
    home = tmp_path_factory.mktemp("home")
    add_database(home)
    mirror = Mirror(home)
    for number, (name, status, params) in enumerate(
        [
            ("mine", FINISHED, {"sft.optim.lr": 1e-3}),
            ("mine", FINISHED, {"sft.optim.lr": 1e-3, "sft.epochs": 3}),
            ("mine", FAILED, {"sft.optim.lr": 1e-3, "model.layers": 9}),
            ("other", FINISHED, {"model.layers": 3}),
        ]
    ):
        owner = f"full-2026112{number}-160222-1a2b4"
        run = TrackedRun(owner, owner, "ttrain", 1e9 + number, status, 1e9 + number + 1)
        run.tags, run.params, run.summary = {views.NAME: name}, params, METRICS
        mirror.push(run)
    for name in ("mine", "other"):
        views.refresh_view(mirror, "ttrain", name)
    return mirror


def view(mirror: Mirror, name: str) -> dict[str, Any]:
    tags = mirror.client.get_experiment_by_name("ttrain").tags
    saved: dict[str, Any] = json.loads(tags[f"mlflow.sharedViewState.ttrain-{name}"])
    return {**saved, "state": json.loads(saved["state"])}


def test_a_view_has_description_metrics_and_the_settings_that_differ_and_nothing_else(
    mirror: Mirror,
) -> None:
    saved = view(mirror, "mine")
    assert saved["name"] == "mine: which is better, and why"
    assert saved["state"]["selectedColumns"] == [
        "attributes.`Description`",
        "metrics.`eval/bits_per_byte`",
        "metrics.`eval/chat_loss_sft`",
        "params.`sft.epochs`",
    ]
    assert saved["state"]["columnOrder"] == [
        "attributes.`Run Name`",
        *saved["state"]["selectedColumns"],
    ]


def test_a_view_shows_the_runs_of_its_name_that_did_not_fail(mirror: Mirror) -> None:
    for name, count in {"mine": 2, "other": 1}.items():
        chosen = view(mirror, name)["state"]["searchFilter"]
        experiment = mirror.experiment_id("ttrain")
        listed = mirror.client.search_runs([experiment], chosen)
        assert {run.data.tags[views.NAME] for run in listed} == {name} and len(listed) == count


def test_runs_without_an_evaluation_are_judged_by_their_validation() -> None:
    trained = {"pretrain/validation_loss": 3.0, "pretrain/tokens": 5.0}
    evaluated = {**trained, "eval/bits_per_byte": 1.0}
    assert views.deciding([evaluated]) == ["eval/bits_per_byte"]
    assert views.deciding([trained]) == ["pretrain/validation_loss"]
    assert views.deciding([evaluated, trained]) == [
        "eval/bits_per_byte",
        "pretrain/validation_loss",
    ]
    assert views.deciding([]) == []


def test_a_setting_that_one_run_alone_names_differs_and_paths_and_lists_are_no_columns() -> None:
    first = {"lora.rank": "4", "model.layers": "2", "same": "x", "data.sft": "['a.jsonl']"}
    second = {"lora.rank": "8", "same": "x", "runtime.devices": "2", "sft.start_from": "runs/mine"}
    assert views.differing([first, second]) == ["model.layers", "lora.rank", "runtime.devices"]
    many = [{f"sft.{number}": str(run) for number in range(30)} for run in range(2)]
    assert len(views.differing(many)) == views.MOST_SETTINGS
