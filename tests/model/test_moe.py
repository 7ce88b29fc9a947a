"""Mixtures of experts: their shape, their products, what is counted, and what keeps them balanced."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.doubles import (
    ALONE,
    CPU,
    PLAIN,
    VOCAB,
    Held,
    Home,
    NumberedRows,
    Recorder,
    copies,
    distance,
    in_ranks,
    make_trainer,
    run_here,
    same,
    settings_of_training,
    stage_settings,
    tiny_model,
)
from torch import Tensor, nn

from ttrain.config import Lora, Optim, PretrainConfig, Schedule, SftConfig
from ttrain.config.model import Moe, MultiToken
from ttrain.data.packing import Batch
from ttrain.errors import UsageError
from ttrain.model import adapters
from ttrain.stages import pretrain, sft
from ttrain.train import moe
from ttrain.train import moe as experts
from ttrain.train.distributed import Ranks
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.moe import RouterCall, Routers
from ttrain.train.optim import StackedMuon
from ttrain.train.trainer import Cadence, TrainerOptions

KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"kind": "llama", "moe": {"experts": 4}},
    "qwen3_moe": {"kind": "qwen3", "moe": {"experts": 4}},
    "ernie4_5_moe": {"kind": "llama", "moe": {"experts": 4, "shared_experts": 1, "bias_rate": 0.01}},
    "glm4_moe": {"kind": "qwen3", "moe": {"experts": 4, "shared_experts": 1, "bias_rate": 0.01}},
}
BIASED = ("ernie4_5_moe", "glm4_moe")


def tiny_moe(kind: str, **more: Any) -> Any:
    """Two layers with four experts each, of which a token visits two; `more` are other settings of the experts."""
    settings = KINDS[kind]
    return tiny_model(kind=settings["kind"], moe={**settings["moe"], **more})


def blocks(model: nn.Module) -> list[Any]:
    """The layers' parts that hold a router and its experts."""
    return [module for module in model.modules() if hasattr(module, "gate") and hasattr(module, "experts")]


# --- the shape ----------------------------------------------------------------------------------------------------------


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
        assert (found.down_proj.weight.shape[1] if shared else found) == (shared * inner // 2 if shared else None)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_layers_stay_dense_where_asked(kind: str) -> None:
    settings = {**KINDS[kind]["moe"], "dense_layers": 1, "expert_size": 24}
    model = tiny_model(kind=KINDS[kind]["kind"], layers=3, intermediate_size=40, moe=settings)
    layers = model.get_decoder().layers
    assert layers[0].mlp.gate_proj.weight.shape == (40, 16)
    assert [block.experts.down_proj.shape for block in blocks(model)] == [(4, 16, 24)] * 2


def test_a_dense_model_has_no_router() -> None:
    assert not Routers(tiny_model()).modules
    assert not [name for name in tiny_model().state_dict() if "gate.weight" in name or "experts" in name]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "gpt2", "moe": {}}, "model.kind is gpt2, which has no experts; set model.kind=llama"),
        ({"kind": "qwen3", "moe": {"bias_rate": 0.1}}, "set model.moe.shared_experts=1, or model.kind=llama"),
        ({"moe": {"dense_layers": 2}}, "model.moe.dense_layers is 2 but model.layers is 2"),
        ({"kind": "mixtral", "moe": {"shared_experts": 2}}, "model.moe.shared_experts is 2 but model.kind mixtral has no"),
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
    routers = [module for _, module in Routers(model).modules]
    assert len(routers) == 2 and {(r.num_experts, r.top_k) for r in routers} == {(6, 3)}  # type: ignore[union-attr]
    assert torch.isfinite(sums_of(model, NumberedRows(3).batch(range(3))).total)


# --- the products -------------------------------------------------------------------------------------------------------


def slow(block: Any, x_ND: Tensor) -> Tensor:
    """One token after the other, one expert after the other."""
    silu = nn.functional.silu
    logits_NE = x_ND @ block.gate.weight.T
    biases = [t for name, t in [*block.gate.named_buffers(), *block.gate.named_parameters()] if name.endswith("bias")]
    out = torch.zeros_like(x_ND)
    for n, x in enumerate(x_ND):
        scores = logits_NE[n].sigmoid() if "Glm" in type(block).__name__ else logits_NE[n].softmax(0)
        chosen = sorted(range(len(scores)), key=lambda e: -float(scores[e] + (biases[0].flatten()[e] if biases else 0)))
        chosen = chosen[: block.gate.top_k]
        for e in chosen:
            gate, up = (block.experts.gate_up_proj[e] @ x).chunk(2)
            out[n] += scores[e] / sum(scores[i] for i in chosen) * (block.experts.down_proj[e] @ (silu(gate) * up))
        if getattr(block, "shared_experts", None) is not None:
            one = block.shared_experts
            out[n] += one.down_proj.weight @ (silu(one.gate_proj.weight @ x) * (one.up_proj.weight @ x))
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_what_a_slow_reference_says(kind: str) -> None:
    shared = {"shared_experts": 2} if kind in BIASED else {}
    model = tiny_moe(kind, experts=16, top_k=4, **shared)
    experts.group(model)
    Routers(model)
    block = blocks(model)[0].double().eval()
    for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
        torch.nn.init.normal_(tensor, std=0.2 if name.endswith("bias") else 1.0)
    x = torch.randn(5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert distance({"out": slow(block, x)}, {"out": block(x[None])[0]}) < 1e-6


def layer_gradients(implementation: str, *, autocast: bool, train: bool = True) -> dict[str, Tensor]:
    """Output and gradients of a layer of eight experts, one of which is chosen by nobody."""
    torch.manual_seed(0)
    model = tiny_moe("mixtral", experts=8)
    experts.group(model)
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
    expected, found = layer_gradients("eager", autocast=False), layer_gradients(experts.NAME, autocast=False)
    for name in expected:
        assert distance({name: expected[name]}, {name: found[name]}) < 1e-6, name
    assert not found["gate_up_proj"][7].any() and not found["down_proj"][7].any()
    theirs, ours = layer_gradients("eager", autocast=True), layer_gradients(experts.NAME, autocast=True)
    assert 0 < distance(expected, ours) < 1.2 * distance(expected, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_products_for_gpus_are_the_same(dtype: torch.dtype) -> None:
    """On a CPU, where torch has them too, with an expert that nobody chose."""
    generator = torch.Generator().manual_seed(4)
    tensors = [torch.randn(shape, generator=generator) for shape in ((37, 16), (8, 48, 16), (8, 16, 24), (37, 2))]
    chosen = torch.stack([torch.randperm(7, generator=generator)[:2] for _ in range(37)])
    results = []
    for compute in (experts.grouped_products, experts.Experts.apply):
        hidden, gate_up, down, weights = (tensor.clone().requires_grad_() for tensor in tensors)
        out = compute(hidden, gate_up, down, chosen, weights, dtype)
        out.float().square().sum().backward()
        results.append(
            {"out": out.detach().float(), **{str(n): t.grad for n, t in enumerate((hidden, gate_up, down, weights))}}
        )
    assert distance(*results) < (1e-6 if dtype == torch.float32 else 0.02)


def test_frozen_experts_get_no_gradient_and_their_input_the_same() -> None:
    expected, found = (
        layer_gradients(experts.NAME, autocast=False),
        layer_gradients(experts.NAME, autocast=False, train=False),
    )
    assert {*found} == {"out", "hidden", "weights"}
    assert same(found, {name: expected[name] for name in found})


@pytest.mark.parametrize("kind", ["mixtral", "glm4_moe"])
def test_every_expert_learns_within_fifty_steps(kind: str) -> None:
    model = tiny_moe(kind)
    before = copies(model.state_dict())
    config = settings_of_training(tokens=20 * 96, optim=Optim(lr=1e-3, weight_decay=0.0))
    make_trainer(config, model, NumberedRows(60)).fit()
    for name, tensor in model.state_dict().items():
        if "experts.down_proj" in name and tensor.ndim == 3:
            assert all(not torch.equal(now, then) for now, then in zip(tensor, before[name], strict=True)), name


@pytest.mark.parametrize("kind", ["mixtral", "glm4_moe"])
def test_evaluation_is_deterministic_and_a_row_does_not_know_its_neighbours(kind: str) -> None:
    model = tiny_moe(kind).eval()
    ids = torch.randint(9, VOCAB, (4, 16), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        together, again = model(input_ids=ids).logits, model(input_ids=ids).logits
        alone = torch.cat([model(input_ids=row[None]).logits for row in ids])
    assert torch.equal(together, again)
    assert torch.allclose(together, alone, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_routers_decide_in_fp32_under_autocast(kind: str) -> None:
    model = tiny_moe(kind)
    routers = Routers(model)
    with torch.autocast("cpu", torch.bfloat16), routers.watched() as choices:
        model(input_ids=torch.randint(9, VOCAB, (2, 8)))
    for choice, block in zip(choices, blocks(model), strict=True):
        rounded = choice.logits_NE.bfloat16().float()
        assert choice.logits_NE.dtype == torch.float32 and not torch.equal(choice.logits_NE, rounded), block


# --- what is counted and added to the loss ------------------------------------------------------------------------------


def padded_rows(count: int = 6) -> Batch:
    """Rows of sixteen tokens whose last ones are padding, a different number in each; row 4 has no target."""
    batch = NumberedRows(count).batch(range(count))
    for row in range(count):
        batch.segments_BT[row, 16 - row :] = -1
        batch.labels_BT[row, 16 - row :] = -100
    batch.labels_BT[4] = -100
    return batch


def sums_of(model: Any, batch: Batch) -> Any:
    """What a training step gives for these rows."""
    task = LanguageModeling(settings_of_training(), model)
    return task.train_step(task.build_model().train(), batch, CPU)


def by_hand(model: Any, batch: Batch) -> dict[str, Any]:
    """Balance loss, z-loss, loads and entropies, by loops over rows, tokens and experts, from the routers' logits alone."""
    routers = Routers(model)
    LanguageModeling(settings_of_training(), model)
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


def spread_routers(model: Any) -> Any:
    """Routers that prefer some experts, and biases that are not zero."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for block in blocks(model):
            block.gate.weight.normal_(0.0, 1.0, generator=generator)
        for bias in Routers(model).biases:
            if bias is not None:
                bias.normal_(0.0, 0.1, generator=generator)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_the_sums_are_those_of_loops_over_rows_and_tokens(kind: str) -> None:
    model, batch = spread_routers(tiny_moe(kind, z_loss=0.1)), padded_rows()
    found, expected = sums_of(model, batch), by_hand(model, batch)
    assert float(found.parts["balance"]) == pytest.approx(expected["balance"], rel=1e-5)
    assert float(found.parts["z"]) == pytest.approx(expected["z"], rel=1e-5)
    loads = [found.sums[f"moe_load/{layer}/{layer}"].tolist() for layer in range(2)]
    assert loads == expected["load"]
    assert found.sums["moe_entropy"].tolist() == pytest.approx(expected["entropy"], rel=1e-5)
    assert found.sums["moe_tokens"].tolist() == [16 + 15 + 14 + 13 + 11], "padding and rows without a target are left out"
    assert found.sums["moe_dropped"].tolist() == [0]


@pytest.mark.parametrize(
    ("kind", "apart"),
    [("glm4_moe", True), ("deepseek_v3", True), ("exaone_moe", True), ("minimax_m2", True), ("afmoe", True),
     ("ernie4_5_moe", False), ("qwen3_moe", False), ("olmoe", False), ("granitemoe", False), ("tinyseek", False)],
)  # fmt: skip
def test_scores_are_what_the_router_of_the_architecture_computes(kind: str, apart: bool) -> None:
    model = tiny_model(kind=kind, moe={"experts": 4, "top_k": 2, "expert_size": 8})
    routers, logits = Routers(model), torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    scores = routers.scores(RouterCall(0, logits, torch.tensor([[2, 1]])))
    expected = logits.sigmoid() / logits.sigmoid().sum() if apart else logits.softmax(-1)
    assert torch.allclose(scores, expected)


def test_even_routers_have_a_balance_loss_of_one_a_layer() -> None:
    model = tiny_moe("mixtral", experts=2, top_k=2)
    found = sums_of(model, NumberedRows(3).batch(range(3)))
    assert float(found.parts["balance"]) / found.count == pytest.approx(2.0, rel=1e-6), "all experts chosen: f is 1"


@pytest.mark.parametrize("kind", ["mixtral", "glm4_moe"])
def test_the_gradient_of_the_balance_is_that_of_finite_differences(kind: str) -> None:
    routers, batch = Routers(tiny_moe(kind)), padded_rows()
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(6 * 16, 4, generator=generator, dtype=torch.float64).requires_grad_()
    inside, live = torch.from_numpy(batch.segments_BT >= 0), torch.from_numpy((batch.labels_BT != -100).sum(1))

    def value(at: Tensor) -> Tensor:
        found = moe.row_losses(routers, [RouterCall(0, at, at.topk(2).indices)], inside, live, z_loss=True)
        return found[0] + 0.1 * found[1]

    (gradient,) = torch.autograd.grad(value(logits), logits)
    moved = gradient.view(6, 16, 4).abs().amax(-1) > 0
    assert torch.equal(moved, inside & (live > 0)[:, None]), "every token that counts, and no other"
    for _ in range(3):
        direction = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            slope = (value(logits + 1e-5 * direction) - value(logits - 1e-5 * direction)) / 2e-5
        assert float(slope) == pytest.approx(float((gradient * direction).sum()), rel=1e-6)


@pytest.mark.parametrize("kind", ["mixtral", "glm4_moe"])
def test_autocast_changes_no_bit_of_the_balance(kind: str) -> None:
    routers, logits = Routers(tiny_moe(kind)), torch.randn(2 * 300, 4, generator=torch.Generator().manual_seed(2))
    given = ([RouterCall(0, logits, logits.topk(2).indices)], torch.ones(2, 300, dtype=torch.bool), torch.tensor([280, 297]))
    plain = moe.row_losses(routers, *given, z_loss=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = moe.row_losses(routers, *given, z_loss=True)
    assert all(torch.equal(first, second) for first, second in zip(plain, found, strict=True))


@pytest.mark.parametrize("kind", ["mixtral", "glm4_moe"])
def test_the_balance_alone_moves_every_router(kind: str) -> None:
    model = spread_routers(tiny_moe(kind))
    sums_of(model, padded_rows()).parts["balance"].backward()
    assert all(float(block.gate.weight.grad.norm()) > 0 for block in blocks(model))


def test_a_choice_that_no_expert_computes_counts_as_dropped() -> None:
    model = tiny_moe("mixtral")
    task = LanguageModeling(settings_of_training(), model)
    block, batch = blocks(model)[1], padded_rows()
    compute = block.experts.forward
    expert_of_none = torch.tensor(4)

    def full(module: Any, inputs: Any) -> Any:
        hidden, chosen, weights = inputs
        chosen = chosen.clone()
        chosen[:3, 1] = expert_of_none  # as transformers marks what another rank computes
        return hidden, chosen, weights

    module = task.build_model().train()
    block.experts.register_forward_pre_hook(full, prepend=True)
    assert block.experts.forward == compute
    found = task.train_step(module, batch, CPU)
    assert found.sums["moe_dropped"].tolist() == [3]
    found.total.backward()  # type: ignore[no-untyped-call]
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


# --- training -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mixtral", "ernie4_5_moe"])
def test_the_logged_loss_is_the_sum_of_its_logged_parts(kind: str) -> None:
    recorder = Recorder()
    model = tiny_moe(kind, balance=0.3, z_loss=0.05)
    make_trainer(settings_of_training(), model, NumberedRows(60), callbacks=[recorder], rows_per_device=4).fit()
    logged = [record.metrics for record in recorder.records if "loss" in record.metrics]
    assert len(logged) == 7
    for m in logged:
        assert m["loss"] == pytest.approx(m["loss_ce1"] + 0.3 * m["loss_balance"] + 0.05 * m["loss_z"], abs=1e-6)
        shares = [[m[f"moe_load/layer_{layer}/expert_{expert}"] for expert in range(4)] for layer in range(2)]
        assert [sum(some) for some in shares] == pytest.approx([1, 1])
        fullest = [m[f"moe_max_load/layer_{layer}"] for layer in range(2)]
        assert fullest == pytest.approx([4 * max(some) for some in shares]) and m["moe_max_load"] == max(fullest)
        assert 0 < m["moe_router_entropy"] <= 1 and m["moe_dropped"] == 0


@pytest.mark.parametrize("kind", ["mixtral", "glm4_moe"])
def test_micro_batches_change_neither_gradient_nor_counts(kind: str) -> None:
    """In tasks' own words: what a step of six rows gives is the sum of what its parts give, fillers among them."""
    model, batch = spread_routers(tiny_moe(kind, balance=0.5, z_loss=0.1)), padded_rows()
    task = LanguageModeling(settings_of_training(), model)
    module = task.build_model().train()

    def found(parts: list[list[int]]) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
        sums: dict[str, Tensor] = {}
        for rows in parts:
            arrays = (batch.input_ids_BT, batch.labels_BT, batch.positions_BT, batch.segments_BT)
            loss = task.train_step(module, Batch(*(array[rows] for array in arrays)), CPU)
            loss.total.backward()  # type: ignore[no-untyped-call]
            sums = {name: value + sums.get(name, 0) for name, value in loss.sums.items()}
        filler = task.train_step(module, padded_rows().without_targets(), CPU)
        filler.total.backward()  # type: ignore[no-untyped-call]
        sums = {name: value + sums[name] for name, value in filler.sums.items()}
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return gradients, {name: value.tolist() for name, value in sums.items() if name != "moe_entropy"}

    whole, cut = found([[0, 1, 2, 3, 4, 5]]), found([[0], [1, 2], [3, 4, 5]])
    assert distance(whole[0], cut[0]) < 1e-6
    assert whole[1] == cut[1]


def trained(
    kind: str, ranks: Ranks = ALONE, how: TrainerOptions = PLAIN, **options: Any
) -> tuple[dict[str, Tensor], list[Any]]:
    """Weights and curve of twenty steps."""
    model = tiny_moe(kind, balance=0.1, bias_rate=0.02 if kind in BIASED else 0.0)
    recorder = Recorder()
    config = settings_of_training()
    make_trainer(config, model, NumberedRows(60), ranks=ranks, how=how, callbacks=[recorder], **options).fit()
    return copies(model.state_dict()), [record.metrics for record in recorder.records]


def test_two_ranks_train_the_experts_as_one_does_to_the_last_bit(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> Any:
        return trained("glm4_moe", ranks, TrainerOptions(reduction="tree"), rows_per_device=1)

    alone, curve = trained("glm4_moe", how=TrainerOptions(reduction="tree"), rows_per_device=1)
    for weights, _ in (found := in_ranks(2, tmp_path, work)):
        assert same(weights, alone)
    names = [name for name in curve[0] if name.startswith(("moe_load", "moe_dropped", "moe_max"))]
    assert [[line[name] for name in names] for line in found[0][1]] == [[line[name] for name in names] for line in curve]


def test_two_ranks_over_ddp_move_the_biases_as_one_does(tmp_path: Path) -> None:
    alone, _ = trained("ernie4_5_moe")
    biases = [name for name in alone if name.endswith("e_score_correction_bias")]
    for weights, _ in in_ranks(2, tmp_path, lambda ranks: trained("ernie4_5_moe", ranks)):
        assert distance(alone, weights) < 1e-5
        assert all(torch.equal(alone[name], weights[name]) and alone[name].any() for name in biases)


def test_sharded_ranks_move_the_biases_as_one_does(tmp_path: Path) -> None:
    """ernie4_5_moe keeps them among its parameters, which are cut; the other among its buffers, which are whole."""

    def work(ranks: Ranks) -> dict[str, Tensor]:
        model = tiny_moe("ernie4_5_moe", balance=0.1, bias_rate=0.02)
        trainer = make_trainer(
            settings_of_training(), model, NumberedRows(60), ranks=ranks, how=TrainerOptions(parallel="fsdp")
        )
        trainer.fit()
        return copies(trainer.parallel.whole(trainer.weights.state()))

    alone, _ = trained("ernie4_5_moe")
    found, _ = in_ranks(2, tmp_path, work)
    assert distance({name: alone[name] for name in found}, found) < 1e-5
    biases = [name for name in found if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2 and all(torch.equal(alone[name], found[name]) for name in biases)


def test_a_sharded_step_of_muon_orthogonalises_whole_matrices(tmp_path: Path) -> None:
    """Up to bf16, in which Newton-Schulz computes: with it in fp64, 20 steps of one rank and of two were the same bits."""

    def work(ranks: Ranks) -> dict[str, Tensor]:
        model = tiny_moe("glm4_moe", balance=0.1)
        optimizer = Optim(kind="muon", muon_lr=0.1, weight_decay=0)
        config = settings_of_training(tokens=96, optim=optimizer, schedule=Schedule(kind="constant", warmup_steps=0))
        how = TrainerOptions(parallel="fsdp" if ranks.world > 1 else "ddp")
        trainer = make_trainer(config, model, NumberedRows(60), ranks=ranks, how=how)
        before = copies(trainer.parallel.whole(trainer.weights.state()))
        trainer.fit()
        after = trainer.parallel.whole(trainer.weights.state())
        return {name: after[name] - tensor for name, tensor in before.items() if after[name].ndim > 1}

    alone, (sharded, _) = work(ALONE), in_ranks(2, tmp_path, work)
    moved = {name: distance({name: alone[name]}, {name: sharded[name]}) for name in sharded}
    assert max(moved.values()) < 0.1, moved


@pytest.mark.parametrize("kind", BIASED)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit_with_its_biases(kind: str, tmp_path: Path) -> None:
    expected, curve = trained(kind)
    trained(kind, directory=tmp_path, stop_after=10, cadence=Cadence(log=3, checkpoint=100))
    found, rest = trained(kind, directory=tmp_path)
    assert same(expected, found)
    assert rest == curve[-len(rest) :] and 0 < len(rest) < len(curve)


@pytest.mark.parametrize("kind", BIASED)
def test_a_step_moves_each_bias_by_the_rate_away_from_the_load(kind: str) -> None:
    model = spread_routers(tiny_moe(kind, bias_rate=0.05))
    before = [bias.clone() for bias in Routers(model).biases if bias is not None]
    config, recorder = settings_of_training(tokens=96), Recorder()
    make_trainer(config, model, NumberedRows(60), callbacks=[recorder], cadence=Cadence(log=1)).fit()
    shares = recorder.records[0].metrics
    for layer, (old, new) in enumerate(zip(before, Routers(model).biases, strict=True)):
        assert new is not None
        load = torch.tensor([shares[f"moe_load/layer_{layer}/expert_{expert}"] for expert in range(4)])
        assert torch.allclose((new - old).flatten(), 0.05 * torch.sign(0.25 - load), atol=1e-7)


def test_a_step_that_is_skipped_moves_no_bias() -> None:
    model = tiny_moe("glm4_moe", bias_rate=0.05)

    config = settings_of_training(tokens=96, nonfinite="skip")
    trainer = make_trainer(config, model, NumberedRows(60))
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    trainer.fit()
    assert all(bias is not None and not bias.any() for bias in Routers(model).biases)


def test_a_finished_model_holds_its_biases_and_opens_with_transformers(tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from ttrain.model import factory

    model = tiny_moe("ernie4_5_moe", bias_rate=0.05)
    make_trainer(settings_of_training(), model, NumberedRows(60)).fit()
    save_file({name: t.contiguous() for name, t in Held(model).state().items()}, tmp_path / "model.safetensors")
    for name, data in factory.files(model).items():
        (tmp_path / name).write_bytes(data)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.router_bias_rate == 0.05, "a stage that starts from it goes on in the same way"
    assert all(bias is not None and bias.any() for bias in Routers(loaded).biases)
    ids = torch.randint(9, VOCAB, (2, 16))
    with torch.no_grad():
        assert torch.allclose(loaded.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits, atol=1e-6)


@functools.cache
def last_max_load(kind: str, **settings: float) -> float:
    """The fullest expert of any layer, as a multiple of the mean, at the end of a run whose routers have favourites."""
    model, recorder = tiny_moe(kind, **settings), Recorder()
    with torch.no_grad():
        model.get_input_embeddings().weight += 0.02  # what all tokens have in common
        for block in blocks(model):
            block.gate.weight[:2] += 0.1
    config = settings_of_training(tokens=60 * 96, optim=Optim(lr=3e-3))
    make_trainer(config, model, NumberedRows(60), callbacks=[recorder], cadence=Cadence(log=10), rows_per_device=6).fit()
    return recorder.figures("moe_max_load")[-1]


@pytest.mark.parametrize(
    ("kind", "balanced"), [("mixtral", {"balance": 0.3}), ("glm4_moe", {"bias_rate": 0.02})], ids=["loss", "bias"]
)
def test_balancing_lowers_the_load_of_the_fullest_expert(kind: str, balanced: dict[str, float]) -> None:
    nothing = {"balance": 0.0, **({"bias_rate": 0.0} if kind in BIASED else {})}
    free, found = last_max_load(kind, **nothing), last_max_load(kind, **{**nothing, **balanced})
    assert found < 1.25 < 1.5 < free, (found, free)


def test_an_adapter_leaves_routers_and_biases_as_they_are() -> None:
    base = tiny_moe("glm4_moe", bias_rate=0.05)
    model = adapters.attach(base, Lora(rank=2, targets=("q_proj", "v_proj")))
    before = {name: t.clone() for name, t in model.state_dict().items() if "lora" not in name}

    class Adapter:
        def state(self) -> dict[str, Tensor]:
            return adapters.state(model)

        def load(self, weights: dict[str, Tensor]) -> None:
            adapters.load_state(model, weights)

    recorder = Recorder()
    config = settings_of_training()
    trainer = make_trainer(config, model, NumberedRows(60), callbacks=[recorder])
    trainer.fit()
    after = {name: t for name, t in model.state_dict().items() if "lora" not in name}
    assert same(before, after)
    assert "loss_balance" not in recorder.records[0].metrics and "moe_max_load" in recorder.records[0].metrics


def test_gradient_checkpointing_changes_no_bit_of_the_balance_either() -> None:
    def found(again: bool) -> dict[str, Tensor]:
        model = spread_routers(tiny_moe("mixtral", balance=0.5, z_loss=0.1))
        task = LanguageModeling(settings_of_training(), model, gradient_checkpointing=again)
        loss = task.train_step(task.build_model().train(), padded_rows(), CPU)
        loss.total.backward()  # type: ignore[no-untyped-call]
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {"loss": loss.total.detach(), **gradients, **{n: t.double() for n, t in loss.sums.items()}}

    assert same(found(False), found(True))


def test_a_balance_without_a_router_to_watch_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no router that can be observed; set model.moe.balance=0"):
        LanguageModeling(settings_of_training(), tiny_model(kind="hunyuan_v1_moe", moe={"experts": 4}))


def test_a_bias_rate_without_a_bias_is_refused() -> None:
    model = tiny_moe("mixtral")
    model.config.router_bias_rate = 0.1
    with pytest.raises(UsageError, match="the routers of MixtralForCausalLM have no bias"):
        LanguageModeling(settings_of_training(), model)


# --- whole stages -------------------------------------------------------------------------------------------------------


def test_fine_tuning_goes_on_balancing_as_the_base_was(tmp_path: Path) -> None:
    home, settings = Home.make(tmp_path / "home"), stage_settings(steps=3)
    moe = Moe(experts=4, bias_rate=0.01, balance=0.2)
    model = settings.model.model_copy(update={"moe": moe, "multi_token": MultiToken(weight=0.5), "dropout": 0.0})
    inputs = {name: artifact.path for name, artifact in home.pretrain_inputs().items()}
    config = PretrainConfig(model=model, pretrain=settings.pretrain)
    run_here(pretrain, config, tmp_path / "base", inputs, settings.runtime)
    inputs = {"base": tmp_path / "base", "shards": home.chats.path}
    run_here(sft, SftConfig(sft=settings.sft), tmp_path / "tuned", inputs, settings.runtime)
    lines = [json.loads(line)["metrics"] for line in (tmp_path / "tuned" / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "loss" in line]
    assert logged
    for m in logged:
        assert m["loss"] == pytest.approx(m["loss_ce1"] + 0.5 * m["loss_ce2"] + 0.2 * m["loss_balance"], abs=1e-6)
    biases = [
        {name: t for name, t in load_file(tmp_path / stage / "model" / "model.safetensors").items() if "correction" in name}
        for stage in ("base", "tuned")
    ]
    assert {*biases[0]} == {*biases[1]} and len(biases[0]) == 2
    assert not same(*biases), biases


# --- Muon ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 6, 4), (3, 4, 6)])
def test_stacked_matrices_get_what_muon_gives_each(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    stack = nn.Parameter(torch.randn(shape, generator=generator))
    singles = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2}
    ours, theirs = StackedMuon([stack], **settings), torch.optim.Muon(singles, **settings)
    for _ in range(3):
        stack.grad = torch.randn(shape, generator=generator)
        for single, gradient in zip(singles, stack.grad, strict=True):
            single.grad = gradient.clone()
        ours.step()
        theirs.step()
    assert distance({"w": torch.stack([p.detach() for p in singles])}, {"w": stack.detach()}) < 0.02  # bf16 inside
