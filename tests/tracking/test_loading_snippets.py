"""What MLflow needs to open a registered model alone. That it does, without ttrain: full/test_lineage_pipeline.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from support.loadable_models import adapted, fresh

from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.tracking.tracked_runs import ADAPTER, BASE, MODEL, loadable


def artifact(directory: Path, stage: str, inputs: Mapping[str, Any] | None = None) -> Artifact:
    libraries = {"torch": "2.13.0+cpu", "transformers": "5.23.0"}
    manifest = {
        "published": 1_800_000_000.5,
        "files": {},
        "inputs": inputs or {},
        "result": {},
        "ingredients": {"code": {"a": "b"}, "settings": {f"{stage}.seed": 4}},
        "provenance": {
            "python": "3.11.7",
            "libraries": libraries,
            "commit": "c0ffee",
            "run": "full-1",
        },
    }
    return Artifact(stage, "k" * 64, directory, manifest)


def test_the_weights_are_named_where_they_are_and_not_given_a_second_time(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    model = fresh(store.path("sft", "b" * 64))
    files = loadable(artifact(model.parent, "sft"), MODEL, store)
    assert not [name for name in files if name.endswith(".safetensors")]
    described = yaml.safe_load(str(files["MLmodel"]))
    assert described["flavors"]["transformers"]["model_binary"] == "."
    assert described["metadata"]["ttrain.key"] == "k" * 64
    adapter = artifact(
        adapted(tmp_path / "lora", model).parent,
        "lora",
        {"base": {"stage": "sft", "key": "b" * 64}},
    )
    assert (
        loadable(adapter, ADAPTER, store)[f"{BASE}/model.safetensors"]
        == model / "model.safetensors"
    )
