"""A loss or gradient that is not finite: stop, skip, raise; its rows are named, the weights
unchanged. Also where figures stay on the device until a logging step."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparing import copies, distance, same
from support.tiny_data import NumberedRows
from support.tiny_trainers import Recorder, WatchedTask, in_ranks, make_trainer, tiny_model
from support.tiny_trainers import settings_of_training as settings_of

from ttrain.config import Optim
from ttrain.data.packing import Batch
from ttrain.train import checkpoint
from ttrain.train.distributed import Ranks
from ttrain.train.step_figures import SKIPS_IN_A_ROW, NonFinite
from ttrain.train.trainer import Trainer
from ttrain.train.training_options import Cadence, Speed

READ, DEFERRED = Speed(defer=False), Speed(defer=True)
READ_OR_DEFERRED = pytest.mark.parametrize("how", [READ, DEFERRED], ids=["read", "deferred"])


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
    log = 5 if options.get("how") == DEFERRED else 1
    options |= {"task": poisoned, "rows_per_device": 2, "cadence": Cadence(log=log, checkpoint=100)}
    return make_trainer(config, model, NumberedRows(120), **options)


def rows_of_step(step: int) -> list[int]:
    """Step counted from 0."""
    rows: list[int] = trainer_with(set(), "stop").loader.order.step_rows(step).tolist()
    return rows


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = trainer.weights.state()
    return weights


@READ_OR_DEFERRED
def test_stop_saves_the_state_before_the_step_and_raise_does_not(
    tmp_path: Path, how: Speed
) -> None:
    rows = rows_of_step(2)
    trainer = trainer_with({rows[3]}, "stop", directory=tmp_path, how=how)
    with pytest.raises(NonFinite, match=r"loss.*step 3.*nan.*training\.optim\.lr") as error:
        trainer.fit()
    with pytest.raises(NonFinite):
        trainer_with({rows[3]}, "raise", directory=tmp_path / "raise", how=how).fit()
    assert not list(tmp_path.glob("raise/step-*"))
    assert error.value.rows == rows[2:4], "the two rows of the micro-batch that holds it"
    assert same(checkpoint.read(tmp_path / "step-00000002").weights, state(trainer))
    healed = trainer_with(set(), "stop", directory=tmp_path, how=how)
    straight = trainer_with(set(), "stop", how=how)
    assert healed.first == 2
    for each in (healed, straight):
        each.fit()
    assert same(state(healed), state(straight)), "nothing of the bad step is left"


@READ_OR_DEFERRED
def test_a_gradient_that_is_not_finite_names_all_rows_of_the_step(how: Speed) -> None:
    with pytest.raises(NonFinite, match=r"gradient.*step 2.*nan") as error:
        trainer_with(set(), "stop", {"spoilt_pass": 5}, how=how).fit()
    assert error.value.rows == rows_of_step(1)


def test_skip_leaves_the_step_out_and_counts_it(caplog: pytest.LogCaptureFixture) -> None:
    class Copying(Recorder):
        def log(self, record: Any) -> None:
            super().log(record)
            weights.append(copies(state(trainer)))

    recorder, weights = Copying(), list[dict[str, torch.Tensor]]()
    spoilt: Any = ({rows_of_step(2)[0]}, "skip", {"factor": math.inf})
    trainer = trainer_with(*spoilt, callbacks=[recorder])
    result = trainer.fit()
    assert (result.skipped_steps, result.step) == (1, 7)
    assert same(weights[1], weights[2]) and not same(weights[2], weights[3])
    messages = [record.getMessage() for record in caplog.records]
    (warning,) = [message for message in messages if "finite" in message]
    assert "step 3" in warning and "inf" in warning and "skipped" in warning
    assert len(recorder.figures("loss")) == 6, "the loss of a skipped step is in no mean"
    assert recorder.figures("skipped_steps") == [1.0] * 5
    deferred = trainer_with(*spoilt, how=DEFERRED)
    assert deferred.fit().skipped_steps == 1
    assert distance(state(trainer), state(deferred)) < 1e-4


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


@pytest.mark.parametrize(("kind", "rel", "limit"), [("adamw", 1e-5, 1e-4), ("muon", 2e-4, 1e-2)])
def test_deferred_figures_are_the_same(kind: Any, rel: float, limit: float, tmp_path: Path) -> None:
    config = settings_of(tokens=10 * 96, optim=Optim(kind=kind, lr=1e-2))
    counts, losses, weights, figures = [], [], [], []
    for how in (READ, DEFERRED):
        model, recorder, rows = tiny_model(layers=1), Recorder(), NumberedRows(13)
        options: dict[str, Any] = {"how": how, "cadence": Cadence(log=5, checkpoint=5)}
        options |= {"directory": tmp_path / str(how.defer), "callbacks": [recorder]}
        options |= {"rows_per_device": 3, "validation": [rows.batch([n]) for n in range(3)]}
        trainer = make_trainer(config, model, rows, **options)
        assert (trainer.deferred is not None) == how.defer
        result = trainer.fit()
        counts.append((result.step, result.live_tokens, sorted(recorder.events)))
        losses.append(result.validation_loss)
        weights.append(copies(trainer.bare.state_dict()))
        figures.append({name: recorder.figures(name) for name in ("loss", "grad_norm")})
    assert figures[1]["loss"] == pytest.approx(figures[0]["loss"], rel=rel)
    assert figures[1]["grad_norm"] == pytest.approx(figures[0]["grad_norm"], rel=1e-2)
    assert distance(*weights) < limit
    assert counts[0] == counts[1]
    assert losses[1] == pytest.approx(losses[0], rel=2e-4)
