"""RMSNorm, SwiGLU and low-rank layers in one node each: the results of transformers and PEFT, and less to keep."""

import importlib
import re
from typing import Any

import pytest
import torch
from support.comparing import distance, same, with_gradients
from support.tiny_data import VOCAB
from support.tiny_trainers import tiny_model
from torch import Tensor

from ttrain.config import Lora
from ttrain.model import adapters
from ttrain.train.kernels import GATED, NORMS, fuse

BF16 = torch.bfloat16


def layer(name: str) -> Any:
    """A norm or a gated layer of transformers with weights that are neither zeros nor ones; width 16."""
    from transformers import AutoConfig

    torch.manual_seed(0)
    family = re.sub("RMSNorm|MLP", "", name)
    model_type = {
        "Qwen3Moe": "qwen3_moe",
        "Ernie4_5_Moe": "ernie4_5_moe",
        "Glm4Moe": "glm4_moe",
    }.get(family, family.lower())
    kind = getattr(
        importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}"), name
    )
    if name in NORMS:
        made = kind(16, eps=1e-5)
        torch.nn.init.uniform_(made.weight, -1, 1)
        return made
    return kind(
        AutoConfig.for_model(
            model_type, hidden_size=16, intermediate_size=40, num_attention_heads=2
        )
    )


def results(module: Any, *, autocast: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 5, 16, generator=generator, requires_grad=True)
    with torch.autocast("cpu", BF16, enabled=autocast):
        out = module(3 * x)
    upstream = torch.randn(3, 5, 16, generator=generator)
    return with_gradients(out, upstream, {"x": x, **dict(module.named_parameters())})


@pytest.mark.parametrize("name", sorted(NORMS | GATED))
def test_a_fused_layer_gives_what_the_layer_of_transformers_gives(name: str) -> None:
    module = layer(name)
    exact, rounded = results(module, autocast=False), results(module, autocast=True)
    before = dict(module.named_parameters())
    with torch.no_grad():
        silent = module(torch.ones(2, 16))
    fuse(module)
    assert "forward" in vars(module), "this kind of layer is still made as it was"
    found, found_rounded = results(module, autocast=False), results(module, autocast=True)
    for key in exact:
        assert distance({key: exact[key]}, {key: found[key]}) < 1e-6, key
        assert found[key].dtype == torch.float32
    assert distance(exact, found_rounded) < max(0.005, 1.2 * distance(exact, rounded))
    assert found_rounded["out"].dtype == BF16
    with torch.no_grad():
        assert torch.equal(module(torch.ones(2, 16)), silent), (
            "where no gradient is recorded nothing changes"
        )
    assert all(parameter is before[key] for key, parameter in module.named_parameters())


def adapted(**settings: Any) -> Any:
    base = tiny_model(kv_heads=1)
    for number, layer in enumerate(base.model.layers):
        if number:
            layer.mlp.up_proj.bias = torch.nn.Parameter(
                torch.linspace(-1, 1, layer.mlp.up_proj.out_features)
            )
    model = adapters.attach(base, Lora(rank=3, alpha=12.0, **settings)).train()
    torch.manual_seed(4)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def lora_results(model: Any, *, autocast: bool) -> dict[str, Tensor]:
    ids = torch.randint(9, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    with torch.autocast("cpu", BF16, enabled=autocast):
        logits = model(input_ids=ids).logits.float()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return with_gradients(logits, 2 * logits.detach(), trained)


def test_a_low_rank_layer_gives_what_that_of_peft_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    from ttrain.model.adapter_layers import FusedLinear

    model = adapted()
    found, rounded = lora_results(model, autocast=False), lora_results(model, autocast=True)
    monkeypatch.setattr(FusedLinear, "is_plain", lambda self, name: False)
    expected, theirs = lora_results(model, autocast=False), lora_results(model, autocast=True)
    assert {*found} == {*expected} and len(found) == 1 + 2 * 2 * 7
    for name in expected:
        assert distance({name: expected[name]}, {name: found[name]}) < 1e-6, name
    assert distance(expected, rounded) < 1.2 * distance(expected, theirs)
    assert not same(found, expected), "these were different computations"


def test_the_frozen_weight_that_is_kept_in_bf16_follows_the_weight() -> None:
    model, other = adapted(), adapted()
    lora_results(model, autocast=True)
    with torch.no_grad():
        for changed in (model, other):
            changed.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight.mul_(2)
    assert same(lora_results(model, autocast=True), lora_results(other, autocast=True))
