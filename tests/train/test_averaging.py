"""The moving average of the weights: its values and its state. Sharded ones: test_sharded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparing import distance, same
from support.tiny_data import NumberedRows
from support.tiny_trainers import make_trainer, settings_of_training, tiny_model
from torch import Tensor

from ttrain.config import Schedule
from ttrain.train.averaging import MovingAverage
from ttrain.train.checkpoint import Snapshot
from ttrain.train.optim import Optimizers
from ttrain.train.trainer import Trainer
from ttrain.train.training_options import Cadence

AVERAGED = Schedule(kind="constant", warmup_steps=1, average=0.4)
CONFIG = settings_of_training(schedule=AVERAGED, tokens=8 * 96)
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


@pytest.mark.parametrize("is_deferred", [False, True])
def test_a_half_life_is_a_share_of_the_steps_that_were_not_prevented(is_deferred: bool) -> None:
    weight = torch.zeros(1)
    average = MovingAverage({weight: "w"}, 0.5, 8)
    average.load_state({"iterate|w": torch.zeros(1), "averaged|w": torch.tensor(1000)})
    weight += 1
    for _ in range(4):
        average.update(torch.tensor(0.0) if is_deferred else None)
        if is_deferred:
            average.update(torch.tensor(1.0))
    assert int(average.state()["averaged|w"]) == 1004
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


def test_another_training_continues_the_average(averaged: Any) -> None:
    snapshot = newest(averaged[0])
    plateau = Snapshot(0, snapshot.weights, snapshot.optimizer, {})
    trainer = make_trainer(CONFIG, tiny_model(seed=3), ROWS, plateau=plateau)
    assert averaged_steps(dict(trainer.average.state())) == {averaged[0].steps}
