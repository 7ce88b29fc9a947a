"""Mixtures of experts: their shape, their products, what is counted, and what keeps them balanced."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.comparing import distance, same
from support.tiny_data import VOCAB, NumberedRows
from support.tiny_mixtures import BIASED, KINDS, blocks, padded_rows, spread_routers, tiny_moe
from support.tiny_trainers import CPU, settings_of_training, tiny_model
from torch import Tensor, nn

from ttrain.data.packing import Batch
from ttrain.errors import UsageError
from ttrain.train import moe
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.moe import RouterCall, Routers


@pytest.mark.parametrize("kind", KINDS)
def test_the_settings_choose_an_architecture_that_has_what_they_ask_for(kind: str) -> None:
    model = tiny_moe(kind)
    shared = KINDS[kind]["moe"].get("shared_experts", 0)
    assert model.config.model_type == kind
    assert len(blocks(model)) == 2
    for block in blocks(model):
        E, inner, D = block.experts.gate_up_proj.shape
        assert (E, D, block.gate.top_k) == (4, 16, 2)
        assert inner // 2 * (2 + shared) >= 64 > (inner // 2 - 8) * (2 + shared), (
            "as many active parameters as a dense layer"
        )
        found = getattr(block, "shared_experts", None)
        assert (found.down_proj.weight.shape[1] if shared else found) == (
            shared * inner // 2 if shared else None
        )
    settings = {**KINDS[kind]["moe"], "dense_layers": 1, "expert_size": 24}
    model = tiny_model(kind=KINDS[kind]["kind"], layers=3, intermediate_size=40, moe=settings)
    assert model.get_decoder().layers[0].mlp.gate_proj.weight.shape == (40, 16)
    assert [block.experts.down_proj.shape for block in blocks(model)] == [(4, 16, 24)] * 2
    dense = tiny_model(kind=KINDS[kind]["kind"])
    assert not Routers(dense).modules and not [
        name for name in dense.state_dict() if "gate.w" in name or "experts" in name
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kind": "gpt2", "moe": {}},
            "model.kind is gpt2, which has no experts; set model.kind=llama",
        ),
        (
            {"kind": "qwen3", "moe": {"bias_rate": 0.1}},
            "set model.moe.shared_experts=1, or model.kind=llama",
        ),
        ({"moe": {"dense_layers": 2}}, "model.moe.dense_layers is 2 but model.layers is 2"),
        (
            {"kind": "mixtral", "moe": {"shared_experts": 2}},
            "model.moe.shared_experts is 2 but model.kind mixtral has no",
        ),
        (
            {"kind": "granitemoe", "moe": {"dense_layers": 1}},
            "all layers of granitemoe have experts",
        ),
    ],
)
def test_what_no_architecture_has_is_refused_with_the_cure(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        tiny_model(**settings)


@pytest.mark.parametrize("kind", ["olmoe", "granitemoe", "deepseek_v3"])
def test_an_architecture_with_experts_of_its_own_takes_the_settings(kind: str) -> None:
    fields = {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    }
    shared = {"shared_experts": 1} if kind == "deepseek_v3" else {}
    model = tiny_model(
        kind=kind, moe={"experts": 6, "top_k": 3, **shared}, fields=fields if shared else {}
    )
    routers = Routers(model).modules
    assert len(routers) == 2 and {(r.num_experts, r.top_k) for r in routers} == {(6, 3)}  # type: ignore[union-attr]
    assert torch.isfinite(sums_of(model, NumberedRows(3).batch(range(3))).total)


def slow(block: Any, x_ND: Tensor) -> Tensor:
    silu = nn.functional.silu
    logits_NE = x_ND @ block.gate.weight.T
    biases = [
        t
        for name, t in [*block.gate.named_buffers(), *block.gate.named_parameters()]
        if name.endswith("bias")
    ]
    out = torch.zeros_like(x_ND)
    for n, x in enumerate(x_ND):
        scores = (
            logits_NE[n].sigmoid() if "Glm" in type(block).__name__ else logits_NE[n].softmax(0)
        )
        chosen = sorted(
            range(len(scores)),
            key=lambda e: -float(scores[e] + (biases[0].flatten()[e] if biases else 0)),
        )
        chosen = chosen[: block.gate.top_k]
        for e in chosen:
            gate, up = (block.experts.gate_up_proj[e] @ x).chunk(2)
            out[n] += (
                scores[e]
                / sum(scores[i] for i in chosen)
                * (block.experts.down_proj[e] @ (silu(gate) * up))
            )
        if getattr(block, "shared_experts", None) is not None:
            one = block.shared_experts
            out[n] += one.down_proj.weight @ (
                silu(one.gate_proj.weight @ x) * (one.up_proj.weight @ x)
            )
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_what_a_slow_reference_says(kind: str) -> None:
    shared = {"shared_experts": 2} if kind in BIASED else {}
    model = tiny_moe(kind, experts=16, top_k=4, **shared)
    moe.group(model)
    Routers(model)
    block = blocks(model)[0].eval()
    for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
        torch.nn.init.normal_(tensor, std=0.2 if name.endswith("bias") else 1.0)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert distance({"out": slow(block, x)}, {"out": block(x[None])[0]}) < 1e-5


def layer_gradients(
    implementation: str, *, autocast: bool, train: bool = True
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = tiny_moe("mixtral", experts=8)
    moe.group(model)
    model.config._experts_implementation = implementation
    block = blocks(model)[0]
    torch.nn.init.normal_(block.gate.weight)
    torch.nn.init.normal_(block.experts.gate_up_proj, std=0.2)
    torch.nn.init.normal_(block.experts.down_proj, std=0.2)
    block.experts.requires_grad_(train)
    hidden = torch.randn(37, 16).requires_grad_()
    weights = torch.rand(37, 2).requires_grad_()
    chosen = torch.stack([torch.randperm(7)[:2] for _ in range(37)])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = block.experts(hidden, chosen, weights)
    out.float().backward(torch.randn(37, 16))
    assert hidden.grad is not None and weights.grad is not None
    found = {name: p.grad for name, p in block.experts.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "hidden": hidden.grad, "weights": weights.grad, **found}


def test_grouped_experts_are_those_of_transformers_one_by_one() -> None:
    expected, found = (
        layer_gradients("eager", autocast=False),
        layer_gradients(moe.NAME, autocast=False),
    )
    for name in expected:
        assert distance({name: expected[name]}, {name: found[name]}) < 1e-6, name
    assert not found["gate_up_proj"][7].any() and not found["down_proj"][7].any()
    theirs, ours = layer_gradients("eager", autocast=True), layer_gradients(moe.NAME, autocast=True)
    assert 0 < distance(expected, ours) < 1.2 * distance(expected, theirs)
    frozen = layer_gradients(moe.NAME, autocast=False, train=False)
    assert {*frozen} == {"out", "hidden", "weights"} and same(
        frozen, {name: found[name] for name in frozen}
    )


def test_experts_of_a_width_that_groups_do_not_take_are_computed_one_by_one() -> None:
    model = tiny_moe("mixtral", expert_size=20)
    moe.group(model)
    assert model.config._experts_implementation == "eager"
    assert torch.isfinite(sums_of(model, padded_rows()).total)


@pytest.mark.parametrize("kind", KINDS)
def test_routers_decide_in_fp32_under_autocast(kind: str) -> None:
    model = tiny_moe(kind)
    routers = Routers(model)
    with torch.autocast("cpu", torch.bfloat16), routers.watched() as choices:
        model(input_ids=torch.randint(9, VOCAB, (2, 8)))
    for choice, block in zip(choices, blocks(model), strict=True):
        rounded = choice.logits_NE.bfloat16().float()
        assert choice.logits_NE.dtype == torch.float32 and not torch.equal(
            choice.logits_NE, rounded
        ), block


def sums_of(model: Any, batch: Batch) -> Any:
    task = LanguageModeling(settings_of_training(), model)
    return task.train_step(task.build_model().train(), batch, CPU)


def by_hand(model: Any, batch: Batch) -> dict[str, Any]:
    """Balance loss, z-loss, loads and entropies, by loops over rows, tokens and experts, from the routers' logits alone."""
    routers = Routers(model)
    with torch.no_grad(), routers.watched() as choices:
        task = LanguageModeling(settings_of_training(), model)
        task.validation_step(task.build_model(), batch, CPU)
    found: dict[str, Any] = {"balance": 0.0, "z": 0.0, "entropy": [], "load": []}
    biases = [None if bias is None else bias.flatten().double().numpy() for bias in routers.biases]
    for choice in choices:
        logits = choice.logits_NE.double().numpy().reshape(*batch.labels_BT.shape, -1)
        load, entropy, E = np.zeros(4), 0.0, 4
        for row in range(len(logits)):
            live = int((batch.labels_BT[row] != -100).sum())
            f, P, z, tokens = np.zeros(E), np.zeros(E), 0.0, 0
            for t in range(logits.shape[1]):
                if batch.segments_BT[row, t] < 0:
                    continue
                tokens += 1
                raw = logits[row, t]
                sigmoid = "Glm" in type(model).__name__
                score = 1 / (1 + np.exp(-raw)) if sigmoid else np.exp(raw) / np.exp(raw).sum()
                share = score / score.sum()
                f[np.argsort(-score)[:2]] += 1
                P += share
                z += math.log(np.exp(raw).sum()) ** 2
                if live:
                    bias = biases[choice.router]
                    load[np.argsort(-(score if bias is None else score + bias))[:2]] += 1
                    entropy -= float((share * np.log(share)).sum())
            found["balance"] += live * float((f * E / (2 * tokens) * (P / tokens)).sum())
            found["z"] += live * z / tokens
        found["load"].append(load.tolist())
        found["entropy"].append(entropy)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_sums_are_those_of_loops_over_rows_and_tokens(kind: str) -> None:
    model, batch = spread_routers(tiny_moe(kind, z_loss=0.1)), padded_rows()
    found, expected = sums_of(model, batch), by_hand(model, batch)
    assert float(found.parts["balance"]) == pytest.approx(expected["balance"], rel=1e-5)
    assert float(found.parts["z"]) == pytest.approx(expected["z"], rel=1e-5)
    loads = [found.sums[f"moe_load/{layer}/{layer}"].tolist() for layer in range(2)]
    assert loads == expected["load"]
    assert found.sums["moe_entropy"].tolist() == pytest.approx(expected["entropy"], rel=1e-5)
    assert found.sums["moe_tokens"].tolist() == [16 + 15 + 14 + 13 + 11], (
        "padding and rows without a target are left out"
    )


@pytest.mark.parametrize(
    ("kind", "apart"),
    [
        ("glm4_moe", True),
        ("deepseek_v3", True),
        ("exaone_moe", True),
        ("minimax_m2", True),
        ("afmoe", True),
        ("ernie4_5_moe", False),
        ("qwen3_moe", False),
        ("olmoe", False),
        ("granitemoe", False),
        ("tinyseek", False),
    ],
)
def test_scores_are_what_the_router_of_the_architecture_computes(kind: str, apart: bool) -> None:
    model = tiny_model(kind=kind, moe={"experts": 4, "top_k": 2, "expert_size": 8})
    routers, logits = Routers(model), torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    scores = routers.scores(RouterCall(0, logits, torch.tensor([[2, 1]])))
    expected = logits.sigmoid() / logits.sigmoid().sum() if apart else logits.softmax(-1)
    assert torch.allclose(scores, expected)


@pytest.mark.parametrize("kind", ["mixtral", "glm4_moe"])
def test_the_gradient_of_the_balance_is_that_of_finite_differences(kind: str) -> None:
    routers, batch = Routers(tiny_moe(kind)), padded_rows()
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(6 * 16, 4, generator=generator, dtype=torch.float64).requires_grad_()
    inside, live = (
        torch.from_numpy(batch.segments_BT >= 0),
        torch.from_numpy((batch.labels_BT != -100).sum(1)),
    )

    def value(at: Tensor) -> Tensor:
        found = moe.row_losses(
            routers, [RouterCall(0, at, at.topk(2).indices)], inside, live, z_loss=True
        )
        return found[0] + 0.1 * found[1]

    (gradient,) = torch.autograd.grad(value(logits), logits)
    moved = gradient.view(6, 16, 4).abs().amax(-1) > 0
    assert torch.equal(moved, inside & (live > 0)[:, None]), "every token that counts, and no other"
    for _ in range(3):
        direction = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            slope = (value(logits + 1e-5 * direction) - value(logits - 1e-5 * direction)) / 2e-5
        assert float(slope) == pytest.approx(float((gradient * direction).sum()), rel=1e-6)
