"""Mixtures of experts in training: balance, biases, ranks, stages, Muon."""

from typing import Any

import pytest
import torch
from support.comparing import copies, distance
from support.tiny_data import NumberedRows
from support.tiny_mixtures import BIASED, spread_routers, tiny_moe
from support.tiny_trainers import ALONE, PLAIN, SPARSE, Recorder, in_ranks, make_trainer, tiny_model
from support.tiny_trainers import settings_of_training as settings_of
from torch import Tensor, nn

from ttrain.config import Optim, Schedule
from ttrain.errors import UsageError
from ttrain.train.distributed import Ranks
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.moe import Routers
from ttrain.train.optim import MOMENTUM, Muon
from ttrain.train.training_options import Cadence, Speed

MUON = {
    "tokens": 96,
    "optim": Optim(kind="muon", muon_lr=0.1, weight_decay=0),
    "schedule": Schedule(kind="constant", warmup_steps=0),
}


def fit(model: Any, recorder: Recorder, cadence: Cadence = SPARSE, **settings: Any) -> None:
    options: dict[str, Any] = {"callbacks": [recorder], "cadence": cadence}
    make_trainer(settings_of(**settings), model, NumberedRows(60), **options).fit()


def shares_of(metrics: Any, layer: int) -> list[float]:
    return [metrics[f"moe_load/layer_{layer}/expert_{expert}"] for expert in range(4)]


def test_the_logged_loss_is_the_sum_of_its_logged_parts() -> None:
    recorder = Recorder()
    fit(tiny_moe("ernie4_5_moe", balance=0.3, z_loss=0.05), recorder, tokens=5 * 96)
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


def trained(
    kind: str, ranks: Ranks = ALONE, how: Speed = PLAIN, **changes: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights before and after."""
    model = tiny_moe(kind, balance=0.1, bias_rate=0.02)
    config = settings_of(**{"tokens": 2 * 96, **changes})
    trainer = make_trainer(config, model, NumberedRows(60), ranks=ranks, how=how)
    before = copies(trainer.parallel.whole(trainer.weights.state()))
    trainer.fit()
    return before, copies(trainer.parallel.whole(trainer.weights.state()))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What two sharded ranks have, and what after a step of Muon. Replicated ones: tests/doctor."""
    how = Speed(parallel="fsdp")

    def work(ranks: Ranks) -> Any:
        return trained("ernie4_5_moe", ranks, how), trained("glm4_moe", ranks, how, **MUON)

    return in_ranks(2, tmp_path_factory.mktemp("ranks"), work)[0]


def test_sharded_ranks_move_the_biases_as_one_does(sharded: Any) -> None:
    """ernie4_5_moe keeps them among its parameters, which are cut, the other among its buffers."""
    (_, alone), (_, after) = trained("ernie4_5_moe"), sharded[0]
    assert distance(alone, after) < 1e-5
    biases = [name for name in after if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2 and all(torch.equal(alone[name], after[name]) for name in biases)


def test_a_sharded_step_of_muon_orthogonalises_whole_matrices(sharded: Any) -> None:
    (before, after), (before_sharded, after_sharded) = trained("glm4_moe", **MUON), sharded[1]
    for name in (name for name in after if after[name].ndim > 1):
        expected, move = after[name] - before[name], after_sharded[name] - before_sharded[name]
        assert distance({name: expected}, {name: move}) < 1e-4, name


@pytest.mark.parametrize("kind", BIASED)
def test_a_step_moves_each_bias_by_the_rate_away_from_the_load(kind: str) -> None:
    model, recorder = spread_routers(tiny_moe(kind, bias_rate=0.05)), Recorder()
    before = [bias.clone() for bias in Routers(model).biases if bias is not None]
    fit(model, recorder, Cadence(log=1), tokens=96)
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
