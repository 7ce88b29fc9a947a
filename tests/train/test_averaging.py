"""The moving average of the weights: its numbers, what is saved of it, and what the next training continues."""

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


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return copies(trainer.weights.state())


def saved(trainer: Trainer) -> Snapshot:
    found = trainer.checkpoints.newest() if trainer.checkpoints else None
    assert found
    return found


def fit(trainer: Trainer) -> tuple[Any, list[dict[str, Tensor]]]:
    found: list[dict[str, Tensor]] = []
    step = Optimizers.step

    def watch(optimizers: Optimizers) -> None:
        step(optimizers)
        found.append(
            {optimizers.names[p]: p.detach().double().clone() for p in optimizers.parameters}
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimizers, "step", watch)
        return trainer.fit(), found


@pytest.fixture(scope="module")
def averaged(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Trainer, Any, list[dict[str, Tensor]]]:
    trainer = trainer_of(
        tmp_path_factory.mktemp("averaged"), validation=VALIDATION, cadence=Cadence(validate=1)
    )
    return trainer, *fit(trainer)


def test_model_validation_and_checkpoint_are_the_average_over_all_steps_with_few_first_ones(
    averaged: Any,
) -> None:
    trainer, result, newest = averaged
    expected = newest[0]
    for number, tensors in enumerate(newest):
        kept = (1 + number) / (10 + number)
        expected = {name: kept * expected[name] + (1 - kept) * tensors[name] for name in expected}
    found = {trainer.optimizers.names[p]: p.detach() for p in trainer.optimizers.parameters}
    assert distance(expected, found) < 1e-6 < 1e-3 < distance(newest[-1], found)
    assert result.validation_loss == trainer.model.measure(VALIDATION)[0]
    snapshot = saved(trainer)
    assert same(dict(snapshot.weights), weights(trainer))
    names = trainer.optimizers.names.values()
    assert {name for name in snapshot.optimizer if name.startswith("iterate|")} == {
        f"iterate|{name}" for name in names
    }
    assert {
        int(value) for name, value in snapshot.optimizer.items() if name.startswith("averaged|")
    } == {trainer.steps}


def test_a_half_life_is_a_share_of_the_steps() -> None:
    weight = torch.zeros(1)
    average = MovingAverage({weight: "w"}, 0.5, 8)
    average._count = 1000  # first steps count more
    average.update()
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
    assert same(weights(whole), weights(second))
    assert same(saved(whole).weights, saved(second).weights) and same(
        saved(whole).optimizer, saved(second).optimizer
    )


def test_two_ranks_continue_an_average_as_one_does(averaged: Any, tmp_path: Path) -> None:
    importlib.import_module("torch.distributed.fsdp")  # once, not in each rank
    found, steps = saved(averaged[0]), averaged[0].steps
    plateau = Snapshot(0, found.weights, found.optimizer, {})

    def continued(ranks: Ranks, how: Speed) -> dict[str, Tensor]:
        trainer = make_trainer(
            SHORT,
            tiny_model(seed=3),
            ROWS,
            rows_per_device=2,
            ranks=ranks,
            how=how,
            plateau=plateau,
        )
        assert trainer.average._count == steps
        trainer.fit()
        return copies(trainer.parallel.whole(trainer.weights.state()))

    sharded = in_ranks(2, tmp_path, lambda ranks: continued(ranks, Speed(parallel="fsdp")))[0]
    assert distance(continued(ALONE, Speed()), sharded) < 1e-4
