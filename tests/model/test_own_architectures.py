"""Shapes that transformers does not have: what they compute and generate. What a position sees:
tests/doctor."""

from typing import Any

import pytest
import torch
from support.tiny_adapters import random_ids
from support.tiny_trainers import tiny_model
from torch import nn

EXPERTS = {"experts": 6, "top_k": 2, "shared_experts": 1, "expert_size": 8}
ONE_LAYER = {"share_layers": True, "rope_head_dim": 4}
ODD = {**EXPERTS, "shared_experts": 0, "expert_size": 9}
SHAPES: dict[str, dict[str, Any]] = {
    "moyun": {"kind": "moyun"},
    "moyun, heads of its own": {"kind": "moyun", "tie_embeddings": False, "init_std": 0.2},
    "tinyseek": {"kind": "tinyseek", "moe": EXPERTS, "init_std": 0.2},
    "tinyseek, one layer": {"kind": "tinyseek", "moe": EXPERTS, "fields": ONE_LAYER},
    "tinyseek, odd sizes": {"kind": "tinyseek", "moe": ODD},
}
T = 20
# Recorded while references by loops gave the same: torch's own encoder for moyun, and for tinyseek
# attention, rotation, routing and experts of one position at a time.
LOGITS = {
    "moyun": [-0.226082, 2.520066, 3.098167, 0.38469, -1.52202],
    "moyun, heads of its own": [-0.457952, -0.886223, 1.644264, 2.896217, 0.788655],
    "tinyseek": [2.286817, 0.275719, -0.886027, 0.817441, 2.901219],
    "tinyseek, one layer": [2.45264, 0.780938, -0.447101, 0.912252, 2.746416],
    "tinyseek, odd sizes": [0.961302, 1.955004, 1.329099, -0.103753, -0.111823],
}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_computes_what_it_did_when_it_was_proved(shape: str, implementation: str) -> None:
    model = tiny_model(**SHAPES[shape]).eval()
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            waves = torch.sin(0.7 * torch.arange(parameter.numel()) + number)
            parameter.copy_(0.3 * waves.view_as(parameter) + float(parameter.ndim == 1))
        logits = model(torch.arange(9, 9 + T)[None]).logits[0, -1, :5]
    assert logits.tolist() == pytest.approx(LOGITS[shape], rel=1e-4, abs=1e-4)


def test_a_text_longer_than_the_table_is_refused() -> None:
    model = tiny_model(kind="moyun", max_length=16).eval()
    model(random_ids(1, 1, 16))
    with pytest.raises(ValueError, match=r"position 16"):
        model(random_ids(1, 1, 17))


def test_noise_of_the_size_that_its_weight_says_moves_routes_in_training_only() -> None:
    router = tiny_model(**SHAPES["tinyseek"]).model.layers[0].mlp.gate
    x = torch.randn(1, 16).expand(20_000, 16)
    clean = router.eval()(x)[0]
    assert torch.equal(clean, nn.functional.linear(x, router.weight))
    torch.manual_seed(1)
    noise = router.train()(x)[0] - clean
    expected = nn.functional.softplus(nn.functional.linear(x[:1], router.noise_weight))[0]
    torch.testing.assert_close(noise.std(0), expected, rtol=0.03, atol=0)
    router.noise_scale = 0.0
    assert torch.equal(clean, router(x)[0])
    router(x)[0].sum().backward()
    assert router.noise_weight.grad is not None and float(router.noise_weight.grad.abs().max()) == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_a_cache_and_left_padding_change_neither_logits_nor_text(shape: str) -> None:
    model, ids = tiny_model(**SHAPES[shape]).eval(), random_ids(3, 1, T)
    with torch.no_grad():
        whole = model(ids).logits
        start = model(ids[:, :13], use_cache=True)
        rest = model(ids[:, 13:], cache=start.cache, use_cache=True).logits
    torch.testing.assert_close(torch.cat((start.logits, rest), 1), whole, rtol=1e-5, atol=1e-6)
    ids = random_ids(3, 2, 6)
    how = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    plain = model.generate(ids, use_cache=False, **how)
    assert torch.equal(model.generate(ids, use_cache=True, **how), plain)
    mask = torch.tensor([[0] * 3 + [1] * 6] * 2)
    padded = torch.cat((torch.zeros(2, 3, dtype=torch.long), ids), 1)
    assert torch.equal(model.generate(padded, attention_mask=mask, **how)[:, 3:], plain)
