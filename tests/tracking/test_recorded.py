"""What a stage of a tracked run leaves in the tracker beside its curves: the machine, texts, logs."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.tiny_stages import Home, run_of, stage_settings
from support.tracked_stores import client_of, files_of, tracked

from ttrain.config import Settings
from ttrain.engine.graph import Planned
from ttrain.engine.labels import labels_of
from ttrain.errors import StageFailed, UsageError
from ttrain.tasks import PRETRAIN


def stages_of(home: Home) -> list[Planned]:
    return [Planned(PRETRAIN, "run", (), sources=home.pretrain_inputs())]


def run(home: Home, settings: Settings, **options: Any) -> tuple[Any, Any, Path]:
    execution = run_of(home.store, settings, stages_of(home), **options)
    outcome = "failed"
    with contextlib.suppress(StageFailed):
        execution.run_stage(execution.plan.stages[0], lambda line: None)
        outcome = "completed"
    execution.finish(outcome)
    name = execution.record.run
    [parent], [child] = tracked(home.store.root, name), tracked(home.store.root, f"{name}/pretrain")
    return parent, child, execution.record.path.with_suffix(".log")


def test_a_stage_has_the_machine_its_texts_and_the_run_one_log(stage_home: Home) -> None:
    settings = stage_settings(
        6, sample_every_steps=3, eval_every_steps=3, eval_limit=2, system_metrics_seconds=1
    )
    parent, child, log = run(stage_home, settings)
    files = files_of(child)
    assert {
        "loss",
        "system/cpu_utilization_percentage",
        "system/system_memory_usage_megabytes",
    } <= {*child.data.metrics}
    texts = sorted(name for name in files if "/samples/" in name)
    assert texts == [f"pretrain/run/samples/step-{step:08d}.txt" for step in (3, 6)]
    assert all(files[name].read_text(encoding="utf-8").startswith("=== ") for name in texts)
    curve = client_of(stage_home.store.root).get_metric_history(
        child.info.run_id, "eval/documents/bits_per_byte"
    )
    assert [point.step for point in curve] == [3, 6] and curve[0].value > curve[1].value
    assert (
        "eval/time_share" in child.data.metrics
        and "pretrain/run/evaluations/step-00000006.json" in files
    )
    text = files_of(parent)[log.name].read_text()
    assert text == log.read_text()
    assert all(f" pretrain: {event}" in text for event in ("started", "step 6/6", "completed"))
    assert "step 6/6" in files["pretrain/run/log.txt"].read_text()


def test_a_stage_that_failed_leaves_its_texts_and_logs_too(stage_home: Home) -> None:
    optim = {"kind": "adamw", "lr": 0.01, "weight_decay": 1e30, "clip": None}
    training = {"optim": optim, "schedule": {"warmup_steps": 0}, "seed": 2}
    parent, child, log = run(stage_home, stage_settings(40, training, sample_every_steps=1))
    assert (parent.info.status, child.info.status) == ("FAILED", "FAILED")
    assert "pretrain/run/samples/step-00000001.txt" in files_of(child)
    assert "step 1/40" in files_of(child)["log.txt"].read_text()
    told = files_of(parent)[log.name].read_text().splitlines()
    assert " pretrain: failed: " in told[-1] and "loss" in told[-1]


def test_a_note_and_tags_stand_in_mlflow_and_on_the_page_and_in_no_key(stage_home: Home) -> None:
    labels = labels_of(
        "why: <b>\nsk-abcdefghijklmnopqrstu", ["purpose=a smaller rate", "hub.token=x1"]
    )
    by_night = stage_settings(2, night={"start": "00:00", "end": "00:00"})
    parent, _, log = run(stage_home, by_night, facts=labels)
    assert (
        parent.data.tags["purpose"] == "a smaller rate" and parent.data.tags["hub.token"] == "***"
    )
    assert parent.data.tags["mlflow.note.content"].startswith(
        "why: &lt;b>  \n***\n\n`pretrain.tokens=512`"
    )
    record = json.loads(log.with_suffix(".json").read_text())
    assert record["note"] == "why: <b>\n***" and record["tags"] == {
        "purpose": "a smaller rate",
        "hub.token": "***",
    }
    again = run_of(stage_home.store, stage_settings(2), stages_of(stage_home))
    assert again.run_stage(again.plan.stages[0], lambda line: None)[1] == "cached"
    again.finish("completed")
    page = files_of(parent)["report.html"].read_text()
    assert (
        "why: &lt;b&gt;" in page and "purpose=a" in page and "x1" not in json.dumps(record["tags"])
    )


@pytest.mark.parametrize(
    ("note", "tag", "message"),
    [
        ("x" * 2001, [], "2001"),
        (None, ["purpose="], "KEY=VALUE"),
        (None, ["TTrain.key=x"], "ttrain."),
        (None, ["a=b\nc"], "line"),
    ],
)
def test_labels_that_cannot_be_are_refused_before_anything_runs(
    note: str | None, tag: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        labels_of(note, tag)
