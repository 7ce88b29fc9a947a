"""A loss or gradient that is no number: stop, skip, raise; the rows are named, the weights are those before it."""

import math
import threading
from pathlib import Path
from typing import Any

import pytest
from support.comparing import copies, same
from support.tiny_data import NumberedRows
from support.tiny_trainers import (
    Recorder,
    WatchedTask,
    in_ranks,
    make_trainer,
    settings_of_training,
    tiny_model,
)

from ttrain.data.packing import Batch
from ttrain.model import factory
from ttrain.train import checkpoint
from ttrain.train.distributed import Ranks
from ttrain.train.step_figures import SKIPS_IN_A_ROW, NonFinite
from ttrain.train.trainer import Trainer
from ttrain.train.training_options import Cadence

ALWAYS = Cadence(log=1, checkpoint=100)


class Poisoned(WatchedTask):
    rows: frozenset[int] = frozenset()
    factor = math.nan

    def train_step(self, model: Any, batch: Batch, device: Any) -> Any:
        loss = super().train_step(model, batch, device)
        known = {NumberedRows(1 + row).batch([row]).input_ids_BT.tobytes() for row in self.rows}
        hit = any(row.tobytes() in known for row in batch.input_ids_BT)
        return type(loss)(loss.total * self.factor, loss.count) if hit else loss


def trainer_with(
    rows: set[int], policy: str, *, factor: float = math.nan, **options: Any
) -> Trainer:
    config = settings_of_training(nonfinite=policy, tokens=7 * 96)
    model = tiny_model()
    task = Poisoned(config, model)
    task.rows, task.factor = frozenset(rows), factor
    return make_trainer(
        config, model, NumberedRows(120), rows_per_device=2, task=task, cadence=ALWAYS, **options
    )


def rows_of_step(step: int) -> list[int]:
    """Step counted from 0."""
    found: list[int] = trainer_with(set(), "stop").loader.order.step_rows(step).tolist()
    return found


def test_stop_saves_the_state_before_the_step_and_names_its_rows_but_raise_does_not(
    tmp_path: Path,
) -> None:
    rows = rows_of_step(2)
    trainer = trainer_with({rows[3]}, "stop", directory=tmp_path)
    with pytest.raises(NonFinite, match=r"loss of step 3 .*nan.*training\.optim\.lr") as error:
        trainer.fit()
    with pytest.raises(NonFinite):
        trainer_with({rows[3]}, "raise", directory=tmp_path / "raise").fit()
    assert not list(tmp_path.glob("raise/step-*"))
    assert error.value.rows == rows[2:4], "the two rows of the micro-batch that holds it"
    kept = checkpoint.read(tmp_path / "step-00000002")
    assert same(kept.weights, factory.state(trainer.weights.model))  # type: ignore[attr-defined]
    healed = trainer_with(set(), "stop", directory=tmp_path)
    assert healed.first == 2
    straight = trainer_with(set(), "stop")
    for each in (healed, straight):
        each.fit()
    assert same(healed.weights.state(), straight.weights.state()), "nothing of the bad step is left"


def test_a_gradient_that_is_no_number_names_all_rows_of_the_step() -> None:
    class Spoilt(WatchedTask):
        def train_step(self, model: Any, batch: Batch, device: Any) -> Any:
            loss = super().train_step(model, batch, device)
            if self.passes == 5:
                loss.total.register_hook(lambda gradient: gradient * math.nan)
            return loss

    config, model = settings_of_training(), tiny_model()
    trainer = make_trainer(
        config, model, NumberedRows(120), rows_per_device=2, task=Spoilt(config, model)
    )
    with pytest.raises(NonFinite, match=r"gradient of step 2 .*loss \d.*norm nan") as error:
        trainer.fit()
    assert error.value.rows == rows_of_step(1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader")], (
        "though the error is kept"
    )


def test_skip_leaves_the_step_out_and_counts_it(caplog: pytest.LogCaptureFixture) -> None:
    recorder, seen = Recorder(), []

    class Looks(Recorder):
        def log(self, record: Any) -> None:
            seen.append(copies(factory.state(trainer.weights.model)))  # type: ignore[attr-defined]

    trainer = trainer_with(
        {rows_of_step(2)[0]}, "skip", factor=math.inf, callbacks=[recorder, Looks()]
    )
    result = trainer.fit()
    assert (result.skipped_steps, result.step) == (1, 7)
    assert same(seen[1], seen[2]) and not same(seen[2], seen[3])
    [warning] = [
        record.getMessage() for record in caplog.records if "finite" in record.getMessage()
    ]
    assert "step 3" in warning and "inf" in warning and "skipped" in warning
    assert len(recorder.figures("loss")) == 6, "the loss of a step that was skipped is in no mean"
    assert recorder.figures("skipped_steps") == [1.0] * 5


def test_a_run_that_only_skips_ends() -> None:
    with pytest.raises(
        NonFinite,
        match=f"step {SKIPS_IN_A_ROW + 1} is not finite.*; {SKIPS_IN_A_ROW} steps in a row",
    ):
        config = settings_of_training(nonfinite="skip", tokens=40 * 96)
        model = tiny_model()
        task = WatchedTask(config, model, spoil=lambda passes: math.nan)
        make_trainer(config, model, NumberedRows(120), rows_per_device=6, task=task).fit()


def test_two_ranks_agree_on_the_rows_of_one_of_them(tmp_path: Path) -> None:
    rows = rows_of_step(2)

    def fails(ranks: Ranks) -> list[int]:
        trainer = trainer_with({rows[2]}, "stop", ranks=ranks, directory=tmp_path / "checkpoints")
        with pytest.raises(NonFinite) as error:
            trainer.fit()
        return error.value.rows

    assert in_ranks(2, tmp_path, fails) == [rows[2:4]] * 2
    assert checkpoint.read(tmp_path / "checkpoints" / "step-00000002").step == 2
