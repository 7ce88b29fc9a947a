"""RMSNorm, SwiGLU and low-rank layers in one node each: the results of transformers and PEFT, and less to keep."""

from __future__ import annotations

import importlib
import re
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.comparing import bytes_kept, copies, distance, same
from support.tiny_data import VOCAB
from support.tiny_trainers import tiny_model
from torch import Tensor

from ttrain.config import Lora
from ttrain.model import adapters
from ttrain.train import kernels
from ttrain.train.kernels import GATED, NORMS, fuse
from ttrain.train.language_modeling import NextTokenLoss
from ttrain.train.losses import token_loss_sum

BF16 = torch.bfloat16


def layer(name: str) -> Any:
    """A norm or a gated layer of transformers with weights that are neither zeros nor ones; width 16."""
    from transformers import AutoConfig

    torch.manual_seed(0)
    family = re.sub("RMSNorm|MLP", "", name)
    model_type = {"Qwen3Moe": "qwen3_moe", "Ernie4_5_Moe": "ernie4_5_moe", "Glm4Moe": "glm4_moe"}.get(family, family.lower())
    kind = getattr(importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}"), name)
    if name in NORMS:
        made = kind(16, eps=1e-5)
        torch.nn.init.uniform_(made.weight, -1, 1)
        return made
    return kind(AutoConfig.for_model(model_type, hidden_size=16, intermediate_size=40, num_attention_heads=2))


def results(module: Any, *, autocast: bool) -> dict[str, Tensor]:
    """Output and gradients for the same input."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 5, 16, generator=generator, requires_grad=True)
    with torch.autocast("cpu", BF16, enabled=autocast):
        out = module(3 * x)
    out.float().backward(torch.randn(3, 5, 16, generator=generator))
    assert x.grad is not None
    found = {"out": out.detach(), "x": x.grad, **{name: p.grad for name, p in module.named_parameters() if p.requires_grad}}
    module.zero_grad()
    return found


@pytest.mark.parametrize("name", sorted(NORMS | GATED))
def test_a_fused_layer_gives_what_the_layer_of_transformers_gives(name: str) -> None:
    module = layer(name)
    exact, rounded = copies(results(module, autocast=False)), copies(results(module, autocast=True))
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
        assert torch.equal(module(torch.ones(2, 16)), silent), "where no gradient is recorded nothing changes"
    assert all(parameter is before[key] for key, parameter in module.named_parameters())


def test_a_gated_layer_with_another_activation_stays_as_it_is() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    module = LlamaMLP(LlamaConfig(hidden_size=16, intermediate_size=40, num_attention_heads=2, hidden_act="gelu"))
    fuse(module)
    assert "forward" not in vars(module)


def test_fused_layers_keep_three_tenths_less_for_the_backward_pass() -> None:
    ids = torch.randint(9, VOCAB, (16, 128), generator=torch.Generator().manual_seed(0))

    def forward(model: Any) -> None:
        with torch.autocast("cpu", BF16):
            kept.append(model.model(input_ids=ids).last_hidden_state)

    kept: list[Any] = []
    model = tiny_model(layers=4, kind="llama").train()
    before = bytes_kept(lambda: forward(model))
    fuse(model)
    after = bytes_kept(lambda: forward(model))
    assert after < 0.7 * before


def packed_loss(model: NextTokenLoss) -> Tensor:
    """The loss of two rows of two records, in bf16."""
    ids = torch.randint(9, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
    segments = torch.arange(24).expand(2, 24) // 15
    with torch.autocast("cpu", BF16):
        loss: Tensor = model(ids, torch.arange(24).expand(2, 24) % 15, segments, ids)[0]
    return loss


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_what_is_made_again_of_the_input_of_a_norm_has_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = NextTokenLoss(tiny_model(kind=kind, kv_heads=1).train(), token_loss_sum)

    def gradients() -> dict[str, Tensor]:
        packed_loss(model).backward()  # type: ignore[no-untyped-call]
        found = copies({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
        return found

    made_again, kept = gradients(), bytes_kept(lambda: packed_loss(model))
    monkeypatch.setattr(kernels, "source_of", lambda x: None)
    assert bytes_kept(lambda: packed_loss(model)) > kept
    assert same(gradients(), made_again)


def test_a_norm_whose_output_was_changed_is_not_the_source_of_it() -> None:
    module = layer("LlamaRMSNorm")
    fuse(module)
    out = module(torch.ones(2, 16))
    assert kernels.source_of(out) is not None
    assert kernels.source_of(out.mul_(2)) is None


# --- low-rank layers ----------------------------------------------------------------------------------------------------


def adapted(**settings: Any) -> Any:
    """A model with an adapter that moves the logits, and a bias in some of its frozen layers."""
    base = tiny_model(kv_heads=1)
    for number, layer in enumerate(base.model.layers):
        if number:
            layer.mlp.up_proj.bias = torch.nn.Parameter(torch.linspace(-1, 1, layer.mlp.up_proj.out_features))
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
        logits = model(input_ids=ids).logits
    logits.float().square().sum().backward()
    found = {"logits": logits.detach(), **{name: p.grad for name, p in model.named_parameters() if p.requires_grad}}
    model.zero_grad()
    return found


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


def test_what_is_not_the_plain_case_is_left_to_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    from ttrain.model.adapter_layers import LowRank

    monkeypatch.setattr(LowRank, "apply", Mock(side_effect=AssertionError("not the plain case")))
    ids = torch.randint(9, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
    model = adapted()
    with pytest.raises(AssertionError, match="not the plain case"):
        model(input_ids=ids)
    with model.disable_adapter():
        model(input_ids=ids)
    model.merge_adapter()
    model(input_ids=ids)
    model.unmerge_adapter()
    model.add_adapter("other", model.peft_config["default"])
    model.base_model.set_adapter(["default", "other"])
    model(input_ids=ids)
    adapted(dropout=0.5)(input_ids=ids)


def test_the_frozen_weight_that_is_kept_in_bf16_follows_the_weight() -> None:
    model, other = adapted(), adapted()
    lora_results(model, autocast=True)
    with torch.no_grad():
        for changed in (model, other):
            changed.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight.mul_(2)
    assert same(lora_results(model, autocast=True), lora_results(other, autocast=True))
