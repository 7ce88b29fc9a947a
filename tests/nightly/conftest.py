"""A pipeline's nights, a store and a champion in it."""

from pathlib import Path

import pytest
from support.night_files import artifact
from support.planned_homes import remember_modules

from ttrain.nightly.records import Champion, Nights
from ttrain.store.artifacts import ArtifactStore


@pytest.fixture
def known(tmp_path: Path) -> Nights:
    nights = Nights(tmp_path, "mine")
    nights.directory.mkdir(parents=True)  # as taking the lock does
    return nights


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    remember_modules(tmp_path / "home")  # for the plans of nights
    return ArtifactStore(tmp_path / "home")


@pytest.fixture
def champion(store: ArtifactStore) -> Champion:
    files = {"files": {"train": [{"name": "f", "sha256": "f"}]}}
    inputs = {"shards": {"stage": "shards-pretrain", "key": "s", "content": ""}}
    model = {"model/config.json": "{}", "model/model.safetensors": ""}
    artifact(store, "shards-pretrain", "s", {"heldout/index.json": "{}"}, ingredients=files)
    artifact(store, "tokenizer", "t", {"tokenizer.json": "{}"})
    artifact(store, "pretrain", "p", model, inputs=inputs)
    artifact(store, "sft", "q", {"model/config.json": "{}"})
    return Champion("7", {"tokenizer": "t", "pretrain": "p", "sft": "q"})
