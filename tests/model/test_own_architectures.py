"""Shapes that transformers does not have: what they compute and generate. What a position sees:
tests/doctor."""

import math
from typing import Any

import pytest
import torch
from support.tiny_adapters import random_ids
from support.tiny_trainers import tiny_model
from torch import Tensor, nn

from ttrain.model import factory

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


def test_positions_are_sines_and_cosines_in_turn_and_no_parameter() -> None:
    model = tiny_model(kind="moyun")
    table = model.model.positions.table
    assert table.shape == (128, 16)
    assert float(table[0, 0]) == 0.0 and float(table[0, 1]) == 1.0
    assert float(table[1, 0]) == pytest.approx(0.8414709848, abs=1e-6)
    assert float(table[7, 5]) == pytest.approx(math.cos(7 / 10_000 ** (4 / 16)), abs=1e-6)
    names = {*factory.state(model), *(name for name, _ in model.named_parameters())}
    assert not [name for name in names if "position" in name or "table" in name]


def test_a_text_longer_than_the_table_is_refused() -> None:
    model = tiny_model(kind="moyun", max_length=16).eval()
    model(random_ids(1, 1, 16))
    with pytest.raises(ValueError, match=r"position 16"):
        model(random_ids(1, 1, 17))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_moyun_is_torchs_encoder_with_a_causal_mask(implementation: str) -> None:
    """Embeddings times the root of the width, sinusoids, post-norm layers with ReLU and biases, a
    head."""
    model = tiny_model(kind="moyun", tie_embeddings=False, init_std=0.3).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(float("norm.weight" in name), 0.2)
    layer = nn.TransformerEncoderLayer(16, 2, model.config.intermediate_size, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    state = {}
    for number, ours in enumerate(model.model.layers):
        attention = ours.self_attn
        modules = {
            "linear1": ours.mlp.up_proj,
            "linear2": ours.mlp.down_proj,
            "norm1": ours.post_attention_layernorm,
            "norm2": ours.post_mlp_layernorm,
            "self_attn.out_proj": attention.o_proj,
        }
        for kind in ("weight", "bias"):
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            parts = {f"{name}.{kind}": getattr(module, kind) for name, module in modules.items()}
            parts[f"self_attn.in_proj_{kind}"] = torch.cat([getattr(p, kind) for p in projections])
            state |= {f"layers.{number}.{name}": tensor for name, tensor in parts.items()}
    encoder.load_state_dict(state)
    model.set_attn_implementation(implementation)
    ids, mask = random_ids(1, 2, T), nn.Transformer.generate_square_subsequent_mask(T)
    with torch.no_grad():
        x = model.model.embed_tokens(ids) * 4 + model.model.positions.table[:T]
        expected = model.lm_head(encoder(x, mask=mask, is_causal=True))
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_noise_of_the_size_that_its_weight_says_moves_routes_in_training_only() -> None:
    """And 0 as its scale turns it off, with its weight still in the graph."""
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
    model = tiny_model(kind="tinyseek", moe=EXPERTS, fields={"router_noise": False}).train()
    assert [name for name in factory.state(model) if "noise" in name] == []
    assert torch.equal(model(random_ids(1, 1, T)).logits, model(random_ids(1, 1, T)).logits)


def turned(x: Tensor, position: int) -> Tensor:
    """Neighbours 2i and 2i+1 turn together, by a base of ten thousand."""
    angles = position * 10_000.0 ** (-torch.arange(0, len(x), 2) / len(x))
    pairs = torch.view_as_complex(x.view(-1, 2)) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(pairs).flatten()


def normalized(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    return norm.weight * (x - x.mean()) / (x.var(unbiased=False) + norm.eps).sqrt() + norm.bias


def attended(attention: Any, xs: list[Tensor]) -> list[Tensor]:
    """Each position over itself and what is before it; the rotated parts are the same for all
    heads."""
    count = attention.config.num_attention_heads
    queries, keys, values = [], [], []
    for position, x in enumerate(xs):
        q, kv = attention.q_a_proj(x), attention.kv_a_proj(x)
        turned_q = turned(attention.q_rope_proj(q), position)
        turned_k = turned(attention.k_rope_proj(x), position)
        queries.append([torch.cat((part, turned_q)) for part in attention.q_b_proj(q).chunk(count)])
        keys.append([torch.cat((part, turned_k)) for part in attention.k_b_proj(kv).chunk(count)])
        values.append(attention.v_b_proj(kv).chunk(count))
    mixed = []
    for position, of_heads in enumerate(queries):
        heads = []
        for head, query in enumerate(of_heads):
            scores = torch.stack([query @ keys[s][head] for s in range(position + 1)])
            visible = torch.stack([values[s][head] for s in range(position + 1)])
            heads.append((scores / math.sqrt(len(query))).softmax(0) @ visible)
        mixed.append(attention.o_proj(torch.cat(heads)))
    return mixed


def through_experts(moe: Any, x: Tensor) -> Tensor:
    scores = moe.gate.weight @ x
    chosen = scores.argsort(descending=True)[: moe.gate.top_k]
    output = moe.shared_experts(x)
    for expert, weight in zip(chosen.tolist(), scores[chosen].softmax(0), strict=True):
        up, down = moe.experts.up_proj[expert], moe.experts.down_proj[expert]
        inner = (up @ x + moe.experts.up_proj_bias[expert]).relu()
        output = output + weight * (down @ inner + moe.experts.down_proj_bias[expert])
    return output


@pytest.mark.parametrize(("share_layers", "expert_size"), [(False, 8), (True, 9)])
def test_tinyseek_gives_the_logits_of_a_slow_reference(
    share_layers: bool, expert_size: int
) -> None:
    fields = {"share_layers": share_layers, "rope_head_dim": 4}
    moe = {**EXPERTS, "expert_size": expert_size}
    model = tiny_model(kind="tinyseek", moe=moe, fields=fields, init_std=0.3).eval()
    ids = random_ids(4, 1, 9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("_bias"):
                parameter.normal_(float("norm.weight" in name), 0.3)
        xs = [*model.model.embed_tokens(ids[0])]
        for number in range(model.config.num_hidden_layers):
            layer = model.model.layers[0 if share_layers else number]
            norm, mlp_norm = layer.post_attention_layernorm, layer.post_mlp_layernorm
            mixed = zip(xs, attended(layer.self_attn, xs), strict=True)
            xs = [normalized(norm, x + m) for x, m in mixed]
            xs = [normalized(mlp_norm, x + through_experts(layer.mlp, x)) for x in xs]
        assert len(model.model.layers) == (1 if share_layers else 2)
        expected = model.lm_head(torch.stack(xs))
        torch.testing.assert_close(model(ids).logits[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_cache_and_padding_on_the_left_change_neither_logits_nor_what_is_generated(
    shape: str,
) -> None:
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
