"""The models that a run registers at its end."""

from pathlib import Path
from typing import Any

import pytest
from support.night_files import artifact
from support.tiny_stages import planned, run_of

from ttrain.config import Settings
from ttrain.engine.execution import PipelineRun
from ttrain.errors import UsageError
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.registry import Registry

STAGES = ("tokenizer", "pretrain", "sft", "lora", "evaluate")
RESULT = {"metrics": {"bits_per_byte": 2.5}, "counts": {}}
SECOND_NODE = {"nodes": 2, "node_rank": 1, "rendezvous": "localhost:1"}


def finish(
    store: ArtifactStore,
    outcome: str = "completed",
    registers: bool = True,
    stages: tuple[str, ...] = STAGES,
    lora: str = "lora",
    **settings: Any,
) -> PipelineRun:
    """An untracked run that took all its artifacts from the store, to its end."""
    tree = Settings(**{"tracking": {"enabled": False}, "name": "own", **settings})
    execution = run_of(store, tree, planned(*stages), registers=registers)
    for stage in stages:
        key = lora if stage == "lora" else stage
        files = {f"{name}/config.json": key for name in ("model", "adapter")}
        result = RESULT if stage == "evaluate" else {}
        execution.artifacts[stage] = artifact(store, stage, key, files, result=result)
    execution.finish(outcome)
    return execution


def test_a_completed_run_registers_its_models_as_one_set(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    run = finish(store)
    (own,) = Registry(store.root).sets("own")
    names = {stage: member.name for stage, member in own.members.items()}
    trained = {"pretrain": "own-base", "sft": "own-sft", "lora": "own-lora"}
    assert names == {"tokenizer": "own-tokenizer", **trained} and own.run == run.record.run
    assert own.metrics == RESULT["metrics"] and own.aliases == ("challenger",)
    assert finish(store, lora="changed").model_set == "2"
    newest = Registry(store.root).find("own", "2").members
    versions = {stage: member.version for stage, member in newest.items()}
    assert versions == {**dict.fromkeys(names, "1"), "lora": "2"}
    assert finish(store, name="other").model_set == "1", "known artifacts, another name"
    runs = [*store.root.glob("runs/*.json")]
    with pytest.raises(UsageError, match="own-sft"):
        finish(store, name="own-sft")
    assert [*store.root.glob("runs/*.json")] == runs, "refused before the run"


def test_other_runs_register_nothing(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    finish(store, stages=STAGES[:-1])
    finish(store, "interrupted")
    finish(store, registers=False)
    finish(store, runtime=SECOND_NODE)
    assert Registry(store.root).sets() == []
