"""`ttrain model show`: every figure against the real model, its real optimizer and what torch counts."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any

import pytest
import torch
from support.tiny_data import VOCAB
from support.tiny_trainers import tiny_model
from typer.testing import CliRunner

from ttrain.cli import model
from ttrain.cli.main import app, main
from ttrain.cli.model import cost
from ttrain.config import Model, MultiToken, Optim, Settings
from ttrain.config.loading import configs_directory
from ttrain.config.model import names, vocab_size_of
from ttrain.model import multi_token
from ttrain.train import optim
from ttrain.train.language_modeling import NextTokenLoss
from ttrain.train.losses import token_loss_sum

SIZES: dict[str, Any] = {"hidden_size": 32, "layers": 3, "heads": 4, "max_length": 64}
MODELS: tuple[dict[str, Any], ...] = (
    {"kind": "llama", "kv_heads": 2, "tie_embeddings": False}, {"kind": "gpt2"}, {"kind": "moyun"},
    {"kind": "qwen3", "moe": {"experts": 6, "top_k": 3, "expert_size": 16, "shared_experts": 1, "dense_layers": 1}},
)  # fmt: skip


def shown(*words: str) -> Any:
    result = CliRunner().invoke(app, ["models", "size", *words, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("options", MODELS, ids=str)
def test_parameters_memory_and_checkpoint_are_those_of_the_real_model(options: dict[str, Any]) -> None:
    found = cost(Model(**SIZES, **options), vocab_size=VOCAB, row_length=16)
    model = tiny_model(**SIZES, **options)
    weights = sum(p.numel() for p in model.parameters())
    assert found.parameters == weights
    assert found.model_bytes == 4 * weights
    for kind in ("adamw", "muon"):
        optimizers = optim.build(model, Optim(kind=kind))
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizers.step()
        state = sum(tensor.numel() for tensor in optimizers.state().values() if tensor.numel() > 1)
        assert found.memory_bytes[kind] == pytest.approx(4 * (2 * weights + state), rel=1e-3), kind
    assert found.memory_bytes["muon"] < found.memory_bytes["adamw"]
    assert (found.active_parameters == weights) == ("moe" not in options)


def test_the_active_parameters_are_those_that_get_a_gradient_from_one_token() -> None:
    """Whole experts get none where the token does not visit them."""
    options = {"moe": {"experts": 8, "top_k": 2, "expert_size": 24, "shared_experts": 1}}
    model = tiny_model(**SIZES, **options)
    model(input_ids=torch.tensor([[11]])).logits.square().sum().backward()
    met = 0
    for name, p in model.named_parameters():
        assert p.grad is not None or "bias" in name, name
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        stacked = ".experts." in name
        met += sum(one.numel() for one in gradient if one.abs().max() > 0) if stacked else p.numel()
    found = cost(Model(**SIZES, **options), vocab_size=VOCAB, row_length=16)
    assert found.active_parameters == met < found.parameters


def test_a_second_head_is_counted_beside_the_model() -> None:
    """Trained by AdamW whatever trains the rest: weight, gradient and two numbers of state, and 6 FLOPs a weight."""
    dense, both = (
        cost(Model(**SIZES, multi_token=more), vocab_size=VOCAB, row_length=16) for more in (None, {"weight": 0.3})
    )  # fmt: skip
    head = VOCAB * 32
    assert (both.parameters, both.model_bytes) == (dense.parameters, dense.model_bytes)
    assert both.flops_per_token == dense.flops_per_token + 6 * head
    model = tiny_model(**SIZES)
    multi_token.attach(model, MultiToken(), seed=1)
    groups = optim.build(NextTokenLoss(model, token_loss_sum), Optim(kind="muon")).groups()
    state = sum((1 if group["optimizer"] == "Muon" else 2) * group["parameters"] for group in groups)
    assert both.memory_bytes["muon"] == 4 * (2 * (both.parameters + head) + state)


def test_what_is_given_beside_a_preset_wins_and_its_vocabulary_is_the_presets_unless_given() -> None:
    assert shown("1m") == {**shown("model.preset=1m", "tokenizer.vocab_size=2048"), "vocab_size": 2048}
    assert shown("10m")["vocab_size"] == 8192
    assert shown("model.preset=10m")["vocab_size"] == 2048, "the settings say so"
    assert shown("10m", "tokenizer.vocab_size=500")["vocab_size"] == 500
    assert shown("1m", "model.layers=1")["parameters"] < shown("1m")["parameters"]
    assert shown("1m", "model.kind=gpt2")["kind"] == "gpt2"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["3m"], "model.preset is '3m' but must be one of"),
        (["1m", "5m"], "2 presets are given: 1m, 5m; give one"),
        (["model.kind=gtp2"], "did you mean gpt2"),
        (["1m", "model.heads=3"], "model.heads"),
        (["sft.start_from=some/where"], "this command shows new models, with the sizes in model"),
    ],
)
def test_what_cannot_be_shown_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["models", "size", *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_shipped_costs_of_presets_are_those_of_models_of_these_sizes() -> None:
    """TTRAIN_WRITE_PRESETS=1 rewrites configs/presets.json."""
    row_length = Settings().pretrain.row_length
    computed = {name: cost(Model(preset=name), vocab_size=vocab_size_of(name), row_length=row_length) for name in names()}
    if os.environ.get("TTRAIN_WRITE_PRESETS"):
        text = json.dumps({name: asdict(cost) for name, cost in computed.items()}, indent=1)
        (configs_directory() / model.PRESETS).write_text(f"{text}\n", encoding="utf-8")
    assert model.of_presets() == computed
    for name, one in computed.items():
        named = float(name[:-1]) * {"m": 1e6, "b": 1e9}[name[-1]]
        assert one.parameters == pytest.approx(named, rel=0.07), "about as many parameters as it is named after"
    listed = shown()
    assert list(listed) == names() and listed["124m"]["settings"]["hidden_size"] == 768
    text = CliRunner().invoke(app, ["models", "size"]).stdout
    assert all(name in text for name in names()) and "model.preset=NAME" in text
    text = CliRunner().invoke(app, ["models", "size", "1m", "pretrain.row_length=128"]).stdout
    assert all(words in text for words in ("arXiv:2204.02311", "head_dim 128", "1,066,624"))
