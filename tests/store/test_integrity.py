"""No stage computes from bytes that were not published: weights, shards, tokenizers, whatever a disk makes of them."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from core.test_hashing import LONG_AGO
from support.comparing import flip_bit
from support.tiny_stages import Home, Watcher, build_stage, run_of, stage_settings

from ttrain.config import Settings
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


def build(stage: Stage, settings: Settings, home: Home, inputs: Mapping[str, Artifact]) -> Artifact:
    return build_stage(stage, settings, home.store, inputs, Watcher()).artifact


@pytest.fixture
def fresh_home(tmp_path: Path) -> Home:
    return Home.make(tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path)


def test_weights_of_which_a_bit_flipped_are_refused_and_set_aside(fresh_home: Home) -> None:
    settings = stage_settings(1)
    base = build(PRETRAIN, settings, fresh_home, fresh_home.pretrain_inputs())
    assert base.manifest["inputs_verified"]
    flip_bit(base.path / "model" / "model.safetensors")
    assert fresh_home.store.find("pretrain", base.key) == base, (
        "a look at sizes and times sees nothing"
    )
    with pytest.raises(DamagedFile, match=r"model\.safetensors is damaged"):
        loading.load(lookup.resolve(str(base.path), fresh_home.store.root))
    with pytest.raises(
        StageFailed, match=r"model\.safetensors is damaged: its sha256 is \w{64}, but \w{64} was"
    ) as failed:
        build(SFT, settings, fresh_home, {"base": base, "shards": fresh_home.chats})
    assert (
        f"moved to {fresh_home.store.root / 'replaced'}: pretrain {base.key[:12]} (damaged); run the same"
        in str(failed.value)
    )
    assert failed.value.is_mistake, "the same stage would find the same"
    assert fresh_home.store.artifacts("sft") == []
    assert fresh_home.store.find("pretrain", base.key) is None, "the next run finds its place empty"


def test_a_shard_of_which_a_bit_flipped_is_refused_where_it_is_read_and_set_aside(
    fresh_home: Home,
) -> None:
    index = ShardSet(fresh_home.documents.path / "train").index
    flip_bit(fresh_home.documents.path / "train" / index["shards"][0]["file"])
    with pytest.raises(
        StageFailed, match=r"\.arrow is damaged: its sha256 is .* moved to .*shards-pretrain 1111"
    ):
        build(PRETRAIN, stage_settings(1), fresh_home, fresh_home.pretrain_inputs())
    assert (
        fresh_home.store.artifacts("pretrain") == []
        and fresh_home.store.artifacts("shards-pretrain") == []
    )
    assert not list(fresh_home.store.root.glob("work/pretrain/*/output/checkpoints/*")), (
        "no step was made of it"
    )


def test_every_other_file_is_compared_before_a_process_starts(fresh_home: Home) -> None:
    flip_bit(fresh_home.documents.path / "train" / "index.json")
    with pytest.raises(StageFailed, match=r"train/index\.json is damaged"):
        build(PRETRAIN, stage_settings(1), fresh_home, fresh_home.pretrain_inputs())
    assert not list(fresh_home.store.root.glob("work/pretrain/*/job.json"))


@pytest.mark.parametrize("name", ["train/index.json", "SHARD", "tokenizer.json"])
def test_damage_that_the_check_of_rows_meets_is_set_aside_so_that_the_next_run_heals_it(
    fresh_home: Home, name: str
) -> None:
    settings = stage_settings(1)
    sft = settings.sft.model_copy(
        update={"tokens_per_step": 10**6}
    )  # so that the rows have to be counted
    settings = settings.model_copy(
        update={"sft": sft, "tracking": settings.tracking.model_copy(update={"enabled": False})}
    )
    damaged = fresh_home.tokenizer if name == "tokenizer.json" else fresh_home.chats
    shard = ShardSet(fresh_home.chats.path / "train").index["shards"][0]["file"]
    flip_bit(damaged.path / name.replace("SHARD", f"train/{shard}"))
    shards = Planned(SHARDS["sft"], "cached", (), sources={"tokenizer": fresh_home.tokenizer})
    execution = run_of(
        fresh_home.store,
        settings,
        [shards, Planned(SFT, "run", (), sources={"shards": "shards-sft"})],
    )
    execution.artifacts = {"shards-sft": fresh_home.chats}
    with pytest.raises(
        StageFailed,
        match=rf"stage sft: .* is damaged: .* moved to .*: {damaged.stage} {damaged.key[:12]}",
    ):
        execution.check_rows()
    assert execution.failures.keys() == {"sft"} and fresh_home.store.artifacts(damaged.stage) == []
    assert fresh_home.store.manifest_problem(damaged.path) is None, (
        "the next run finds its place empty"
    )


def test_a_file_that_cannot_be_read_for_a_moment_is_not_set_aside(fresh_home: Home) -> None:
    path = fresh_home.tokenizer.path / "tokenizer.json"
    path.unlink()
    path.mkdir()  # an error that is not a missing file
    with pytest.raises(ArtifactError, match="cannot be read: Is a directory") as refused:
        integrity.verify_artifact(fresh_home.tokenizer)
    assert not isinstance(refused.value, DamagedFile)


def publish_file(store: ArtifactStore, size: int, key: str = "k" * 64) -> Artifact:
    """An artifact with one file."""
    output = store.work("pretrain", key) / "output"
    output.mkdir(parents=True)
    megabytes = [number.to_bytes(4, "big") * (1 << 18) for number in range(-(-size >> 20))]
    (output / "weights").write_bytes(b"".join(megabytes)[:size])
    return store.publish(
        "pretrain", key, output, {"result": {}, "ingredients": {"files": {}}, "inputs": {}}
    )


def test_a_flipped_bit_of_a_file_that_was_copied_is_found_by_its_digest(
    store: ArtifactStore,
) -> None:
    artifact = publish_file(store, 5 << 20)
    integrity.verify_artifact(artifact)
    os.utime(artifact.path / "weights", ns=(LONG_AGO, LONG_AGO))  # as in a copied home
    assert store.damage(artifact) is None
    flip_bit(artifact.path / "weights")
    assert store.damage(artifact) == "weights was altered after it was published"
    with pytest.raises(DamagedFile, match=r"weights is damaged: its sha256 is"):
        integrity.verify_artifact(artifact)
    assert artifact_commands.verify(artifact) == [
        "manifest.json says that it was made of other things than its key does",
        "weights was altered after it was published",
    ]


def test_a_copy_that_shares_the_damaged_file_is_not_taken_until_it_was_built_anew(
    store: ArtifactStore,
) -> None:
    base = publish_file(store, 10)
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
    assert elsewhere.find("pretrain", base.key)
