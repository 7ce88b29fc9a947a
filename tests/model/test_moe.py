"""Mixtures of experts: their shape, their products, what is counted, and what keeps them
balanced."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.comparing import distance, same
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
    model, settings = tiny_moe(kind), KINDS[kind]
    assert model.config.model_type == kind and len(blocks(model)) == 2
    for block in blocks(model):
        E, inner, D = block.experts.gate_up_proj.shape
        active = 2 + settings["moe"].get("shared_experts", 0)
        assert (E, D, block.gate.top_k) == (4, 16, 2)
        # As many active parameters as a dense layer has.
        assert inner // 2 * active >= 64 > (inner // 2 - 8) * active
    moe_settings = {**settings["moe"], "dense_layers": 1, "expert_size": 24}
    model = tiny_model(kind=settings["kind"], layers=3, intermediate_size=40, moe=moe_settings)
    assert model.get_decoder().layers[0].mlp.gate_proj.weight.shape == (40, 16)
    assert [block.experts.down_proj.shape for block in blocks(model)] == [(4, 16, 24)] * 2


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("gpt2", {}, "kind is gpt2, .*; set model.kind=llama"),
        ("qwen3", {"bias_rate": 0.1}, "model.moe.shared_experts=1, or model.kind=llama"),
        ("llama", {"dense_layers": 2}, "model.moe.dense_layers is 2 .*model.layers is 2"),
        ("mixtral", {"shared_experts": 2}, "model.moe.shared_experts is 2 .*mixtral"),
        ("granitemoe", {"dense_layers": 1}, "all layers of granitemoe"),
    ],
)
def test_a_mixture_of_no_kind_is_refused(kind: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tiny_model(kind=kind, moe=settings)


def slow(block: Any, x_ND: Tensor) -> Tensor:
    """A layer of experts, token by token and expert by expert."""
    silu, out = nn.functional.silu, torch.zeros_like(x_ND)
    tensors = [*block.gate.named_buffers(), *block.gate.named_parameters()]
    biases = [tensor.flatten() for name, tensor in tensors if name.endswith("bias")]
    shared = getattr(block, "shared_experts", None)
    for n, x in enumerate(x_ND):
        logits_E = block.gate.weight @ x
        scores = logits_E.sigmoid() if "Glm" in type(block).__name__ else logits_E.softmax(0)
        ranking = scores + biases[0] if biases else scores
        chosen = ranking.argsort(descending=True)[: block.gate.top_k].tolist()
        for e in chosen:
            gate, up = (block.experts.gate_up_proj[e] @ x).chunk(2)
            share = scores[e] / sum(scores[i] for i in chosen)
            out[n] += share * (block.experts.down_proj[e] @ (silu(gate) * up))
        if shared is not None:
            inner = silu(shared.gate_proj.weight @ x) * (shared.up_proj.weight @ x)
            out[n] += shared.down_proj.weight @ inner
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
    expected, results = (layer_gradients(name, autocast=False) for name in ("eager", moe.NAME))
    for name, tensor in expected.items():
        assert distance({name: tensor}, {name: results[name]}) < 1e-6, name
    assert not results["gate_up_proj"][7].any() and not results["down_proj"][7].any()
    theirs, ours = (layer_gradients(name, autocast=True) for name in ("eager", moe.NAME))
    assert 0 < distance(expected, ours) < 1.2 * distance(expected, theirs)
    frozen = layer_gradients(moe.NAME, autocast=False, train=False)
    assert {*frozen} == {"out", "hidden", "weights"}
    assert same(frozen, {name: results[name] for name in frozen})


def test_experts_of_a_width_that_groups_do_not_take_are_computed_one_by_one() -> None:
    model = tiny_moe("mixtral", expert_size=20)
    moe.group(model)
    assert model.config._experts_implementation == "eager"
    assert torch.isfinite(sums_of(model, padded_rows()).total)


def test_routers_decide_in_fp32_under_autocast() -> None:
    model = tiny_moe("glm4_moe")
    routers = Routers(model)
    with torch.autocast("cpu", torch.bfloat16), routers.watched() as choices:
        model(input_ids=torch.arange(9, 25)[None])
    for logits_NE in (choice.logits_NE for choice in choices):
        assert logits_NE.dtype == torch.float32
        assert not torch.equal(logits_NE, logits_NE.bfloat16().float())


def sums_of(model: Any, batch: Batch) -> Any:
    task = LanguageModeling(settings_of_training(), model)
    return task.train_step(task.build_model().train(), batch, CPU)


def by_hand(model: Any, batch: Batch) -> dict[str, Any]:
    """Losses, loads and entropies, by loops over rows and tokens, from the routers' logits
    alone."""
    routers, E = Routers(model), 4
    with torch.no_grad(), routers.watched() as choices:
        task = LanguageModeling(settings_of_training(), model)
        task.validation_step(task.build_model(), batch, CPU)
    is_sigmoid = "Glm" in type(model).__name__
    sums: dict[str, Any] = {"balance": 0.0, "z": 0.0, "entropy": [], "load": []}
    biases = [0.0 if bias is None else bias.flatten().double().numpy() for bias in routers.biases]
    for choice in choices:
        logits = choice.logits_NE.double().numpy().reshape(*batch.labels_BT.shape, -1)
        load, entropy = np.zeros(E), 0.0
        for row, logits_TE in enumerate(logits):
            live = int((batch.labels_BT[row] != -100).sum())
            raws = logits_TE[batch.segments_BT[row] >= 0]
            f, P, z = np.zeros(E), np.zeros(E), 0.0
            for raw in raws:
                powers = np.exp(raw)
                score = 1 / (1 + 1 / powers) if is_sigmoid else powers / powers.sum()
                share = score / score.sum()
                f[np.argsort(-score)[:2]] += 1
                P += share
                z += math.log(powers.sum()) ** 2
                if live:
                    load[np.argsort(-(score + biases[choice.router]))[:2]] += 1
                    entropy -= float((share * np.log(share)).sum())
            tokens = len(raws)
            sums["balance"] += live * float((f * E / (2 * tokens) * (P / tokens)).sum())
            sums["z"] += live * z / tokens
        sums["load"].append(load.tolist())
        sums["entropy"].append(entropy)
    return sums


@pytest.mark.parametrize("kind", KINDS)
def test_the_sums_are_those_of_loops_over_rows_and_tokens(kind: str) -> None:
    model, batch = spread_routers(tiny_moe(kind, z_loss=0.1)), padded_rows()
    loss, expected = sums_of(model, batch), by_hand(model, batch)
    assert float(loss.parts["balance"]) == pytest.approx(expected["balance"], rel=1e-5)
    assert float(loss.parts["z"]) == pytest.approx(expected["z"], rel=1e-5)
    loads = [loss.sums[f"moe_load/{layer}/{layer}"].tolist() for layer in range(2)]
    assert loads == expected["load"]
    assert loss.sums["moe_entropy"].tolist() == pytest.approx(expected["entropy"], rel=1e-5)
    # Padding and rows without a target are left out.
    assert loss.sums["moe_tokens"].tolist() == [16 + 15 + 14 + 13 + 11]


SIGMOID = ("glm4_moe", "deepseek_v3", "exaone_moe", "minimax_m2", "afmoe")
SOFTMAX = ("ernie4_5_moe", "qwen3_moe", "olmoe", "granitemoe", "tinyseek")


@pytest.mark.parametrize("kind", SIGMOID + SOFTMAX)
def test_scores_are_what_the_router_of_the_architecture_computes(kind: str) -> None:
    model = tiny_model(kind=kind, moe={"experts": 4, "top_k": 2, "expert_size": 8})
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    scores = Routers(model).scores(RouterCall(0, logits, torch.tensor([[2, 1]])))
    independent = logits.sigmoid() / logits.sigmoid().sum()
    assert torch.allclose(scores, independent if kind in SIGMOID else logits.softmax(-1))


@pytest.mark.parametrize("kind", ["mixtral", "glm4_moe"])
def test_the_gradient_of_the_balance_is_that_of_finite_differences(kind: str) -> None:
    routers, batch = Routers(tiny_moe(kind)), padded_rows()
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(6 * 16, 4, generator=generator, dtype=torch.float64).requires_grad_()
    inside = torch.from_numpy(batch.segments_BT >= 0)
    live = torch.from_numpy((batch.labels_BT != -100).sum(1))

    def value(at: Tensor) -> Tensor:
        calls = [RouterCall(0, at, at.topk(2).indices)]
        balance, z = moe.row_losses(routers, calls, inside, live, z_loss=True)
        return balance + 0.1 * z

    (gradient,) = torch.autograd.grad(value(logits), logits)
    moved = gradient.view(6, 16, 4).abs().amax(-1) > 0
    assert torch.equal(moved, inside & (live > 0)[:, None]), "every token that counts, and no other"
    step = 1e-5 * torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        rise = float(value(logits + step) - value(logits - step))
    assert rise == pytest.approx(2 * float((gradient * step).sum()), rel=1e-6)
