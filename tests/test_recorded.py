"""What a stage of a tracked run leaves in the tracker beside its curves: the machine, texts, logs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from doubles import Home, stage_settings
from rich.console import Console

from ttrain.config import Settings
from ttrain.display import Display
from ttrain.errors import StageFailed
from ttrain.execute import Execution
from ttrain.stages import PRETRAIN

mlflow = pytest.importorskip("mlflow")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home.make(tmp_path_factory.mktemp("recorded") / "home")


def run(home: Home, settings: Settings) -> tuple[Any, Any, Path]:
    """The tracked runs of a pipeline with one stage, and of that stage; and the log of the former in the home."""
    execution = Execution("full", settings, home.store, Display(Console(file=io.StringIO())), ["pretrain"])
    outcome = "failed"
    try:
        execution.run_stage(PRETRAIN, home.pretrain_inputs(), lambda line: None)
        outcome = "completed"
    except StageFailed:
        pass
    finally:
        execution.finish(outcome)
    client = mlflow.MlflowClient(f"sqlite:///{home.store.root}/mlflow/mlflow.db")
    parent = client.get_run(execution.tracked_run)
    (child,) = client.search_runs([parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    return parent, child, execution.log.path


def files(tracked: Any) -> dict[str, Path]:
    root = Path(tracked.info.artifact_uri.removeprefix("file://"))
    return {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}


def test_a_stage_has_the_machine_its_texts_and_the_run_one_log(home: Home) -> None:
    settings = stage_settings(6, sample_every_steps=3, eval_every_steps=3, eval_limit=2, system_metrics_seconds=1)
    parent, child, log = run(home, settings)
    assert {"loss", "system/cpu_utilization_percentage", "system/system_memory_usage_megabytes"} <= {*child.data.metrics}
    texts = sorted(name for name in files(child) if "/samples/" in name)
    assert texts == [f"pretrain/run/samples/step-{step:08d}.txt" for step in (3, 6)]
    assert all(files(child)[name].read_text(encoding="utf-8").startswith("=== Return the\n") for name in texts)
    client = mlflow.MlflowClient(f"sqlite:///{home.store.root}/mlflow/mlflow.db")
    curve = client.get_metric_history(child.info.run_id, "eval/documents/bits_per_byte")
    assert [point.step for point in curve] == [3, 6] and curve[0].value > curve[1].value
    assert "eval/time_share" in child.data.metrics and "pretrain/run/evaluations/step-00000006.json" in files(child)
    told = files(parent)[log.name].read_text()
    assert told == log.read_text()
    assert " pretrain: started: never run before\n" in told and " pretrain: step 6/6 " in told
    assert " pretrain: completed after " in told
    assert "step 6/6" in files(child)["pretrain/run/log.txt"].read_text()


def test_a_stage_that_failed_leaves_its_texts_and_logs_too(home: Home) -> None:
    training = {"optim": {"kind": "adamw", "lr": 1e30, "clip": None}, "schedule": {"warmup_steps": 0}, "seed": 2}
    parent, child, log = run(home, stage_settings(40, training, sample_every_steps=1))
    assert (parent.info.status, child.info.status) == ("FAILED", "FAILED")
    assert "pretrain/run/samples/step-00000001.txt" in files(child)
    assert "step 1/40" in files(child)["log.txt"].read_text()
    told = files(parent)[log.name].read_text().splitlines()
    assert " pretrain: failed: " in told[-1] and "loss" in told[-1]
