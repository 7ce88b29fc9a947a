"""Models and adapters: strict when loaded, and what their stages leave. What a position sees: tests/doctor."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.comparing import copies, same
from support.tiny_adapters import save_base
from support.tiny_data import VOCAB
from support.tiny_stages import Home, run_here, stage_settings
from support.tiny_trainers import tiny_model
from transformers import AutoTokenizer

from ttrain.config import Lora, LoraConfig, PretrainConfig, SftConfig
from ttrain.core.hashing import sha256_file
from ttrain.errors import ArtifactError
from ttrain.model import adapters, factory
from ttrain.stages import lora, pretrain, sft

# --- loading ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_embedding_is_saved_once(tmp_path: Path, tied: bool) -> None:
    directory = save_base(tiny_model(tie_embeddings=tied), tmp_path / "model")
    names = {*load_file(directory / "model.safetensors")}
    assert "model.embed_tokens.weight" in names
    assert ("lm_head.weight" in names) is not tied
    loaded = factory.load(directory)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied


NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"


def spoil(weights: dict[str, torch.Tensor], how: str) -> str:
    """Change the weights; returns the name that an error must hold."""
    if how == "missing":
        del weights[NORM]
        return NORM
    if how == "unexpected":
        weights["model.router.weight"] = torch.zeros(2)
        return "model.router.weight"
    weights[EMBEDDING] = torch.zeros(VOCAB + 1, 16)
    return EMBEDDING


@pytest.mark.parametrize("how", ["missing", "unexpected", "misshaped"])
def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path, how: str) -> None:
    model = tiny_model()
    directory = save_base(model, tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    name = spoil(weights, how)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match=name.replace(".", r"\.")):
        factory.load(directory)
    before = copies(factory.state(model))
    with pytest.raises(ArtifactError, match=name.replace(".", r"\.")):
        factory.load_state(model, weights)
    assert same(before, factory.state(model)), "nothing was loaded"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "torn"])
def test_a_model_without_one_of_its_files_or_with_a_torn_one_is_refused(tmp_path: Path, name: str) -> None:
    directory = save_base(tiny_model(), tmp_path / "model")
    weights = directory / "model.safetensors"
    if name == "torn":
        weights.write_bytes(weights.read_bytes()[:-7])
    else:
        (directory / name).unlink()
    with pytest.raises(ArtifactError, match="cannot load a model from"):
        factory.load(directory)


def test_code_beside_weights_is_never_run_whatever_the_next_line_of_input_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_base(tiny_model(), tmp_path / "model")
    described = json.loads((directory / "config.json").read_bytes())
    described |= {"model_type": "theirs", "auto_map": {"AutoConfig": "code.Theirs", "AutoModelForCausalLM": "code.Model"}}
    (directory / "config.json").write_text(json.dumps(described))
    ran = tmp_path / "ran"
    (directory / "code.py").write_text(
        f"open({str(ran)!r}, 'w').close()\nfrom transformers import LlamaConfig as Theirs, LlamaForCausalLM as Model\n"
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\n"))
    with pytest.raises(ArtifactError, match="which ttrain never runs"):
        factory.load(directory)
    assert not ran.exists()


# --- adapters -----------------------------------------------------------------------------------------------------------

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def config_of(**changes: Any) -> Lora:
    return Lora(**{"rank": 3, "alpha": 12.0, **changes})


@pytest.mark.parametrize("targets", [ALL, ("q_proj", "v_proj"), ("down_proj",)], ids=len)
def test_the_trained_parameters_are_rank_times_in_plus_out_of_the_targets(targets: tuple[str, ...]) -> None:
    base = tiny_model(kv_heads=1)
    linear = {name: m for name, m in base.named_modules() if isinstance(m, torch.nn.Linear) and name.endswith(targets)}
    assert len(linear) == 2 * len(targets), "grouped-query keys and values are not square, and are among them"
    expected = sum(3 * (m.in_features + m.out_features) for m in linear.values())
    model = adapters.attach(base, config_of(targets=targets))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert sum(p.numel() for p in trained.values()) == expected
    assert all("lora_" in name for name in trained)
    assert {*adapters.state(model)} == {name.replace(".default", "") for name in trained}


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A pretraining, an SFT on it and an adapter on that, by their stages; {"pretrain": directory, ...}."""
    root = tmp_path_factory.mktemp("stages")
    home, settings = Home.make(root / "home"), stage_settings(steps=6)
    outputs = {name: root / name for name in ("pretrain", "sft", "lora")}
    results = {}
    chats = home.chats.path
    for name, module, config, inputs in (
        ("pretrain", pretrain, PretrainConfig(model=settings.model, pretrain=settings.pretrain),
         {"tokenizer": home.tokenizer.path, "shards": home.documents.path}),
        ("sft", sft, SftConfig(sft=settings.sft), {"base": outputs["pretrain"], "shards": chats}),
        ("lora", lora, LoraConfig(lora=settings.lora), {"base": outputs["sft"], "shards": chats}),
    ):  # fmt: skip
        results[name] = run_here(module, config, outputs[name], inputs, settings.runtime)
    return {"outputs": outputs, "results": results, "home": home, "settings": settings}


@pytest.mark.parametrize("name", ["pretrain", "sft", "lora"])
def test_what_a_stage_leaves_is_its_last_checkpoint(stages: Any, name: str) -> None:
    output, result = stages["outputs"][name], stages["results"][name]
    folder, file = ("adapter", "adapter_model.safetensors") if name == "lora" else ("model", "model.safetensors")
    last = output / "checkpoints" / f"step-{result['steps']:08d}"
    assert (output / folder / file).read_bytes() == (last / file).read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(last)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "<|bos|><|user|>x<|end|>"
    assert result["loss"] is not None and result["validation_loss"] is not None
    assert (output / folder / "tokenizer.json").read_bytes() == (
        stages["home"].tokenizer.path / "tokenizer.json"
    ).read_bytes()


@pytest.mark.parametrize("change", [{}, {"precision": "bf16"}, {"seed": 2}], ids=str)
def test_the_same_settings_give_the_same_bytes_and_others_others(
    stages: Any, tmp_path: Path, change: dict[str, Any]
) -> None:
    stages["home"].pretrain(stages["settings"].replaced({"pretrain": change}), tmp_path)
    first, second = (place / "model" / "model.safetensors" for place in (stages["outputs"]["pretrain"], tmp_path))
    assert (sha256_file(first) == sha256_file(second)) is (not change)
