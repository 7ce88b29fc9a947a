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
from ttrain.store.name_syntax import Registered
from ttrain.store.registry import Registry, Version

STAGES = ("tokenizer", "pretrain", "sft", "lora", "evaluate")
RESULT = {"metrics": {"bits_per_byte": 2.5}, "counts": {}}


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "home")


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
    *,
    registers: bool = True,
    name: str = "own",
    **settings: Any,
) -> PipelineRun:
    """An untracked run that took all its artifacts from the store, to its end."""
    tree = Settings(tracking={"enabled": False}, name=name, **settings)
    execution = run_of(store, tree, planned(*artifacts), registers=registers)
    execution.artifacts.update(artifacts)
    execution.finish(outcome)
    return execution


def test_a_completed_run_registers_its_models_as_one_set(store: ArtifactStore) -> None:
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
    changed_stages = {stage for stage, member in newest.items() if member.version == "2"}
    assert changed_stages == {"lora"} and newest.keys() == members.keys()
    assert finish(store, artifacts, name="other").model_set == "1", "known artifacts, another name"
    other = Registry(store.root).resolve(Registered("other-sft", None, "1"))
    assert isinstance(other, Version) and other.key == "sft-21"
    runs = [*store.root.glob("runs/*.json")]
    with pytest.raises(UsageError, match="own-sft"):
        finish(store, artifacts, name="own-sft")
    assert [*store.root.glob("runs/*.json")] == runs, "refused before the run"


def test_other_runs_register_nothing(store: ArtifactStore) -> None:
    artifacts = published(store, 23)
    second_node = {"nodes": 2, "node_rank": 1, "rendezvous": "localhost:1"}
    unevaluated = {stage: each for stage, each in artifacts.items() if stage != "evaluate"}
    finish(store, unevaluated)
    finish(store, artifacts, "interrupted")
    finish(store, artifacts, registers=False)
    finish(store, artifacts, runtime=second_node)
    assert Registry(store.root).sets() == []
