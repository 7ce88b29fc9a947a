"""Precision in the loop of training."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support.doubles import (
    CPU,
    SPARSE,
    VOCAB,
    NumberedRows,
    Recorder,
    WatchedTask,
    copies,
    make_trainer,
    same,
    settings_of_training,
    tiny_model,
)

from ttrain.config import Optim
from ttrain.errors import TTrainError
from ttrain.model import factory
from ttrain.train.callbacks import Callback, LogRecord
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.trainer import Cadence

# --- precision in the loop ----------------------------------------------------------------------------------------------


def test_fp16_skips_a_step_that_overflows_and_halves_the_scale() -> None:
    config, model = settings_of_training(precision="fp16", tokens=3 * 96), tiny_model()
    task = WatchedTask(config, model, spoil=lambda passes: math.inf if passes == 2 else 1.0)
    seen: list[tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []

    class Looks(Callback):
        def log(self, record: LogRecord) -> None:
            seen.append((trainer.loss_scale.scale, copies(factory.state(model)), copies(trainer.optimizers.state())))

    trainer = make_trainer(
        config, model, NumberedRows(52), rows_per_device=6, task=task, callbacks=[Looks()], cadence=Cadence(log=1)
    )
    result = trainer.fit()
    (scale, weights, state), (halved, kept, kept_state), (still, moved, _) = seen
    assert (scale, halved, still) == (2.0**16, 2.0**15, 2.0**15)
    assert same(weights, kept)
    assert same(state, kept_state)
    assert not same(kept, moved)
    assert (result.skipped_steps, result.step) == (1, 3)
    assert all(p.dtype == torch.float32 and bool(torch.isfinite(p).all()) for p in model.parameters())


def test_the_scale_of_fp16_and_its_count_of_good_steps_survive_a_stop(tmp_path: Path) -> None:
    config = settings_of_training(precision="fp16")

    def spoil(passes: int) -> float:
        return math.inf if passes == 2 else 1.0

    for stop_after in (4, None):
        model = tiny_model()
        trainer = make_trainer(
            config, model, NumberedRows(52), rows_per_device=6, directory=tmp_path, stop_after=stop_after,
            task=WatchedTask(config, model, spoil if stop_after else None),
        )  # fmt: skip
        result = trainer.fit()
    assert (trainer.loss_scale.scale, trainer.loss_scale.good_steps) == (2.0**15, 18)
    assert result.skipped_steps == 1


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_without_a_scale_a_loss_that_is_not_finite_ends_the_run_and_names_the_step(precision: str, value: float) -> None:
    config, model = settings_of_training(precision=precision), tiny_model()
    weights: dict[str, torch.Tensor] = {}

    def spoil(passes: int) -> float:
        if passes == 3:
            weights.update(copies(factory.state(model)))
        return value if passes == 3 else 1.0

    task = WatchedTask(config, model, spoil)
    with pytest.raises(TTrainError, match="the loss of step 3 is not finite"):
        make_trainer(config, model, NumberedRows(52), rows_per_device=6, task=task).fit()
    assert same(weights, factory.state(model))


def test_bf16_stays_within_1_percent_of_fp32_and_its_master_weights_are_fp32() -> None:
    losses = {}
    for precision in ("fp32", "bf16"):
        model = tiny_model()
        rows = NumberedRows(13)
        trainer = make_trainer(
            settings_of_training(precision=precision), model, rows, cadence=SPARSE, validation=[rows.batch(range(13))]
        )
        losses[precision] = trainer.fit().validation_loss
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {t.dtype for t in trainer.optimizers.state().values()} == {torch.float32}
    assert losses["fp32"] != losses["bf16"], "bf16 computes in another precision"
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.01)
    assert losses["fp32"] < math.log(VOCAB) - 0.2, "something was learnt"


def losses_of_one_row(dropout: float) -> list[float]:
    """The losses of six steps over the same row, at a learning rate that moves no weight that fp32 can tell."""
    config = settings_of_training(tokens=6 * 16, tokens_per_step=16, optim=Optim(lr=1e-12, clip=1e9))
    recorder = Recorder()
    trainer = make_trainer(
        config, tiny_model(dropout=dropout), NumberedRows(1), callbacks=[recorder], cadence=Cadence(log=1, checkpoint=0)
    )
    trainer.fit()
    return recorder.figures("loss")


def test_dropout_differs_from_step_to_step() -> None:
    assert len({round(loss, 5) for loss in losses_of_one_row(0.0)}) == 1, "without dropout every step is the same"
    assert len({round(loss, 5) for loss in losses_of_one_row(0.5)}) == 6


def test_validation_runs_in_the_precision_of_training() -> None:
    validation = [NumberedRows(6).batch(range(6))]
    losses = {}
    for precision in ("fp32", "bf16"):
        model = tiny_model()
        config = settings_of_training(precision=precision)
        losses[precision] = make_trainer(config, model, NumberedRows(12), validation=validation).validate(validation)
        task = LanguageModeling(config, model)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = task.validation_step(task.build_model().eval(), validation[0], CPU)
        assert losses[precision] == pytest.approx(float(loss.total) / loss.count, rel=1e-7)
    assert losses["bf16"] != losses["fp32"]
