"""A registered model's directory opens with MLflow alone, in a process without ttrain, and says what it says in ttrain."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.loadable_models import adapted, fresh, said_with_ttrain, said_without_ttrain

from ttrain.export import export
from ttrain.reports import summary
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.tracking.loadable import ADAPTER, BASE, MODEL, LoadableModel, loadable
from ttrain.tracking.registered_model import Registered
from ttrain.tracking.registration import evaluation_tables

NEW_TOKENS, PROMPT = 10, "The man"
EXAMPLES = ("The first", "What is it?")
KINDS: Mapping[str, Mapping[str, Any]] = {
    "tied": {"tie_embeddings": True, "init_std": 0.1},
    "experts": {"kind": "qwen3", "moe": {"experts": 4, "shared_experts": 0}},
    "moyun": {"kind": "moyun"},
    "tinyseek": {"kind": "tinyseek"},
}
ADAPTERS: Mapping[str, Mapping[str, Any]] = {"lora": {}, "dora": {"kind": "dora"}, "prefix": {"kind": "prefix"}}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
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
said["example"] = described.load_input_example(place)
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


def laid_out(place: Path, found: LoadableModel, target: Path) -> Path:
    """The directory as it is in MLflow."""
    shutil.copytree(place, target)
    for name, text in found.texts.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(text, encoding="utf-8")
    for name, source in found.files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / name)
    return target


@pytest.mark.soak
def test_mlflow_opens_every_kind_of_model_and_adapter_which_says_what_it_says_here(tmp_path: Path) -> None:
    places, ours, said_here = {}, {}, partial(said_with_ttrain, PROMPT, NEW_TOKENS)
    for name, settings in KINDS.items():
        model = fresh(tmp_path / name, **settings)
        found = loadable(artifact(tmp_path / name, "sft"), MODEL, base=None, card="# card", examples=EXAMPLES)
        places[name], ours[name] = laid_out(model, found, tmp_path / "out" / name), said_here(model)
    base = fresh(tmp_path / "base")
    for name in DTYPES:
        (tmp_path / name).mkdir()
        export.write(export.load(base, None), tmp_path / name / MODEL, dtype=name, shard_bytes=10**9)
        for file in base.glob("*token*"):
            shutil.copyfile(file, tmp_path / name / MODEL / file.name)
        shutil.copyfile(base / "chat_template.jinja", tmp_path / name / MODEL / "chat_template.jinja")
        found = loadable(artifact(tmp_path / name, "pretrain"), MODEL, base=None, card="", examples=EXAMPLES)
        places[name] = laid_out(tmp_path / name / MODEL, found, tmp_path / "out" / name)
    for name, settings in ADAPTERS.items():
        adapter = adapted(tmp_path / name, base, **settings)
        found = loadable(artifact(tmp_path / name, "lora"), ADAPTER, base=base, card="# card", examples=EXAMPLES)
        places[name], ours[name] = laid_out(adapter, found, tmp_path / "out" / name), said_here(base, adapter)
    words = [json.dumps({name: str(place) for name, place in places.items()}), PROMPT]
    uri = f"sqlite:///{tmp_path}/unused.db"
    modules = str(tmp_path / "modules")
    said = said_without_ttrain(PLAIN, *words, directory=tmp_path, HF_MODULES_CACHE=modules, MLFLOW_TRACKING_URI=uri)
    assert {name: said[name][0] for name in ours} == ours
    assert len({tuple(tokens) for tokens in ours.values()}) == len(ours), "models that all say the same prove little"
    assert [said[name][1] for name in DTYPES] == [str(kind) for kind in DTYPES.values()]
    assert (said["moyun"][2], said["lora"][2]) == ("MoyunForCausalLM", "PeftModelForCausalLM")
    assert all("Hi" in said[name][3] for name in places), "the chat template is there"
    assert said["example"] == list(EXAMPLES)
    assert "string" in said["signature"]["inputs"] and "string" in said["signature"]["outputs"]


def test_an_adapter_whose_base_does_not_come_along_has_a_card_and_says_nothing_to_mlflow(tmp_path: Path) -> None:
    found = loadable(artifact(tmp_path, "lora"), ADAPTER, base=None, card="# card", examples=EXAMPLES)
    assert (set(found.texts), found.files) == ({"README.md"}, {})
    tokenizer = loadable(artifact(tmp_path, "tokenizer"), "", base=None, card="", examples=EXAMPLES)
    assert (tokenizer.texts, tokenizer.files) == ({}, {})


def test_the_weights_are_named_where_they_are_and_not_given_a_second_time(tmp_path: Path) -> None:
    model = fresh(tmp_path / "sft")
    found = loadable(artifact(tmp_path / "sft", "sft"), MODEL, base=None, card="", examples=EXAMPLES)
    assert not [name for name in found.files if name.endswith(".safetensors")]
    described = yaml.safe_load(found.texts["MLmodel"])
    assert described["flavors"]["transformers"]["model_binary"] == "."
    assert described["metadata"]["ttrain.key"] == "k" * 64
    assert found.texts["requirements.txt"].splitlines()[1:] == ["torch==2.13.0", "transformers==5.23.0"]
    below = loadable(artifact(adapted(tmp_path / "lora", model).parent, "lora"), ADAPTER, base=model, card="", examples=())
    assert below.files[f"{BASE}/model.safetensors"] == model / "model.safetensors"


def test_a_base_goes_along_only_onto_the_disk_where_it_lies(tmp_path: Path) -> None:
    """On another disk, or in a store elsewhere, it would be a second copy of the whole model."""
    store = ArtifactStore(tmp_path)
    base = fresh(store.path("sft", "b" * 64))
    adapter = adapted(tmp_path / "lora", base)
    made = artifact(adapter.parent, "lora", {"base": {"stage": "sft", "key": "b" * 64}})
    for is_local in (True, False):
        found = Registered(made, "mine", store).extra_files(EXAMPLES, is_local=is_local)
        assert found.is_whole is is_local
        assert "# mine-lora" in found.texts["README.md"], "the card is there all the same"
    (base / "config.json").write_text("no JSON")
    damaged = artifact(base.parent, "sft")
    (base / "model.safetensors").write_bytes(b"cut")
    found = Registered(damaged, "mine", store).extra_files(EXAMPLES, is_local=True)
    assert found.texts.get("README.md") is None, "and it does not raise"


def test_the_evaluation_is_a_table_and_the_answers_of_the_models_stand_side_by_side() -> None:
    samples = {  # sorted by name, as manifests have them
        "base": [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}],
        "lora": [{"prompt": "b", "answer": "5"}],
        "sft": [{"prompt": "b", "answer": "<script>"}, {"prompt": "c", "answer": "4"}],
    }
    found = {
        name: json.loads(text)
        for name, text in evaluation_tables(summary.rows({"eval/bits_per_byte": 1.5}), samples).items()
    }
    assert found["evaluation_table.json"]["data"][0][:2] == ["bits per byte, base model", "1.500"]
    answers = found["samples_table.json"]
    assert answers["columns"] == ["prompt", "base", "sft", "lora"]
    assert answers["data"] == [["a", "1", "", ""], ["b", "2", "<script>", "5"], ["c", "", "4", ""]]
    assert evaluation_tables([], {}) == {}
    samples["sft"][0]["reference"] = "so it goes on"
    answers = json.loads(evaluation_tables([], samples)["samples_table.json"])
    assert answers["columns"] == ["prompt", "base", "sft", "lora", "in the data"]
    assert answers["data"][1] == ["b", "2", "<script>", "5", "so it goes on"]
