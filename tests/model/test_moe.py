"""Mixtures of experts: their shape, their products, what is counted, and what keeps them balanced."""

from typing import Any

import numpy as np
import pytest
import torch
from support.comparing import distance, same, with_gradients
from support.tiny_data import VOCAB, NumberedRows
from support.tiny_mixtures import KINDS, blocks, padded_rows, spread_routers, tiny_moe
from support.tiny_trainers import CPU, settings_of_training, tiny_model
from torch import Tensor

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
        assert inner // 2 * (2 + shared) >= 64 > (inner // 2 - 8) * (2 + shared), "as many active as dense"
        found = getattr(block, "shared_experts", None)
        assert (found.down_proj.weight.shape[1] if shared else found) == (shared * inner // 2 if shared else None)
    settings = {**KINDS[kind]["moe"], "dense_layers": 1, "expert_size": 24}
    model = tiny_model(kind=KINDS[kind]["kind"], layers=3, intermediate_size=40, moe=settings)
    assert model.get_decoder().layers[0].mlp.gate_proj.weight.shape == (40, 16)
    assert [block.experts.down_proj.shape for block in blocks(model)] == [(4, 16, 24)] * 2
    dense = tiny_model(kind=KINDS[kind]["kind"])
    assert not Routers(dense).modules and not [name for name in dense.state_dict() if "gate.w" in name or "experts" in name]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "gpt2", "moe": {}}, "model.kind is gpt2, which has no experts; set model.kind=llama"),
        ({"kind": "qwen3", "moe": {"bias_rate": 0.1}}, "set model.moe.shared_experts=1, or model.kind=llama"),
        ({"moe": {"dense_layers": 2}}, "model.moe.dense_layers is 2 but model.layers is 2"),
        ({"kind": "granitemoe", "moe": {"dense_layers": 1}}, "all layers of granitemoe have experts"),
    ],
)
def test_what_no_architecture_has_is_refused_with_the_cure(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tiny_model(**settings)


@pytest.mark.parametrize("kind", ["olmoe", "granitemoe", "deepseek_v3"])
def test_an_architecture_with_experts_of_its_own_takes_the_settings(kind: str) -> None:
    fields = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    shared = {"shared_experts": 1} if kind == "deepseek_v3" else {}
    model = tiny_model(kind=kind, moe={"experts": 6, "top_k": 3, **shared}, fields=fields if shared else {})
    routers = Routers(model).modules
    assert len(routers) == 2 and {(r.num_experts, r.top_k) for r in routers} == {(6, 3)}  # type: ignore[union-attr]
    assert torch.isfinite(sums_of(model, NumberedRows(3).batch(range(3))).total)


def layer_gradients(implementation: str, *, autocast: bool, train: bool = True) -> dict[str, Tensor]:
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
    trained = {name: p for name, p in block.experts.named_parameters() if p.requires_grad}
    leaves = {"hidden": hidden, "weights": weights, **trained}
    return with_gradients(out, torch.randn(37, 16), leaves)


def test_grouped_experts_are_those_of_transformers_one_by_one() -> None:
    expected, found = layer_gradients("eager", autocast=False), layer_gradients(moe.NAME, autocast=False)
    for name in expected:
        assert distance({name: expected[name]}, {name: found[name]}) < 1e-6, name
    assert not found["gate_up_proj"][7].any() and not found["down_proj"][7].any()
    theirs, ours = layer_gradients("eager", autocast=True), layer_gradients(moe.NAME, autocast=True)
    assert 0 < distance(expected, ours) < 1.2 * distance(expected, theirs)
    frozen = layer_gradients(moe.NAME, autocast=False, train=False)
    assert {*frozen} == {"out", "hidden", "weights"} and same(frozen, {name: found[name] for name in frozen})


@pytest.mark.parametrize("kind", KINDS)
def test_routers_decide_in_fp32_under_autocast(kind: str) -> None:
    model = tiny_moe(kind)
    routers = Routers(model)
    with torch.autocast("cpu", torch.bfloat16), routers.watched() as choices:
        model(input_ids=torch.randint(9, VOCAB, (2, 8)))
    for choice, block in zip(choices, blocks(model), strict=True):
        rounded = choice.logits_NE.bfloat16().float()
        assert choice.logits_NE.dtype == torch.float32 and not torch.equal(choice.logits_NE, rounded), block


def sums_of(model: Any, batch: Batch) -> Any:
    task = LanguageModeling(settings_of_training(), model)
    return task.train_step(task.build_model().train(), batch, CPU)


def by_hand(model: Any, batch: Batch) -> dict[str, Any]:
    """Balance loss, z-loss, loads and entropies, row by row, from the routers' logits alone."""
    routers = Routers(model)
    with torch.no_grad(), routers.watched() as choices:
        task = LanguageModeling(settings_of_training(), model)
        task.validation_step(task.build_model(), batch, CPU)
    found: dict[str, Any] = {"balance": 0.0, "z": 0.0, "entropy": [0.0, 0.0], "load": np.zeros((2, 4))}
    for layer, choice in enumerate(choices):
        bias = routers.biases[choice.router]
        added = np.zeros(4) if bias is None else bias.flatten().double().numpy()
        logits_BTE = choice.logits_NE.double().numpy().reshape(*batch.labels_BT.shape, -1)
        for row, logits_TE in enumerate(logits_BTE):
            raw = np.exp(logits_TE[batch.segments_BT[row] >= 0])
            live = int((batch.labels_BT[row] != -100).sum())
            is_apart = "Glm" in type(model).__name__
            score = raw / (1 + raw if is_apart else raw.sum(1, keepdims=True))
            share, tokens = score / score.sum(1, keepdims=True), len(raw)
            by_score = np.bincount(np.argsort(-score)[:, :2].flatten(), minlength=4)
            found["balance"] += live * float((by_score * 4 / (2 * tokens) * share.mean(0)).sum())
            found["z"] += live * float((np.log(raw.sum(1)) ** 2).mean())
            if live:
                chosen = np.argsort(-score - added)[:, :2].flatten()
                found["load"][layer] += np.bincount(chosen, minlength=4)
                found["entropy"][layer] -= float((share * np.log(share)).sum())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_sums_are_those_of_a_loop_over_rows(kind: str) -> None:
    model, batch = spread_routers(tiny_moe(kind, z_loss=0.1)), padded_rows()
    found, expected = sums_of(model, batch), by_hand(model, batch)
    assert float(found.parts["balance"]) == pytest.approx(expected["balance"], rel=1e-5)
    assert float(found.parts["z"]) == pytest.approx(expected["z"], rel=1e-5)
    loads = [found.sums[f"moe_load/{layer}/{layer}"].tolist() for layer in range(2)]
    assert loads == expected["load"].tolist()
    assert found.sums["moe_entropy"].tolist() == pytest.approx(expected["entropy"], rel=1e-5)
    assert found.sums["moe_tokens"].tolist() == [16 + 15 + 14 + 13 + 11], "padding and rows without a target are left out"


@pytest.mark.parametrize(
    ("kind", "apart"),
    [("glm4_moe", True), ("deepseek_v3", True), ("ernie4_5_moe", False), ("tinyseek", False)],
)
def test_scores_are_what_the_router_of_the_architecture_computes(kind: str, apart: bool) -> None:
    model = tiny_model(kind=kind, moe={"experts": 4, "top_k": 2, "expert_size": 8})
    routers, logits = Routers(model), torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    scores = routers.scores(RouterCall(0, logits, torch.tensor([[2, 1]])))
    expected = logits.sigmoid() / logits.sigmoid().sum() if apart else logits.softmax(-1)
    assert torch.allclose(scores, expected)
