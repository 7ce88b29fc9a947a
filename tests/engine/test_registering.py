"""What a run registers at its end, and the champion as the baseline of a run."""

from pathlib import Path
from typing import Any

import pytest
from support.night_files import artifact
from support.tiny_stages import planned, run_of

from ttrain.config import Settings
from ttrain.core.files import read_json
from ttrain.engine.execution import PipelineRun
from ttrain.errors import UsageError
from ttrain.store import artifacts, layout
from ttrain.store.name_syntax import Registered
from ttrain.store.registry import Registry, Version

STAGES = ("tokenizer", "pretrain", "sft", "lora", "evaluate")


def published(store: artifacts.ArtifactStore, number: int) -> dict[str, layout.Artifact]:
    """An artifact of each stage, as a run leaves them."""
    found = {}
    for stage in STAGES:
        files = {f"{name}/config.json": f"{stage} {number}" for name in ("model", "adapter")}
        result = {"metrics": {"bits_per_byte": 2.5}, "counts": {}} if stage == "evaluate" else {}
        files["samples.json"] = "{}"
        found[stage] = artifact(store, stage, f"{stage}-{number}", files, result=result)
    return found


def ran(
    store: artifacts.ArtifactStore,
    found: dict[str, layout.Artifact],
    outcome: str = "completed",
    *,
    registers: bool = True,
    **settings: Any,
) -> PipelineRun:
    """A run that took all its artifacts from the store, to its end; it is not tracked."""
    tree = Settings(tracking={"enabled": False}, **settings)
    execution = run_of(store, tree, planned(*found), registers=registers)
    execution.artifacts.update(found)
    execution.finish(outcome)
    return execution


def test_a_run_that_ends_well_registers_its_models_as_one_set(tmp_path: Path) -> None:
    store = artifacts.ArtifactStore(tmp_path / "home")
    found = published(store, 21)
    first = ran(store, found, name="own")
    assert first.model_set == "1"
    (own,) = Registry(tmp_path / "home").sets("own")
    assert {
        stage: (member.name, member.version, member.key) for stage, member in own.members.items()
    } == {
        "tokenizer": ("own-tokenizer", "1", "tokenizer-21"),
        "pretrain": ("own-base", "1", "pretrain-21"),
        "sft": ("own-sft", "1", "sft-21"),
        "lora": ("own-lora", "1", "lora-21"),
    }
    assert (own.run, own.keys["evaluate"], own.metrics) == (
        first.record.run,
        "evaluate-21",
        {"bits_per_byte": 2.5},
    )
    assert own.aliases == ("challenger",)
    assert read_json(first.record.path)["model_set"] == "own/1"
    changed = {**found, "lora": published(store, 22)["lora"]}
    assert ran(store, changed, name="own").model_set == "2"
    newest = Registry(store.root).find("own", "2")
    assert {stage: member.version for stage, member in newest.members.items()} == {
        "tokenizer": "1",
        "pretrain": "1",
        "sft": "1",
        "lora": "2",
    }
    assert ran(store, found, name="other").model_set == "1", (
        "another name registers from the store what is there"
    )
    other = Registry(store.root).resolve(Registered("other-sft", None, "1"))
    assert isinstance(other, Version) and other.key == "sft-21"


def test_a_run_that_left_a_stage_out_did_not_end_well_or_is_not_to_register_registers_no_set(
    tmp_path: Path,
) -> None:
    store = artifacts.ArtifactStore(tmp_path / "home")
    found = published(store, 23)
    without = {stage: artifact for stage, artifact in found.items() if stage != "evaluate"}
    assert ran(store, without, name="own").model_set is None
    assert ran(store, found, "interrupted", name="own").model_set is None
    assert ran(store, found, registers=False, name="own").model_set is None
    assert (
        ran(
            store,
            found,
            name="own",
            runtime={"nodes": 2, "node_rank": 1, "rendezvous": "localhost:1"},
        ).model_set
        is None
    )
    assert Registry(store.root).sets() == []


def test_a_name_of_another_pipelines_models_is_refused_before_the_run_begins(
    tmp_path: Path,
) -> None:
    store = artifacts.ArtifactStore(tmp_path / "home")
    found = published(store, 24)
    ran(store, found, name="own")
    records = list((tmp_path / "home" / "runs").glob("*.json"))
    with pytest.raises(
        UsageError, match=r"name is own-sft, but own-sft already names models of another pipeline"
    ):
        ran(store, found, name="own-sft")
    assert list((tmp_path / "home" / "runs").glob("*.json")) == records
