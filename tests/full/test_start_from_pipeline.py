"""A pipeline that starts from a model made elsewhere: what runs, what it leaves, what manifests and MLflow know of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chat_templates import make
from support.loadable_models import said_without_ttrain
from support.pipeline_home import Cli
from transformers import GPT2Config, GPT2LMHeadModel


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of other sizes than the settings', in bf16 and in shards, with a tokenizer that has no chat template."""
    directory = make(tmp_path_factory.mktemp("foreign"), None)
    size = len(json.loads((directory / "tokenizer.json").read_bytes())["model"]["vocab"])
    torch.manual_seed(1)
    sizes = {"n_embd": 48, "n_layer": 1, "n_head": 2, "n_positions": 96}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=size, bos_token_id=0, eos_token_id=0, **sizes))
    model.to(torch.bfloat16).save_pretrained(directory, max_shard_size="20KB")
    return directory


def opened_elsewhere(directory: Path) -> Any:
    """(vocabulary, layers, text of a chat), in a process that does not know ttrain."""
    script = f"""
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model, report = AutoModelForCausalLM.from_pretrained({str(directory)!r}, output_loading_info=True)
assert not any(report.values()), report
tokenizer = AutoTokenizer.from_pretrained({str(directory)!r})
chat = tokenizer.apply_chat_template([dict(role="user", content="1 + 2?")], add_generation_prompt=True, tokenize=False)
assert "ttrain" not in sys.modules
print("SAID", json.dumps([model.config.vocab_size, model.config.n_layer, chat]))
"""
    return said_without_ttrain(script, directory=directory)


@pytest.mark.long
@pytest.mark.soak
def test_sft_starts_from_a_model_made_elsewhere_without_any_pretraining(fresh: Cli, foreign: Path) -> None:
    start = f"sft.start_from={foreign}"
    said = fresh.here("pipeline", "run", "full", "--engine", "none", start)
    [run] = fresh.runs()
    names = [stage["name"] for stage in run["stages"]]
    assert names == ["tokenizer", "shards-sft", "shards-lora", "base-model", "sft", "lora", "evaluate"], said
    assert {stage["outcome"] for stage in run["stages"]} == {"completed"}
    metrics = run["metrics"]
    assert metrics["eval/chat_loss_sft"] < metrics["eval/chat_loss_base"]
    assert metrics["eval/domain_loss_lora"] < metrics["eval/domain_loss_sft"]
    assert "eval/bits_per_byte" not in metrics and "sft/validation_loss" in metrics
    plan = fresh.plan(start)
    assert {stage["state"] for stage in plan.values()} == {"cached"}
    manifests = {name: json.loads((Path(stage["path"]) / "manifest.json").read_bytes()) for name, stage in plan.items()}
    _lineage(manifests, foreign)
    _tags(fresh, manifests)
    vocabulary, layers, chat = opened_elsewhere(Path(plan["sft"]["path"]) / "model")
    taken = manifests["base-model"]["result"]
    assert vocabulary == taken["vocab_size"] == taken["vocab_size_before"] + len(taken["added_tokens"])
    assert layers == 1 and chat.endswith("<|assistant|>") and "<|end|>" in taken["added_tokens"]


def _lineage(manifests: dict[str, Any], foreign: Path) -> None:
    """From the SFT model's manifest to the bytes of the files that the user gave."""
    sft, taken = manifests["sft"], manifests["base-model"]
    assert (sft["inputs"]["base"]["stage"], sft["inputs"]["base"]["key"]) == ("base-model", taken["key"])
    assert sft["ingredients"]["inputs"]["base"] == sft["inputs"]["base"]["content"]
    weights = {file["name"]: file["sha256"] for file in taken["ingredients"]["files"]["weights"]}
    given = sorted(foreign.glob("model-*.safetensors"))
    assert weights == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in given} and len(given) > 1


def _tags(cli: Cli, manifests: dict[str, Any]) -> None:
    """The tracked run of each stage names what it was made from, by content."""
    query = "select runs.name, key, value from tags join runs using (run_uuid) where key like 'ttrain.parent.%'"
    found = {(name.split()[0], key.removeprefix("ttrain.parent.")): value for name, key, value in cli.rows("mlflow", query)}
    assert found["sft", "base"].startswith("base-model ") and found["lora", "base"].startswith("sft ")
    for stage in ("sft", "lora"):
        assert found[stage, "base"].split()[1] == manifests[stage]["inputs"]["base"]["content"]
