"""What a stage of a tracked run leaves in MLflow beside its curves: the machine, texts, logs."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_stages import Home, run_of, stage_settings
from support.tracked_stores import files_of, only, steps

from ttrain.config import Settings
from ttrain.engine.graph import Planned
from ttrain.engine.labels import labels_of
from ttrain.errors import StageFailed, UsageError
from ttrain.reports import summary
from ttrain.tasks import PRETRAIN


def run(home: Home, settings: Settings, **options: Any) -> tuple[Any, Any, Path]:
    """Pretrain; the runs of the pipeline and of the stage in MLflow, and the log."""
    stages = [Planned(PRETRAIN, "run", (), sources=home.pretrain_inputs())]
    execution = run_of(home.store, settings, stages, **options)
    outcome = "failed"
    with contextlib.suppress(StageFailed):
        execution.run_stage(stages[0], lambda line: None)
        outcome = "completed"
    execution.finish(outcome)
    name = execution.record.run
    parent, child = (only(home.store.root, identity) for identity in (name, f"{name}/pretrain"))
    return parent, child, execution.record.path.with_suffix(".log")


def test_a_stage_has_metrics_of_the_machine_its_texts_and_its_log(stage_home: Home) -> None:
    runtime = {"sample_every_steps": 3, "eval_every_steps": 3, "eval_limit": 2}
    settings = stage_settings(6, system_metrics_seconds=1, **runtime)
    parent, child, log = run(stage_home, settings)
    files, samples = files_of(child), "pretrain/run/samples"
    machine = {"system/cpu_utilization_percentage", "system/system_memory_usage_megabytes"}
    assert machine | {"loss", "eval/time_share"} <= {*child.data.metrics}
    expected = [f"{samples}/step-{step:08d}.txt" for step in (3, 6)]
    assert sorted(name for name in files if name.startswith(samples)) == expected
    metric = "eval/documents/bits_per_byte"
    assert steps(stage_home.store.root, child.info.run_id, metric) == [3, 6]
    assert "pretrain/run/evaluations/step-00000006.json" in files
    text = files_of(parent)[log.name].read_text()
    assert text == log.read_text()
    assert all(f" pretrain: {event}" in text for event in ("started", "step 6/6", "completed"))
    assert "step 6/6" in files["pretrain/run/log.txt"].read_text()


def test_a_note_and_tags_are_shown_masked_and_count_in_no_key(stage_home: Home) -> None:
    tags = ["purpose=a smaller rate", "hub.token=x1"]
    shown = {"purpose": "a smaller rate", "hub.token": "***"}
    labels = labels_of("why: <b>\nsk-abcdefghijklmnopqrstu", tags)
    by_night = stage_settings(2, quiet_hours={"start": "00:00", "end": "00:00"})
    parent, _, log = run(stage_home, by_night, facts=labels)
    assert shown.items() <= parent.data.tags.items()
    note = parent.data.tags["mlflow.note.content"]
    assert note.startswith("why: &lt;b>  \n***\n\n`pretrain.tokens=512`")
    record = json.loads(log.with_suffix(".json").read_text())
    assert (record["note"], record["tags"]) == ("why: <b>\n***", shown)
    stages = [Planned(PRETRAIN, "run", (), sources=stage_home.pretrain_inputs())]
    unlabelled = run_of(stage_home.store, stage_settings(2), stages)
    assert unlabelled.run_stage(stages[0], lambda line: None)[1] == "cached"
    unlabelled.finish("completed")
    page = files_of(parent)["report.html"].read_text()
    assert "why: &lt;b&gt;" in page and "purpose=a" in page


@pytest.mark.parametrize("tag", ["purpose=", "TTrain.key=x", "a=b\nc"])
def test_invalid_labels_are_refused(tag: str) -> None:
    with pytest.raises(UsageError, match="KEY=VALUE"):
        labels_of(None, [tag])
    with pytest.raises(UsageError, match="2001"):
        labels_of("x" * 2001, [])


def test_the_cost_counts_every_training_once_and_the_steps_before_a_kill() -> None:
    half = {"steps": 40, "resumed_from_step": 20, "train_seconds": 10.0, "ranks": 2}
    complete = {"steps": 5, "resumed_from_step": 0, "train_seconds": 16.0, "ranks": 1}
    results = {"pretrain": half, "sft": complete, "tokenizer": {"train_seconds": 99.0}}
    metrics = summary.metrics_of(results)
    assert metrics["total/train_seconds"] == pytest.approx(36)
    assert metrics["total/device_hours"] == pytest.approx((20 * 2 + 16) / 3600, rel=1e-5)
    no_step = {"steps": 40, "resumed_from_step": 40, "train_seconds": 0.1}
    assert not any(name.startswith("total/") for name in summary.metrics_of({"sft": no_step}))
