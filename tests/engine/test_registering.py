"""The models that a run registers at its end."""

from pathlib import Path
from typing import Any

import pytest
from support.night_files import artifact
from support.tiny_stages import planned, run_of

from ttrain.config import Settings
from ttrain.core.files import read_json
from ttrain.engine.execution import PipelineRun
from ttrain.errors import UsageError
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.store.registry import Registry

STAGES = ("tokenizer", "pretrain", "sft", "lora", "evaluate")
RESULT = {"metrics": {"bits_per_byte": 2.5}, "counts": {}}


def published(store: ArtifactStore, number: int) -> dict[str, Artifact]:
    """An artifact of each stage, as a run leaves them."""
    artifacts = {}
    for stage in STAGES:
        files = {f"{name}/config.json": f"{stage} {number}" for name in ("model", "adapter")}
        result = RESULT if stage == "evaluate" else {}
        artifacts[stage] = artifact(store, stage, f"{stage}-{number}", files, result=result)
    return artifacts


def finish(
    store: ArtifactStore,
    artifacts: dict[str, Artifact],
    outcome: str = "completed",
    registers: bool = True,
    **settings: Any,
) -> PipelineRun:
    """An untracked run that took all its artifacts from the store, to its end."""
    tree = Settings(**{"tracking": {"enabled": False}, "name": "own", **settings})
    execution = run_of(store, tree, planned(*artifacts), registers=registers)
    execution.artifacts.update(artifacts)
    execution.finish(outcome)
    return execution


def test_a_completed_run_registers_its_models_as_one_set(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    artifacts = published(store, 21)
    run = finish(store, artifacts)
    assert run.model_set == "1" and read_json(run.record.path)["model_set"] == "own/1"
    (own,) = Registry(store.root).sets("own")
    members = {stage: (each.name, each.version, each.key) for stage, each in own.members.items()}
    assert members == {
        "tokenizer": ("own-tokenizer", "1", "tokenizer-21"),
        "pretrain": ("own-base", "1", "pretrain-21"),
        "sft": ("own-sft", "1", "sft-21"),
        "lora": ("own-lora", "1", "lora-21"),
    }
    assert (own.run, own.keys["evaluate"]) == (run.record.run, "evaluate-21")
    assert own.metrics == RESULT["metrics"] and own.aliases == ("challenger",)
    changed = {**artifacts, "lora": published(store, 22)["lora"]}
    assert finish(store, changed).model_set == "2"
    newest = Registry(store.root).find("own", "2").members
    versions = {stage: member.version for stage, member in newest.items()}
    assert versions == {**dict.fromkeys(members, "1"), "lora": "2"}
    assert finish(store, artifacts, name="other").model_set == "1", "known artifacts, another name"
    runs = [*store.root.glob("runs/*.json")]
    with pytest.raises(UsageError, match="own-sft"):
        finish(store, artifacts, name="own-sft")
    assert [*store.root.glob("runs/*.json")] == runs, "refused before the run"


def test_other_runs_register_nothing(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    artifacts = published(store, 23)
    second_node = {"nodes": 2, "node_rank": 1, "rendezvous": "localhost:1"}
    unevaluated = {stage: each for stage, each in artifacts.items() if stage != "evaluate"}
    finish(store, unevaluated)
    finish(store, artifacts, "interrupted")
    finish(store, artifacts, registers=False)
    finish(store, artifacts, runtime=second_node)
    assert Registry(store.root).sets() == []
