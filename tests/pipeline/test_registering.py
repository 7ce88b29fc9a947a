"""What a run registers at its end, and the champion as the baseline of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.tiny_stages import planned

from ttrain.config import Settings
from ttrain.core.files import read_json, write_json
from ttrain.errors import UsageError
from ttrain.evaluate.task_result import ScoreTable
from ttrain.pipeline import run_summary
from ttrain.pipeline.execution import PipelineRun
from ttrain.pipeline.progress_display import Display
from ttrain.store import artifacts, layout
from ttrain.store.registry import Registry

STAGES = ("tokenizer", "pretrain", "sft", "lora", "evaluate")


def published(store: artifacts.ArtifactStore, root: Path, number: int) -> dict[str, layout.Artifact]:
    """An artifact of each stage, as a run leaves them."""
    found = {}
    for stage in STAGES:
        output = root / f"{stage}-{number}"
        for name in ("model", "adapter"):
            (output / name).mkdir(parents=True)
            (output / name / "config.json").write_text(f"{stage} {number}")
        write_json(output / "samples.json", {})
        result = {"metrics": {"bits_per_byte": 2.5}, "counts": {}} if stage == "evaluate" else {}
        manifest = {"result": result, "inputs": {}, "ingredients": {"code": {}}}
        found[stage] = store.publish(stage, f"{stage}-{number}", output, manifest)
    return found


def ran(
    store: artifacts.ArtifactStore, found: dict[str, layout.Artifact], outcome: str = "completed", **settings: Any
) -> PipelineRun:
    """A run that took all its artifacts from the store, to its end."""
    execution = PipelineRun("full", Settings(**settings), store, Display(Console(quiet=True)), planned(*found))
    execution.artifacts.update(found)
    execution.finish(outcome)
    return execution


def test_a_run_that_ends_well_registers_its_models_as_one_set(sets_home: Path, tmp_path: Path) -> None:
    store = artifacts.ArtifactStore(sets_home)
    found = published(store, tmp_path / "first", 21)
    first = ran(store, found, name="own")
    assert first.model_set == "1"
    (own,) = tracking.list_sets(sets_home, "own")
    assert {stage: (member.name, member.version, member.key) for stage, member in own.members.items()} == {
        "tokenizer": ("own-tokenizer", "1", "tokenizer-21"),
        "pretrain": ("own-base", "1", "pretrain-21"),
        "sft": ("own-sft", "1", "sft-21"),
        "lora": ("own-lora", "1", "lora-21"),
    }
    assert (own.run, own.keys["evaluate"], own.metrics) == (first.record.run, "evaluate-21", {"bits_per_byte": 2.5})
    assert (own.aliases, own.run_id) == (("challenger",), first.tracked_run)
    assert read_json(first.record.path)["model_set"] == "own/1"
    changed = {**found, "lora": published(store, tmp_path / "second", 22)["lora"]}
    assert ran(store, changed, name="own").model_set == "2"
    newest = tracking.Champions(sets_home).find("own", "2")
    assert {stage: member.version for stage, member in newest.members.items()} == {
        "tokenizer": "1", "pretrain": "1", "sft": "1", "lora": "2",
    }  # fmt: skip
    assert ran(store, found, name="other").model_set == "1", "another name registers from the store what is there"
    kept = tracking.find_version(sets_home, Registered("other-sft", None, "1")).source
    assert kept is not None
    assert (kept / "config.json").read_text() == "sft 21"


def test_a_run_that_left_a_stage_out_did_not_end_well_or_is_not_tracked_registers_no_set(
    sets_home: Path, tmp_path: Path
) -> None:
    store = artifacts.ArtifactStore(sets_home)
    found = published(store, tmp_path, 23)
    without = {stage: artifact for stage, artifact in found.items() if stage != "evaluate"}
    assert ran(store, without, name="own").model_set is None
    assert ran(store, found, "interrupted", name="own").model_set is None
    assert ran(store, found, name="own", tracking={"enabled": False}).model_set is None
    assert tracking.list_sets(sets_home, "own") == []


def evaluated(store: artifacts.ArtifactStore, number: int, documents: list[str], nats: float) -> layout.Artifact:
    """The evaluation of the set of this number, on these documents and on chats that are the same for all."""
    output = store.work("evaluate", f"evaluate-{number}") / "output"
    output.mkdir(parents=True)
    scores = ScoreTable()
    scores.part("documents", documents, [len(text) for text in documents])
    scores.part("chats", ["a chat"])
    figures = {
        "bits_per_byte": scores.figure("bits_per_byte", "documents", "base", [(nats, 2)] * len(documents), per="bytes"),
        "chat_loss_sft": scores.figure("chat_loss_sft", "chats", "sft", [(nats, 4)], per="tokens"),
    }
    scores.write(output)
    result = {"metrics": figures, "intervals": {name: [value, value] for name, value in figures.items()}}
    return store.publish("evaluate", f"evaluate-{number}", output, {"result": result, "inputs": {}, "ingredients": {}})


def test_a_run_has_the_champion_as_a_baseline_where_it_scored_the_same_records(sets_home: Path, monkeypatch: Any) -> None:
    store = artifacts.ArtifactStore(sets_home)
    evaluated(store, 1, ["one", "two"], 4.0)
    same, other = evaluated(store, 2, ["one", "two"], 2.0), evaluated(store, 3, ["one", "three"], 2.0)
    assert run_summary.of(same, "mine", store) == {}, "nothing is champion"
    tracking.Champions(sets_home).promote("mine", "1")
    found = run_summary.of(same, "mine", store)["evaluate-champion"]
    assert found["metrics"] == {"bits_per_byte": 8 / 6, "chat_loss_sft": 1.0}
    assert set(found["intervals"]) == {*found["metrics"]}
    assert set(run_summary.of(other, "mine", store)["evaluate-champion"]["metrics"]) == {"chat_loss_sft"}
    assert run_summary.of(same, "another", store) == {}
    scores = read_json(other.path / "scores.json") or {}
    scores["parts"]["chats"]["tokens"] = [5]
    (other.path / "scores.json").unlink()  # a link into the store's own
    write_json(other.path / "scores.json", scores)
    found = run_summary.of(other, "mine", store)["evaluate-champion"]
    assert found["metrics"] == {}, "a loss per token of another tokenizer tells nothing"
    tracking.Champions(sets_home).promote("mine", "2")
    assert run_summary.of(same, "mine", store) == {}, "it is itself the champion"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert run_summary.of(other, "mine", store) == {}, "nobody waits for a server for the sake of a baseline"


