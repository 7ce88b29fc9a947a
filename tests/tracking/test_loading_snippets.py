"""The files by which MLflow opens a model. That it does: full/test_readme.py."""

from pathlib import Path
from typing import Any

import yaml
from support.tiny_models import adapted, fresh

from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.tracking.tracked_runs import ADAPTER, BASE, MODEL, loadable


def artifact(directory: Path, stage: str, **inputs: Any) -> Artifact:
    return Artifact(stage, "k" * 64, directory, {"files": {}, "inputs": inputs})


def test_the_weights_are_named_where_they_are_and_not_copied(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    model = fresh(store.path("sft", "b" * 64))
    files = loadable(artifact(model.parent, "sft"), MODEL, store)
    assert not [name for name in files if name.endswith(".safetensors")]
    described = yaml.safe_load(str(files["MLmodel"]))
    assert described["flavors"]["transformers"]["model_binary"] == "."
    assert described["metadata"]["ttrain.key"] == "k" * 64
    base = {"stage": "sft", "key": "b" * 64}
    adapter = artifact(adapted(tmp_path / "lora", model).parent, "lora", base=base)
    weights = loadable(adapter, ADAPTER, store)[f"{BASE}/model.safetensors"]
    assert weights == model / "model.safetensors"
