"""Runs of pipelines: their log, progress and system metrics, and how they end."""

import io
import json
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console
from support.night_files import artifact
from support.shard_sets import write_lines
from support.tiny_stages import Home, planned, run_of

from ttrain.config import Settings
from ttrain.config.loading import load
from ttrain.engine import display as displays
from ttrain.engine import launch, stage_worker
from ttrain.engine.display import Display
from ttrain.engine.execution import PipelineRun
from ttrain.engine.graph import Graph, Plan
from ttrain.engine.planner import plan
from ttrain.engine.stop_request import StopRequest
from ttrain.engine.system_metrics import SystemMetrics, file_name
from ttrain.errors import Interrupted, NothingNew, StageFailed, UsageError
from ttrain.flows.engine import RunOptions, run_pipeline
from ttrain.store import runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.store.registry import Registry
from ttrain.store.runs import RunRecord
from ttrain.tasks import SHARDS_PRETRAIN

FIXED = ["tracking.enabled=false", "reading.near_duplicates=0.8", "runtime.workers=1"]
STAGES = ("tokenizer", "pretrain", "sft", "lora", "evaluate")
RESULT = {"metrics": {"bits_per_byte": 2.5}, "counts": {}}
SECOND_NODE = {"nodes": 2, "node_rank": 1, "rendezvous": "localhost:1"}


def test_a_log_line_has_its_time_and_stays_one_line(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, "full", [], {})
    record.log("pretrain", "2026-11-21 22:59:54,854 rank 1: step 5/40")
    record.log("sft", "bar\rbaz\n2026-11-21 00:00:00 lora: forged \x1b[31m\u2028 東京\tok")
    timed, untimed, end = record.path.with_suffix(".log").read_text(encoding="utf-8").split("\n")
    assert timed == "2026-11-21 22:59:54 pretrain: rank 1: step 5/40"
    forged = r"bar\rbaz\n2026-11-21 00:00:00 lora: forged \x1b[31m\u2028 東京" + "\tok"
    assert re.fullmatch(r"\d{4}(-\d\d){2} \d\d(:\d\d){2} sft: " + re.escape(forged), untimed)
    assert end == ""


def test_progress_shows_speed_and_time_left(monkeypatch: Any) -> None:
    """An earlier attempt trained on the first 1,000 tokens."""
    clock = [100.0]
    monkeypatch.setattr(displays.time, "monotonic", lambda: clock[0])
    output = io.StringIO()
    display = Display(Console(file=output, width=150))
    for done in (1000, 2000, 3000):
        progress = {"done": done, "total": 10_000, "first": 1000, "seconds": done / 50 - 20}
        metrics = {"unit": "tokens", "figures": {"loss": 7.25}}
        display("pretrain", "progressed", {**progress, **metrics})
        clock[0] += 20
    display.close()
    shown = output.getvalue()
    assert "30 %" in shown and "loss 7.250, 50 tokens/s, 2 min 20 s left" in shown


def test_system_metrics_of_a_continued_stage_follow_its_last_complete_line(tmp_path: Path) -> None:
    path = tmp_path / "system-node1.jsonl"
    lines = '{"step": 10}\n{"step": 20}\n'
    path.write_text(lines + '{"step": 30, "ti')
    SystemMetrics(tmp_path / file_name(1), 600, node=1).stop()
    last = path.read_text().removeprefix(lines)
    assert last.startswith('{"step": 21, ') and last.count("\n") == 1
    assert all(name.startswith("system/node_1/") for name in json.loads(last)["metrics"])


def test_a_stage_is_sampled_and_never_fails_by_it(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.WARNING, "ttrain")
    (tmp_path / "file").write_text("where its directory should be")
    for name, seconds, warnings in (("off", 0, 0), ("on", 600, 0), ("file", 600, 1)):
        job = {"runtime": {"system_metrics_seconds": seconds, "nodes": 1}, "output": name}
        with stage_worker.sample_system_metrics(tmp_path, job):
            pass
        assert len(caplog.records) == warnings
    assert [*tmp_path.rglob("system*")] == [tmp_path / "on" / "run" / "system.jsonl"]


@pytest.mark.parametrize(("name", "kept"), [("teacher", True), ("evaluate", False)])
def test_a_killed_scoring_of_rows_keeps_its_files(
    name: str, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ArtifactStore(tmp_path)
    block = store.work(name, "k" * 64) / "output" / "000000.safetensors"
    block.parent.mkdir(parents=True)
    block.touch()
    killed = Mock(side_effect=StageFailed("killed"))
    monkeypatch.setattr(launch.processes, "run", killed)
    stage = replace(planned(name)[0], key="k" * 64)
    with pytest.raises(StageFailed, match="killed"):
        launch.build(stage, Settings(), store, Mock(), StopRequest())
    assert block.exists() == kept


def test_a_deadline_stops_only_a_run_that_has_not_ended(tmp_path: Path) -> None:
    settings = load(["tracking.enabled=false"], environment={}).settings
    execution = run_of(ArtifactStore(tmp_path), settings, planned("sft"))
    began = time.time()
    with execution.stopping_at(began + 0.2):
        pass
    execution.wait(0.4)
    assert time.time() - began >= 0.4 and not execution.signum, "it had ended"
    began = time.time()
    with execution.stopping_at(began + 0.3):
        execution.wait(60)  # ends with the request to stop
        assert 0.3 <= time.time() - began < 30
    execution.ask_to_stop(2, "cancelled in Prefect")
    with pytest.raises(Interrupted, match="deadline reached"):  # the first reason stays
        execution.raise_if_signalled()


def make_shards(home: Home, texts: Sequence[str], **learnt: Artifact) -> PipelineRun:
    path = write_lines(home.store.root.parent / "docs.jsonl", [{"text": text} for text in texts])
    settings = load([f"data.pretrain={path}", *FIXED], environment={}).settings
    graph = Graph()
    graph.add(SHARDS_PRETRAIN, tokenizer=home.tokenizer, **learnt)
    planned = Plan("nightly", settings, home.store, graph, plan(graph, settings, home.store))
    return run_pipeline(planned, Console(quiet=True), RunOptions("none"))


def test_a_run_without_a_new_document_ends_as_nothing_new(tmp_path: Path) -> None:
    home = Home.make(tmp_path / "home")
    texts = [" ".join(f"{word}{number}" for word in range(40)) for number in range(40)]
    learnt = make_shards(home, texts).artifacts["shards-pretrain"]
    with pytest.raises(NothingNew, match=r"data\.pretrain: of 40 rows 40 are near-duplicates"):
        make_shards(home, [f"{text} more" for text in texts], **{"learnt-0000": learnt})
    [night, _] = runs.history(home.store.root)
    assert night["outcome"] == night["stages"][0]["outcome"] == "nothing-new"
    assert "error" not in night


def finish(
    home: Path,
    outcome: str = "completed",
    registers: bool = True,
    stages: tuple[str, ...] = STAGES,
    lora: str = "lora",
    **settings: Any,
) -> PipelineRun:
    """An untracked run that took all its artifacts from the store, to its end."""
    tree = Settings(**{"tracking": {"enabled": False}, "name": "own", **settings})
    store = ArtifactStore(home)
    execution = run_of(store, tree, planned(*stages), registers=registers)
    for stage in stages:
        key = lora if stage == "lora" else stage
        files = {f"{name}/config.json": key for name in ("model", "adapter")}
        result = RESULT if stage == "evaluate" else {}
        execution.artifacts[stage] = artifact(store, stage, key, files, result=result)
    execution.finish(outcome)
    return execution


def test_a_completed_run_registers_its_models_as_one_set(tmp_path: Path) -> None:
    run = finish(tmp_path)
    (own,) = Registry(tmp_path).sets("own")
    names = {stage: member.name for stage, member in own.members.items()}
    suffixes = {"tokenizer": "tokenizer", "pretrain": "base", "sft": "sft", "lora": "lora"}
    assert names == {stage: f"own-{suffix}" for stage, suffix in suffixes.items()}
    assert (own.run, own.aliases) == (run.record.run, ("challenger",))
    assert own.metrics == RESULT["metrics"]
    assert finish(tmp_path, lora="changed").model_set == "2"
    newest = Registry(tmp_path).find("own", "2").members
    versions = {stage: member.version for stage, member in newest.items()}
    assert versions == {**dict.fromkeys(names, "1"), "lora": "2"}
    assert finish(tmp_path, name="other").model_set == "1", "known artifacts, another name"
    runs = [*tmp_path.glob("runs/*.json")]
    with pytest.raises(UsageError, match="own-sft"):
        finish(tmp_path, name="own-sft")
    assert [*tmp_path.glob("runs/*.json")] == runs, "refused before the run"


def test_other_runs_register_nothing(tmp_path: Path) -> None:
    finish(tmp_path, stages=STAGES[:-1])
    finish(tmp_path, "interrupted")
    finish(tmp_path, registers=False)
    finish(tmp_path, runtime=SECOND_NODE)
    assert Registry(tmp_path).sets() == []
