"""What a stage of a tracked run leaves in MLflow beside its curves: the machine, texts, logs."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.tiny_stages import Home, run_of, stage_settings
from support.tracked_stores import client_of, files_of, only

from ttrain.config import Settings
from ttrain.engine.graph import Planned
from ttrain.engine.labels import labels_of
from ttrain.errors import StageFailed, UsageError
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
    files = files_of(child)
    machine = {"cpu_utilization_percentage", "system_memory_usage_megabytes"}
    assert {f"system/{name}" for name in machine} <= {*child.data.metrics}
    assert {"loss", "eval/time_share"} <= {*child.data.metrics}
    samples = sorted(name for name in files if "/samples/" in name)
    assert samples == [f"pretrain/run/samples/step-{step:08d}.txt" for step in (3, 6)]
    assert all(files[name].read_text(encoding="utf-8").startswith("=== ") for name in samples)
    metric = "eval/documents/bits_per_byte"
    curve = client_of(stage_home.store.root).get_metric_history(child.info.run_id, metric)
    assert [point.step for point in curve] == [3, 6] and curve[0].value > curve[1].value
    assert "pretrain/run/evaluations/step-00000006.json" in files
    text = files_of(parent)[log.name].read_text()
    assert text == log.read_text()
    assert all(f" pretrain: {event}" in text for event in ("started", "step 6/6", "completed"))
    assert "step 6/6" in files["pretrain/run/log.txt"].read_text()


def test_a_note_and_tags_are_shown_masked_and_count_in_no_key(stage_home: Home) -> None:
    tags = ["purpose=a smaller rate", "hub.token=x1"]
    shown = {"purpose": "a smaller rate", "hub.token": "***"}
    labels = labels_of("why: <b>\nsk-abcdefghijklmnopqrstu", tags)
    by_night = stage_settings(2, night={"start": "00:00", "end": "00:00"})
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


@pytest.mark.parametrize(
    ("note", "tag", "message"),
    [
        ("x" * 2001, [], "2001"),
        (None, ["purpose="], "KEY=VALUE"),
        (None, ["TTrain.key=x"], "ttrain."),
        (None, ["a=b\nc"], "line"),
    ],
)
def test_invalid_labels_are_refused(note: str | None, tag: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        labels_of(note, tag)
