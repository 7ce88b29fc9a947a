"""Mixtures of experts: their shape, products, counts, balance, biases and ranks."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.comparing import copies, distance, same, with_gradients
from support.tiny_data import NumberedRows
from support.tiny_mixtures import KINDS, blocks, padded_rows, spread_routers, tiny_moe
from support.tiny_trainers import ALONE, CPU, PLAIN, Recorder, in_ranks, make_trainer, tiny_model
from support.tiny_trainers import settings_of_training as settings_of
from torch import Tensor, nn

from ttrain.config import Optim, Schedule
from ttrain.data.packing import Batch
from ttrain.errors import UsageError
from ttrain.train import moe
from ttrain.train.distributed import Ranks
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.moe import RouterCall, Routers
from ttrain.train.optim import MOMENTUM, Muon
from ttrain.train.training_options import Cadence, Speed


@pytest.mark.parametrize("kind", KINDS)
def test_the_settings_choose_an_architecture_that_has_what_they_ask_for(kind: str) -> None:
    model, settings = tiny_moe(kind), KINDS[kind]
    assert model.config.model_type == kind and len(blocks(model)) == 2
    active = 2 + settings["moe"].get("shared_experts", 0)
    for block in blocks(model):
        E, inner, D = block.experts.gate_up_proj.shape
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


def gradients(kind: str, implementation: str, *, autocast: bool, frozen: bool = False) -> Any:
    """Logits of a model of so many experts that some have no token, and gradients."""
    model, ids = spread_routers(tiny_moe(kind, experts=16)), torch.arange(9, 22)[None]
    moe.group(model)
    assert model.config._experts_implementation == moe.NAME
    model.config._experts_implementation = implementation
    for block in blocks(model):
        torch.nn.init.normal_(block.experts.gate_up_proj, std=0.2)
        torch.nn.init.normal_(block.experts.down_proj, std=0.2)
        block.experts.requires_grad_(not frozen)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(input_ids=ids).logits.float()
    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return with_gradients(logits, upstream, trained)


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_experts_are_those_of_transformers_one_by_one(kind: str) -> None:
    expected, results = (gradients(kind, name, autocast=False) for name in ("eager", moe.NAME))
    for name in (name for name in expected if expected[name].any()):
        assert distance({name: expected[name]}, {name: results[name]}) < 1e-5, name
    theirs, ours = (gradients(kind, name, autocast=True) for name in ("eager", moe.NAME))
    assert 0 < distance(expected, ours) < 1.2 * distance(expected, theirs)
    frozen = gradients(kind, moe.NAME, autocast=False, frozen=True)
    assert {*results} - {*frozen} == {name for name in results if ".experts." in name}
    assert same(frozen, {name: results[name] for name in frozen})


def test_routers_decide_in_fp32_under_autocast() -> None:
    model = tiny_moe("glm4_moe")
    routers = Routers(model)
    with torch.autocast("cpu", torch.bfloat16), routers.watched() as choices:
        model(input_ids=torch.arange(9, 25)[None])
    for logits_NE in (choice.logits_NE for choice in choices):
        assert logits_NE.dtype == torch.float32
        assert not torch.equal(logits_NE, logits_NE.bfloat16().float())


def sums_of(model: Any, batch: Batch) -> Any:
    task = LanguageModeling(settings_of(), model)
    return task.train_step(task.build_model().train(), batch, CPU)


def by_hand(model: Any, batch: Batch) -> dict[str, Any]:
    """Losses, loads and entropies, by loops over rows and tokens, from the routers' logits."""
    routers, E = Routers(model), 4
    with torch.no_grad(), routers.watched() as choices:
        task = LanguageModeling(settings_of(), model)
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
def test_the_balance_moves_every_token_that_counts_and_no_other(kind: str) -> None:
    routers, batch = Routers(tiny_moe(kind)), padded_rows()
    logits = torch.randn(6 * 16, 4, generator=torch.Generator().manual_seed(2)).requires_grad_()
    inside = torch.from_numpy(batch.segments_BT >= 0)
    live = torch.from_numpy((batch.labels_BT != -100).sum(1))
    calls = [RouterCall(0, logits, logits.topk(2).indices)]
    for part in moe.row_losses(routers, calls, inside, live, z_loss=True):
        (gradient,) = torch.autograd.grad(part, logits, retain_graph=True)
        moved = gradient.view(6, 16, 4).abs().amax(-1) > 0
        assert torch.equal(moved, inside & (live > 0)[:, None])


def shares_of(metrics: Any, layer: int) -> list[float]:
    return [metrics[f"moe_load/layer_{layer}/expert_{expert}"] for expert in range(4)]


def test_the_logged_loss_is_the_sum_of_its_logged_parts() -> None:
    recorder, model = Recorder(), tiny_moe("ernie4_5_moe", balance=0.3, z_loss=0.05)
    config = settings_of(tokens=5 * 96)
    make_trainer(config, model, NumberedRows(60), callbacks=[recorder]).fit()
    logged = [record.metrics for record in recorder.records if "loss" in record.metrics]
    assert len(logged) == 2
    for m in logged:
        added = 0.3 * m["loss_balance"] + 0.05 * m["loss_z"]
        assert m["loss"] == pytest.approx(m["loss_ce1"] + added, abs=1e-6)
        assert m["aux_loss"] == pytest.approx(m["loss"] - m["loss_ce1"])
        shares = [shares_of(m, layer) for layer in range(2)]
        assert [sum(layer) for layer in shares] == pytest.approx([1, 1])
        assert m["moe_max_load"] == pytest.approx(4 * max(max(layer) for layer in shares))
        assert 0 < m["moe_router_entropy"] <= 1


def test_a_sharded_step_of_muon_orthogonalises_whole_matrices_and_moves_the_biases(
    tmp_path: Path,
) -> None:
    """On two ranks. ernie4_5_moe keeps its biases among its parameters, which are cut."""
    optim = Optim(kind="muon", muon_lr=0.1, weight_decay=0)
    config = settings_of(tokens=96, optim=optim, schedule=Schedule(warmup_steps=0))

    def moves(ranks: Ranks = ALONE, how: Speed = PLAIN) -> dict[str, Tensor]:
        model = tiny_moe("ernie4_5_moe", balance=0.1, bias_rate=0.02)
        trainer = make_trainer(config, model, NumberedRows(60), ranks=ranks, how=how)
        before = copies(trainer.parallel.whole(trainer.weights.state()))
        trainer.fit()
        after = trainer.parallel.whole(trainer.weights.state())
        return {name: after[name] - before[name] for name in after}

    alone = moves()
    sharded = in_ranks(2, tmp_path, lambda ranks: moves(ranks, Speed(parallel="fsdp")))[0]
    biases = [name for name in alone if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2 and all(alone[name].any() for name in biases)
    assert all(torch.equal(alone[name], sharded[name]) for name in biases)
    for name in (name for name in alone if alone[name].ndim > 1):
        assert distance({name: alone[name]}, {name: sharded[name]}) < 1e-4, name


@pytest.mark.parametrize("kind", ["ernie4_5_moe", "glm4_moe"])
def test_a_step_moves_each_bias_by_the_rate_away_from_the_load(kind: str) -> None:
    model, recorder = spread_routers(tiny_moe(kind, bias_rate=0.05)), Recorder()
    before = [bias.clone() for bias in Routers(model).biases if bias is not None]
    options: dict[str, Any] = {"callbacks": [recorder], "cadence": Cadence(log=1)}
    make_trainer(settings_of(tokens=96), model, NumberedRows(60), **options).fit()
    for layer, (old, new) in enumerate(zip(before, Routers(model).biases, strict=True)):
        assert new is not None
        load = torch.tensor(shares_of(recorder.records[0].metrics, layer))
        assert torch.allclose((new - old).flatten(), 0.05 * torch.sign(0.25 - load), atol=1e-7)


def test_a_balance_without_a_router_and_a_bias_rate_without_a_bias_are_refused() -> None:
    model = tiny_model(kind="hunyuan_v1_moe", moe={"experts": 4})
    with pytest.raises(UsageError, match=r"model\.moe\.balance=0"):
        LanguageModeling(settings_of(), model)
    model = tiny_moe("mixtral")
    model.config.router_bias_rate = 0.1
    with pytest.raises(UsageError, match=r"MixtralForCausalLM.*bias"):
        LanguageModeling(settings_of(), model)


@pytest.mark.parametrize("shape", [(3, 6, 4), (3, 4, 6)])
def test_stacked_matrices_get_what_muon_gives_each(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    stack = nn.Parameter(torch.randn(shape, generator=generator))
    singles = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2}
    ours = Muon([stack], **settings)
    theirs = torch.optim.Muon(singles, momentum=MOMENTUM, **settings)
    for _ in range(3):
        stack.grad = torch.randn(shape, generator=generator)
        for single, gradient in zip(singles, stack.grad, strict=True):
            single.grad = gradient.clone()
        ours.step()
        theirs.step()
    expected = torch.stack([p.detach() for p in singles])
    assert distance({"w": expected}, {"w": stack.detach()}) < 0.02  # bf16 inside
