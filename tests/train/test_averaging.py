"""The moving average of the weights: its numbers, what is saved of it, and what the next training continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparing import copies, distance, same
from support.tiny_data import NumberedRows
from support.tiny_trainers import ALONE, in_ranks, make_trainer, settings_of_training, tiny_model
from torch import Tensor

from ttrain.config import Schedule
from ttrain.train.checkpoint import Snapshot
from ttrain.train.distributed import Ranks
from ttrain.train.optim import Optimizers
from ttrain.train.trainer import Trainer, TrainerOptions
from ttrain.train.training_options import Cadence

SHARE = 0.4
AVERAGED = Schedule(kind="constant", warmup_steps=1, average=SHARE)
CONFIG, SHORT = (settings_of_training(schedule=AVERAGED, tokens=steps * 96) for steps in (20, 6))
ROWS = NumberedRows(60)


def trainer_of(directory: Path | None = None, **options: Any) -> Trainer:
    return make_trainer(CONFIG, tiny_model(), ROWS, directory=directory, **options)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return copies(trainer.weights.state())


@pytest.fixture
def newest(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """The weights after each step, as the optimizer left them."""
    found: list[dict[str, Tensor]] = []
    step = Optimizers.step

    def watch(optimizers: Optimizers) -> None:
        step(optimizers)
        found.append({optimizers.names[p]: p.detach().double().clone() for p in optimizers.parameters})

    monkeypatch.setattr(Optimizers, "step", watch)
    return found


def test_the_model_is_the_average_over_all_steps_with_few_first_ones(newest: list[dict[str, Tensor]]) -> None:
    trainer = trainer_of()
    trainer.fit()
    expected = newest[0]
    for number, tensors in enumerate(newest):
        kept = min(0.5 ** (1 / round(SHARE * trainer.steps)), (1 + number) / (10 + number))
        expected = {name: kept * expected[name] + (1 - kept) * tensors[name] for name in expected}
    found = {trainer.optimizers.names[p]: p.detach() for p in trainer.optimizers.parameters}
    assert distance(expected, found) < 1e-6 < 1e-3 < distance(newest[-1], found)


def test_the_average_moves_no_weight_that_the_optimizer_sees(newest: list[dict[str, Tensor]]) -> None:
    trainer_of(validation=[ROWS.batch([0, 1])], cadence=Cadence(validate=1)).fit()
    averaged = list(newest)
    newest.clear()
    plain = settings_of_training(schedule=AVERAGED.model_copy(update={"average": None}))
    make_trainer(plain, tiny_model(), ROWS).fit()
    assert all(same(first, second) for first, second in zip(averaged, newest, strict=True))


def test_a_validation_measures_the_average() -> None:
    batches = [ROWS.batch([0, 1])]
    trainer = trainer_of(validation=batches)
    measured = trainer.fit().validation_loss
    assert measured == trainer.validate(batches)


def test_a_training_that_was_stopped_ends_in_the_same_bits(tmp_path: Path) -> None:
    whole = trainer_of(tmp_path / "whole")
    whole.fit()
    first = trainer_of(tmp_path / "parts", stop_after=3)
    assert 0 < first.fit().step < whole.steps
    second = trainer_of(tmp_path / "parts")
    assert second.first > 0
    second.fit()
    assert same(weights(whole), weights(second))
    ends = [trainer.checkpoints.newest() for trainer in (whole, second) if trainer.checkpoints]
    assert same(ends[0].weights, ends[1].weights) and same(ends[0].optimizer, ends[1].optimizer)  # type: ignore[union-attr]


def test_a_checkpoint_is_the_average_and_holds_what_the_optimizer_moves(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.fit()
    saved = trainer.checkpoints.newest() if trainer.checkpoints else None
    assert saved and same(dict(saved.weights), weights(trainer))
    names = trainer.optimizers.names.values()
    assert {name for name in saved.optimizer if name.startswith("iterate|")} == {f"iterate|{name}" for name in names}
    assert {int(value) for name, value in saved.optimizer.items() if name.startswith("averaged|")} == {trainer.steps}


def ended() -> tuple[Snapshot, int]:
    """The state of a training with its average, and its steps."""
    before = make_trainer(SHORT, tiny_model(), ROWS)
    before.average.end = lambda: None  # type: ignore[method-assign]
    before.fit()
    with before.average.as_weights():
        state = copies({**before.optimizers.state(), **before.average.state()})
        return Snapshot(0, weights(before), state, {}), before.steps


def continued(
    plateau: Snapshot, steps: int, ranks: Ranks = ALONE, options: TrainerOptions | None = None
) -> dict[str, Tensor]:
    """Weights of a training that continues the average of another."""
    trainer = make_trainer(
        SHORT, tiny_model(seed=3), ROWS, rows_per_device=2, ranks=ranks, how=options or TrainerOptions(), plateau=plateau
    )
    assert trainer.average._count == steps
    trainer.fit()
    return copies(trainer.parallel.whole(trainer.weights.state()))


def test_two_ranks_continue_an_average_as_one_does(tmp_path: Path) -> None:
    before = ended()
    sharded = in_ranks(2, tmp_path, lambda ranks: continued(*before, ranks, TrainerOptions(parallel="fsdp")))[0]
    assert distance(continued(*before), sharded) < 1e-4


def test_a_training_without_an_average_continues_the_average_of_one_that_had_it(tmp_path: Path) -> None:
    before = trainer_of(tmp_path)
    before.fit()
    saved = before.checkpoints.newest() if before.checkpoints else None
    assert saved
    plain = settings_of_training(schedule=AVERAGED.model_copy(update={"average": None}))
    trainer = make_trainer(plain, tiny_model(seed=3), ROWS, plateau=Snapshot(0, saved.weights, saved.optimizer, {}))
    assert same(weights(trainer), dict(saved.weights))
    assert not any("iterate" in name for name in trainer.optimizers.state())
    trainer.fit()
    assert all(torch.isfinite(tensor).all() for tensor in weights(trainer).values())
