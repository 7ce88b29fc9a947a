"""A loss or gradient that is not finite: stop, skip, raise; its rows are named, the weights
unchanged."""

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparing import copies, same
from support.tiny_data import NumberedRows
from support.tiny_trainers import Recorder, WatchedTask, in_ranks, make_trainer, tiny_model
from support.tiny_trainers import settings_of_training as settings_of

from ttrain.data.packing import Batch
from ttrain.train import checkpoint
from ttrain.train.distributed import Ranks
from ttrain.train.step_figures import SKIPS_IN_A_ROW, NonFinite
from ttrain.train.trainer import Trainer
from ttrain.train.training_options import Cadence


class Poisoned(WatchedTask):
    """A task whose loss is spoilt in micro-batches with these rows, or its gradient in one pass."""

    rows: frozenset[int] = frozenset()
    factor = math.nan
    spoilt_pass = 0

    def train_step(self, model: Any, batch: Batch, device: Any) -> Any:
        loss = super().train_step(model, batch, device)
        if self.passes == self.spoilt_pass:
            loss.total.register_hook(lambda gradient: gradient * math.nan)
        known = {NumberedRows(1 + row).batch([row]).input_ids_BT.tobytes() for row in self.rows}
        is_hit = any(row.tobytes() in known for row in batch.input_ids_BT)
        return type(loss)(loss.total * self.factor, loss.count) if is_hit else loss


def trainer_with(rows: set[int], policy: str, task: Any = None, **options: Any) -> Trainer:
    config, model = settings_of(nonfinite=policy, tokens=7 * 96), tiny_model()
    poisoned = Poisoned(config, model)
    poisoned.rows = frozenset(rows)
    vars(poisoned).update(task or {})
    options |= {"task": poisoned, "rows_per_device": 2, "cadence": Cadence(log=1, checkpoint=100)}
    return make_trainer(config, model, NumberedRows(120), **options)


def rows_of_step(step: int) -> list[int]:
    """Step counted from 0."""
    rows: list[int] = trainer_with(set(), "stop").loader.order.step_rows(step).tolist()
    return rows


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = trainer.weights.state()
    return weights


def test_stop_saves_the_state_before_the_step_and_raise_does_not(tmp_path: Path) -> None:
    rows = rows_of_step(2)
    trainer = trainer_with({rows[3]}, "stop", directory=tmp_path)
    with pytest.raises(NonFinite, match=r"loss.*step 3.*nan.*training\.optim\.lr") as error:
        trainer.fit()
    with pytest.raises(NonFinite):
        trainer_with({rows[3]}, "raise", directory=tmp_path / "raise").fit()
    assert not list(tmp_path.glob("raise/step-*"))
    assert error.value.rows == rows[2:4], "the two rows of the micro-batch that holds it"
    assert same(checkpoint.read(tmp_path / "step-00000002").weights, state(trainer))
    healed, straight = trainer_with(set(), "stop", directory=tmp_path), trainer_with(set(), "stop")
    assert healed.first == 2
    for each in (healed, straight):
        each.fit()
    assert same(state(healed), state(straight)), "nothing of the bad step is left"


def test_a_gradient_that_is_not_finite_names_all_rows_of_the_step() -> None:
    trainer = trainer_with(set(), "stop", {"spoilt_pass": 5})
    with pytest.raises(NonFinite, match=r"gradient.*step 2.*nan") as error:
        trainer.fit()
    assert error.value.rows == rows_of_step(1)
    threads = [thread.name for thread in threading.enumerate()]
    assert not [name for name in threads if name.startswith("loader")], "though the error is kept"


def test_skip_leaves_the_step_out_and_counts_it(caplog: pytest.LogCaptureFixture) -> None:
    class Copying(Recorder):
        def log(self, record: Any) -> None:
            super().log(record)
            weights.append(copies(state(trainer)))

    recorder, weights = Copying(), list[dict[str, torch.Tensor]]()
    rows = {rows_of_step(2)[0]}
    trainer = trainer_with(rows, "skip", {"factor": math.inf}, callbacks=[recorder])
    result = trainer.fit()
    assert (result.skipped_steps, result.step) == (1, 7)
    assert same(weights[1], weights[2]) and not same(weights[2], weights[3])
    messages = [record.getMessage() for record in caplog.records]
    (warning,) = [message for message in messages if "finite" in message]
    assert "step 3" in warning and "inf" in warning and "skipped" in warning
    assert len(recorder.figures("loss")) == 6, "the loss of a skipped step is in no mean"
    assert recorder.figures("skipped_steps") == [1.0] * 5


def test_a_run_that_only_skips_ends() -> None:
    config, model = settings_of(nonfinite="skip", tokens=40 * 96), tiny_model()
    task = WatchedTask(config, model, spoil=lambda passes: math.nan)
    trainer = make_trainer(config, model, NumberedRows(120), rows_per_device=6, task=task)
    with pytest.raises(NonFinite, match=f"step {SKIPS_IN_A_ROW + 1} .*; {SKIPS_IN_A_ROW} steps"):
        trainer.fit()


def test_two_ranks_agree_on_the_rows_of_one_of_them(tmp_path: Path) -> None:
    rows = rows_of_step(2)

    def fails(ranks: Ranks) -> list[int]:
        trainer = trainer_with({rows[2]}, "stop", ranks=ranks, directory=tmp_path / "checkpoints")
        with pytest.raises(NonFinite) as error:
            trainer.fit()
        return error.value.rows

    assert in_ranks(2, tmp_path, fails) == [rows[2:4]] * 2
    assert checkpoint.read(tmp_path / "checkpoints" / "step-00000002").step == 2
