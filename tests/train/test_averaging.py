"""The moving average of the weights: its values, its state, and what another training continues."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparing import copies, distance, same
from support.tiny_data import NumberedRows
from support.tiny_trainers import ALONE, in_ranks, make_trainer, settings_of_training, tiny_model
from torch import Tensor

from ttrain.config import Schedule
from ttrain.train.averaging import MovingAverage
from ttrain.train.checkpoint import Snapshot
from ttrain.train.distributed import Ranks
from ttrain.train.optim import Optimizers
from ttrain.train.trainer import Trainer
from ttrain.train.training_options import Cadence, Speed

AVERAGED = Schedule(kind="constant", warmup_steps=1, average=0.4)
CONFIG, SHORT = (settings_of_training(schedule=AVERAGED, tokens=steps * 96) for steps in (8, 3))
ROWS = NumberedRows(60)
VALIDATION = [ROWS.batch([0, 1])]


def trainer_of(directory: Path, **options: Any) -> Trainer:
    return make_trainer(CONFIG, tiny_model(), ROWS, directory=directory, **options)


def newest(trainer: Trainer) -> Snapshot:
    snapshot = trainer.checkpoints.newest() if trainer.checkpoints else None
    assert snapshot
    return snapshot


def averaged_steps(state: dict[str, Tensor]) -> set[int]:
    return {int(value) for name, value in state.items() if name.startswith("averaged|")}


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Any, list[Any]]:
    """A finished trainer, its result, and the weights after each step of its optimizers."""
    step, weights = Optimizers.step, list[dict[str, Tensor]]()

    def watched(optimizers: Optimizers) -> None:
        step(optimizers)
        names = optimizers.names
        weights.append({names[p]: p.detach().double().clone() for p in optimizers.parameters})

    options: dict[str, Any] = {"validation": VALIDATION, "cadence": Cadence(validate=1)}
    trainer = trainer_of(tmp_path_factory.mktemp("averaged"), **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimizers, "step", watched)
        return trainer, trainer.fit(), weights


def test_model_validation_and_checkpoint_hold_the_average_over_all_steps(averaged: Any) -> None:
    trainer, result, weights = averaged
    expected = weights[0]
    for number, tensors in enumerate(weights):
        kept = (1 + number) / (10 + number)  # the first steps count less
        expected = {name: kept * expected[name] + (1 - kept) * tensors[name] for name in expected}
    names = trainer.optimizers.names
    final = {names[p]: p.detach() for p in trainer.optimizers.parameters}
    assert distance(expected, final) < 1e-6 < 1e-3 < distance(weights[-1], final)
    assert result.validation_loss == trainer.model.measure(VALIDATION)[0]
    snapshot = newest(trainer)
    assert same(dict(snapshot.weights), trainer.weights.state())
    iterates = {name for name in snapshot.optimizer if name.startswith("iterate|")}
    assert iterates == {f"iterate|{name}" for name in names.values()}
    assert averaged_steps(dict(snapshot.optimizer)) == {trainer.steps}


def test_a_half_life_is_a_share_of_the_steps() -> None:
    weight = torch.zeros(1)
    average = MovingAverage({weight: "w"}, 0.5, 8)
    average.load_state({"iterate|w": torch.zeros(1), "averaged|w": torch.tensor(1000)})
    weight += 1
    for _ in range(4):
        average.update()
    average.end()
    assert float(weight) == pytest.approx(0.5)


def test_a_training_that_was_stopped_ends_in_the_same_bits(averaged: Any, tmp_path: Path) -> None:
    whole = averaged[0]
    assert 0 < trainer_of(tmp_path, stop_after=3).fit().step < whole.steps
    second = trainer_of(tmp_path)
    assert second.first > 0
    second.fit()
    assert same(whole.weights.state(), second.weights.state())
    assert same(newest(whole).weights, newest(second).weights)
    assert same(newest(whole).optimizer, newest(second).optimizer)


def test_two_sharded_ranks_continue_an_average_as_one_does(averaged: Any, tmp_path: Path) -> None:
    importlib.import_module("torch.distributed.fsdp")  # once, not in each rank
    snapshot, steps = newest(averaged[0]), averaged[0].steps
    options = {
        "rows_per_device": 2,
        "plateau": Snapshot(0, snapshot.weights, snapshot.optimizer, {}),
    }

    def continued(ranks: Ranks, how: Speed) -> dict[str, Tensor]:
        trainer = make_trainer(SHORT, tiny_model(seed=3), ROWS, ranks=ranks, how=how, **options)
        assert averaged_steps(dict(trainer.model.average.state())) == {steps}
        trainer.fit()
        return copies(trainer.parallel.whole(trainer.weights.state()))

    sharded = in_ranks(2, tmp_path, lambda ranks: continued(ranks, Speed(parallel="fsdp")))[0]
    assert distance(continued(ALONE, Speed()), sharded) < 1e-4


def test_an_average_that_leaves_out_prevented_steps_is_that_of_the_others() -> None:
    """After so many steps that the newest weights count by the half-life."""
    weight = torch.zeros(3)
    plain, watched = (MovingAverage({weight: "weight"}, 0.1, 100) for _ in range(2))
    for step in range(120):
        weight.fill_(float(step))
        plain.update()
        watched.update(torch.tensor(0.0))
        watched.update(torch.tensor(1.0))
    averages = []
    for average in (plain, watched):
        with average.as_weights():
            averages.append(float(weight[0]))
    assert averages[0] == pytest.approx(averages[1])
    assert 100 < averages[0] < 115
