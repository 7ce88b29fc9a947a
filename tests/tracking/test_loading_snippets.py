"""A registered model's directory opens with MLflow alone, in a process without ttrain, and says what it says in ttrain."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.loadable_models import adapted, fresh, said_with_ttrain, said_without_ttrain

from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.tracking.tracked_runs import ADAPTER, BASE, MODEL, loadable

NEW_TOKENS, PROMPT = 10, "The man"
KINDS: Mapping[str, Mapping[str, Any]] = {
    "tied": {"tie_embeddings": True, "init_std": 0.1},
    "experts": {"kind": "qwen3", "moe": {"experts": 4, "shared_experts": 0}},
    "moyun": {"kind": "moyun"},
    "tinyseek": {"kind": "tinyseek"},
}
ADAPTERS: Mapping[str, Mapping[str, Any]] = {"lora": {}, "dora": {"kind": "dora"}, "prefix": {"kind": "prefix"}}
# What someone does who knows MLflow and nothing of ttrain.
PLAIN = """
import json, sys
import mlflow, torch
torch.set_num_threads(1)
said = {}
for name, place in json.loads(sys.argv[1]).items():
    pipe = mlflow.transformers.load_model(place)
    tokenizer, model = pipe.tokenizer, pipe.model
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer.encode(sys.argv[2], add_special_tokens=False)]])
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
    stops = model.generation_config.eos_token_id
    tokens = [token for token in out[0, ids.shape[1]:].tolist() if token not in stops]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    said[name] = [tokens, str(next(model.parameters()).dtype), type(model).__name__, chat]
from mlflow.models import Model
described = Model.load(place)
said["signature"] = described.signature.to_dict()
print("SAID", json.dumps(said))
assert not [name for name in sys.modules if name.split(".")[0] == "ttrain"]
"""


def artifact(directory: Path, stage: str, inputs: Mapping[str, Any] | None = None) -> Artifact:
    libraries = {"torch": "2.13.0+cpu", "transformers": "5.23.0"}
    manifest = {
        "published": 1_800_000_000.5, "files": {}, "inputs": inputs or {}, "result": {},
        "ingredients": {"code": {"a": "b"}, "settings": {f"{stage}.seed": 4}},
        "provenance": {"python": "3.11.7", "libraries": libraries, "commit": "c0ffee", "run": "full-1"},
    }  # fmt: skip
    return Artifact(stage, "k" * 64, directory, manifest)


def laid_out(made: Artifact, directory: str, store: ArtifactStore, target: Path) -> Path:
    """The directory as it is in MLflow."""
    texts, files = loadable(made, directory, store)
    shutil.copytree(made.path / directory, target)
    for name, text in texts.items():
        (target / name).write_text(text, encoding="utf-8")
    for name, source in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / name)
    return target


@pytest.mark.soak
def test_mlflow_opens_every_kind_of_model_and_adapter_which_says_what_it_says_here(tmp_path: Path) -> None:
    places, ours, said_here = {}, {}, partial(said_with_ttrain, PROMPT, NEW_TOKENS)
    store = ArtifactStore(tmp_path)
    for name, settings in KINDS.items():
        model = fresh(tmp_path / name, **settings)
        places[name] = laid_out(artifact(tmp_path / name, "sft"), MODEL, store, tmp_path / "out" / name)
        ours[name] = said_here(model)
    base = fresh(store.path("sft", "b" * 64))
    below = {"base": {"stage": "sft", "key": "b" * 64}}
    for name, settings in ADAPTERS.items():
        adapter = adapted(tmp_path / name, base, **settings)
        made = artifact(tmp_path / name, "lora", below)
        places[name], ours[name] = laid_out(made, ADAPTER, store, tmp_path / "out" / name), said_here(base, adapter)
    words = [json.dumps({name: str(place) for name, place in places.items()}), PROMPT]
    uri = f"sqlite:///{tmp_path}/unused.db"
    modules = str(tmp_path / "modules")
    said = said_without_ttrain(PLAIN, *words, directory=tmp_path, HF_MODULES_CACHE=modules, MLFLOW_TRACKING_URI=uri)
    assert {name: said[name][0] for name in ours} == ours
    assert len({tuple(tokens) for tokens in ours.values()}) == len(ours), "models that all say the same prove little"
    assert (said["moyun"][2], said["lora"][2]) == ("MoyunForCausalLM", "PeftModelForCausalLM")
    assert all("Hi" in said[name][3] for name in places), "the chat template is there"
    assert "string" in said["signature"]["inputs"] and "string" in said["signature"]["outputs"]


def test_an_adapter_whose_base_is_not_here_says_nothing_to_mlflow(tmp_path: Path) -> None:
    below = {"base": {"stage": "sft", "key": "b" * 64}}
    assert loadable(artifact(tmp_path, "lora", below), ADAPTER, ArtifactStore(tmp_path)) == ({}, {})


def test_the_weights_are_named_where_they_are_and_not_given_a_second_time(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    model = fresh(store.path("sft", "b" * 64))
    texts, files = loadable(artifact(model.parent, "sft"), MODEL, store)
    assert not [name for name in files if name.endswith(".safetensors")]
    described = yaml.safe_load(texts["MLmodel"])
    assert described["flavors"]["transformers"]["model_binary"] == "."
    assert described["metadata"]["ttrain.key"] == "k" * 64
    adapter = artifact(adapted(tmp_path / "lora", model).parent, "lora", {"base": {"stage": "sft", "key": "b" * 64}})
    assert loadable(adapter, ADAPTER, store)[1][f"{BASE}/model.safetensors"] == model / "model.safetensors"
