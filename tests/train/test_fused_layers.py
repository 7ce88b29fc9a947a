"""RMSNorm, SwiGLU and low-rank layers in one node each: the results of transformers and PEFT."""

import importlib
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.comparing import distance, same, with_gradients
from support.tiny_adapters import disturb
from support.tiny_data import VOCAB
from support.tiny_trainers import tiny_model
from torch import Tensor

from ttrain.config import Lora
from ttrain.model import adapters
from ttrain.model.adapter_layers import FusedLinear
from ttrain.train.kernels import GATED, NORMS, fuse

BF16 = torch.bfloat16
MOE = {"Qwen3Moe": "qwen3_moe", "Ernie4_5_Moe": "ernie4_5_moe", "Glm4Moe": "glm4_moe"}
Results = Mapping[str, Tensor]


def worst(expected: Results, results: Results) -> float:
    assert {*expected} == {*results}
    return max(distance({name: expected[name]}, {name: results[name]}) for name in expected)


def layer(name: str) -> Any:
    """A norm or a gated layer of transformers, width 16; its weights are neither zeros nor ones."""
    from transformers import AutoConfig

    torch.manual_seed(0)
    family = re.sub("RMSNorm|MLP", "", name)
    kind = MOE.get(family, family.lower())
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    if name in NORMS:
        norm = getattr(module, name)(16, eps=1e-5)
        torch.nn.init.uniform_(norm.weight, -1, 1)
        return norm
    sizes = {"hidden_size": 16, "intermediate_size": 40, "num_attention_heads": 2}
    return getattr(module, name)(AutoConfig.for_model(kind, **sizes))


def layer_results(module: Any, *, autocast: bool) -> Results:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 5, 16, generator=generator, requires_grad=True)
    with torch.autocast("cpu", BF16, enabled=autocast):
        out = module(3 * x)
    upstream = torch.randn(3, 5, 16, generator=generator)
    return with_gradients(out, upstream, {"x": x, **dict(module.named_parameters())})


@pytest.mark.parametrize("name", sorted(NORMS | GATED))
def test_a_fused_layer_gives_what_the_layer_of_transformers_gives(name: str) -> None:
    module = layer(name)
    exact, theirs = (layer_results(module, autocast=autocast) for autocast in (False, True))
    with torch.no_grad():
        without_gradients = module(torch.ones(2, 16))
    fuse(module)
    assert "forward" in vars(module), "this kind of layer is not fused"
    fused, ours = (layer_results(module, autocast=autocast) for autocast in (False, True))
    assert worst(exact, fused) < 1e-6
    assert {tensor.dtype for tensor in fused.values()} == {torch.float32}
    assert distance(exact, ours) < max(0.005, 1.2 * distance(exact, theirs))
    assert ours["out"].dtype == BF16
    with torch.no_grad():
        assert torch.equal(module(torch.ones(2, 16)), without_gradients)


def adapted() -> Any:
    base = tiny_model(kv_heads=1)
    up_proj = base.model.layers[1].mlp.up_proj
    up_proj.bias = torch.nn.Parameter(torch.linspace(-1, 1, up_proj.out_features))
    return disturb(adapters.attach(base, Lora(rank=3, alpha=12.0)).train(), by=0.05)


def lora_results(model: Any, *, autocast: bool) -> Results:
    ids = torch.randint(9, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    with torch.autocast("cpu", BF16, enabled=autocast):
        logits = model(input_ids=ids).logits.float()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return with_gradients(logits, 2 * logits.detach(), trained)


def test_a_low_rank_layer_gives_what_that_of_peft_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted()
    fused, ours = (lora_results(model, autocast=autocast) for autocast in (False, True))
    monkeypatch.setattr(FusedLinear, "is_plain", lambda self, name: False)
    exact, theirs = (lora_results(model, autocast=autocast) for autocast in (False, True))
    assert len(exact) == 1 + 2 * 2 * 7 and worst(exact, fused) < 1e-6
    assert distance(exact, ours) < 1.2 * distance(exact, theirs)
    assert not same(fused, exact), "these were different computations"


def test_the_cached_bf16_copy_of_a_frozen_weight_follows_the_weight() -> None:
    used, fresh = adapted(), adapted()
    lora_results(used, autocast=True)
    with torch.no_grad():
        for model in (used, fresh):
            model.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight.mul_(2)
    assert same(lora_results(used, autocast=True), lora_results(fresh, autocast=True))
