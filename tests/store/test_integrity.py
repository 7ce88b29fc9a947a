"""No stage computes from damaged bytes: weights, shards, tokenizers."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.comparing import flip_bit
from support.tiny_stages import Home, build_stage, run_of, stage_settings

from ttrain.data.shards import ShardSet
from ttrain.engine import artifact_commands
from ttrain.engine.graph import Planned
from ttrain.errors import ArtifactError, DamagedFile, StageFailed
from ttrain.inference import loading
from ttrain.lineage import lookup
from ttrain.store import integrity
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.tasks import PRETRAIN, SFT, SHARDS, Stage

SETTINGS = stage_settings(1)


def build(home: Home, stage: Stage = PRETRAIN, **inputs: Artifact) -> Artifact:
    named = inputs or home.pretrain_inputs()
    return build_stage(stage, SETTINGS, home.store, named).artifact


@pytest.fixture
def fresh_home(tmp_path: Path) -> Home:
    return Home.make(tmp_path)


def test_weights_of_which_a_bit_flipped_are_refused_and_set_aside(fresh_home: Home) -> None:
    store, base = fresh_home.store, build(fresh_home)
    assert base.manifest["inputs_verified"]
    flip_bit(base.path / "model" / "model.safetensors")
    assert store.find("pretrain", base.key) == base, "only sizes and times are compared here"
    with pytest.raises(DamagedFile, match=r"model\.safetensors"):
        loading.load(lookup.resolve(str(base.path), store.root))
    with pytest.raises(StageFailed, match=r"model\.safetensors.*\w{64}.*\w{64}") as failed:
        build(fresh_home, SFT, base=base, shards=fresh_home.chats)
    moved = f"moved to {store.root / 'replaced'}: pretrain {base.key[:12]} (damaged); run the same"
    assert moved in str(failed.value)
    assert failed.value.is_mistake, "the same stage would find the same"
    assert store.artifacts("sft") == []
    assert store.find("pretrain", base.key) is None, "the next run finds its place empty"


def test_a_shard_of_which_a_bit_flipped_is_refused_where_it_is_read(fresh_home: Home) -> None:
    index = ShardSet(fresh_home.documents.path / "train").index
    flip_bit(fresh_home.documents.path / "train" / index["shards"][0]["file"])
    with pytest.raises(StageFailed, match=r"\.arrow.*sha256.*replaced.*shards-pretrain 1111"):
        build(fresh_home)
    for stage in ("pretrain", "shards-pretrain"):
        assert fresh_home.store.artifacts(stage) == []
    checkpoints = fresh_home.store.root.glob("work/pretrain/*/output/checkpoints/*")
    assert not list(checkpoints), "no step was trained on it"


def test_every_other_file_is_compared_before_a_process_starts(fresh_home: Home) -> None:
    flip_bit(fresh_home.documents.path / "train" / "index.json")
    with pytest.raises(StageFailed, match=r"train/index\.json is damaged"):
        build(fresh_home)
    assert not list(fresh_home.store.root.glob("work/pretrain/*/job.json"))


@pytest.mark.parametrize("name", ["train/index.json", "SHARD", "tokenizer.json"])
def test_damage_found_by_the_check_of_rows_is_set_aside(fresh_home: Home, name: str) -> None:
    sections = {"tracking": {"enabled": False}, "sft": {"tokens_per_step": 10**6}}
    settings = SETTINGS.replaced(sections)  # so that rows are counted
    damaged = fresh_home.tokenizer if name == "tokenizer.json" else fresh_home.chats
    shard = ShardSet(fresh_home.chats.path / "train").index["shards"][0]["file"]
    flip_bit(damaged.path / name.replace("SHARD", f"train/{shard}"))
    shards = Planned(SHARDS["sft"], "cached", (), sources={"tokenizer": fresh_home.tokenizer})
    sft_stage = Planned(SFT, "run", (), sources={"shards": "shards-sft"})
    execution = run_of(fresh_home.store, settings, [shards, sft_stage])
    execution.artifacts = {"shards-sft": fresh_home.chats}
    message = rf"stage sft: .* is damaged: .* moved to .*: {damaged.stage} {damaged.key[:12]}"
    with pytest.raises(StageFailed, match=message):
        execution.check_rows()
    assert execution.failures.keys() == {"sft"} and fresh_home.store.artifacts(damaged.stage) == []
    problem = fresh_home.store.manifest_problem(damaged.path)
    assert problem is None, "the next run finds its place empty"


def test_a_file_that_cannot_be_read_for_a_moment_is_not_set_aside(fresh_home: Home) -> None:
    path = fresh_home.tokenizer.path / "tokenizer.json"
    path.unlink()
    path.mkdir()  # an error that is not a missing file
    with pytest.raises(ArtifactError, match="directory") as refused:
        integrity.verify_artifact(fresh_home.tokenizer)
    assert not isinstance(refused.value, DamagedFile)


def publish_file(store: ArtifactStore, megabytes: int) -> Artifact:
    """An artifact with one file, whose megabytes differ."""
    output = store.work("pretrain", "k" * 64) / "output"
    output.mkdir(parents=True)
    blocks = [number.to_bytes(4, "big") * (1 << 18) for number in range(megabytes)]
    (output / "weights").write_bytes(b"".join(blocks))
    manifest = {"result": {}, "ingredients": {"files": {}}, "inputs": {}}
    return store.publish("pretrain", "k" * 64, output, manifest)


def test_a_flipped_bit_of_a_copied_file_is_found_by_its_digest(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    artifact = publish_file(store, 5)
    integrity.verify_artifact(artifact)
    os.utime(artifact.path / "weights", ns=(10**18, 10**18))  # as in a copied home
    assert store.damage(artifact) is None
    flip_bit(artifact.path / "weights")
    assert store.damage(artifact) == "weights was altered after it was published"
    with pytest.raises(DamagedFile, match=r"weights.*sha256"):
        integrity.verify_artifact(artifact)
    key_problem = "manifest.json says that it was made of other things than its key does"
    weights_problem = "weights was altered after it was published"
    assert artifact_commands.verify(artifact) == [key_problem, weights_problem]


def test_a_copy_that_shares_the_damaged_file_is_not_fetched(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    base = publish_file(store, 1)
    os.link(base.path / "weights", store.root / "linked by MLflow")

    class Copies:
        """Another place that has a copy of the model."""

        def manifest(self, stage: str, key: str) -> Mapping[str, Any] | None:
            return base.manifest if (stage, key) == (base.stage, base.key) else None

        def fetch(self, stage: str, key: str, name: str, to: Path) -> None:
            raise AssertionError

    elsewhere = ArtifactStore(store.root, Copies())
    flip_bit(base.path / "weights")
    assert store.set_damaged_aside(base.path, base)
    assert elsewhere.find("pretrain", base.key) is None
    base = replace(base, manifest={**base.manifest, "published": base.manifest["published"] + 60})
    assert elsewhere.find("pretrain", base.key), "one that was built again later is"
