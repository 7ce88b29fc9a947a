"""Callbacks: when they are told what, and that nothing they do moves the training, but for the stop that one may ask for."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparing import copies, same
from support.tiny_data import NumberedRows
from support.tiny_trainers import (
    ALONE,
    Recorder,
    WatchedTask,
    in_ranks,
    make_trainer,
    settings_of_training,
    tiny_model,
)

from ttrain.config import Optim, Schedule
from ttrain.core.files import ProgressWriter
from ttrain.data.packing import Batch
from ttrain.errors import TTrainError, UsageError
from ttrain.train import checkpoint
from ttrain.train.callbacks import Callback, LogRecord, MetricsFile, ProgressBar, StepRecord
from ttrain.train.distributed import Ranks
from ttrain.train.early_stopping import EarlyStopping, early_stopping
from ttrain.train.guards import LossSpike
from ttrain.train.task import LossSum
from ttrain.train.trainer import STOPPED, Trainer
from ttrain.train.training_options import Cadence

BATCH = NumberedRows(2).batch([0, 1])


class Everything(Callback):
    """Notes every hook by its name, with the step, epoch or error that it is told of."""

    def __init__(self) -> None:
        self.events: list[str] = []
        for hook, value in vars(Callback).items():
            if callable(value) and hook not in ("load_state", "stop_reason"):
                setattr(self, hook, partial(self.note, hook))

    def note(self, hook: str, *told: Any) -> dict[str, Any]:
        subject = getattr(told[0], "step", told[0]) if told else ""
        shown = type(subject).__name__ if isinstance(subject, BaseException) else subject
        self.events.append(hook if hook in ("state", "validation_figures") else f"{hook} {shown}")
        return {}


class Scripted(WatchedTask):
    def __init__(self, *arguments: Any, losses: Sequence[float]) -> None:
        super().__init__(*arguments)
        self.losses, self.validations = losses, 0

    def validation_step(self, model: Any, batch: Batch, device: Any) -> LossSum:
        self.validations += 1
        return LossSum(torch.tensor(self.losses[self.validations - 1], dtype=torch.float64), 1)


def test_the_order_of_hooks_is_golden(tmp_path: Path) -> None:
    """Six steps of 6 rows, 18 rows in an epoch; logs, validations and checkpoints at steps of their own."""
    watcher = Everything()
    config = settings_of_training(tokens=6 * 96, schedule=Schedule(kind="constant"))
    make_trainer(
        config,
        tiny_model(),
        NumberedRows(18),
        directory=tmp_path,
        callbacks=[watcher],
        validation=[BATCH],
        cadence=Cadence(log=2, checkpoint=4, validate=5),
        task=Scripted(config, tiny_model(), losses=[3.0, 4.0]),
    ).fit()
    assert watcher.events == [
        "start 0",
        "epoch_start 0",
        *("step_start 1", "step_end 1"),
        *("step_start 2", "step_end 2", "figures 2", "log 2"),
        *("step_start 3", "step_end 3"),
        "epoch_end 0",
        "epoch_start 1",
        *("step_start 4", "step_end 4", "figures 4", "log 4", "state", "saved 4"),
        *(
            "step_start 5",
            "step_end 5",
            "validated 5",
            "validation_figures",
            "log 5",
            "state",
            "saved 5",
        ),  # the best so far
        *(
            "step_start 6",
            "step_end 6",
            "figures 6",
            "log 6",
            "validated 6",
            "validation_figures",
            "log 6",
        ),
        *("state", "saved 6"),
        "epoch_end 1",
        "end 6",
    ]


@pytest.mark.parametrize("hook", ["start", "validation_figures", "end"])
def test_a_callback_that_raises_is_named_and_all_hear_of_it_last_though_one_fails_at_that(
    tmp_path: Path, hook: str
) -> None:
    def broken(self: Callback, *arguments: Any) -> None:
        raise ZeroDivisionError("by itself")

    breaks, watcher = type("Breaks", (Callback,), {hook: broken, "failed": broken}), Everything()
    trainer = make_trainer(
        settings_of_training(tokens=96),
        tiny_model(),
        NumberedRows(18),
        directory=tmp_path,
        callbacks=[breaks(), watcher],
        validation=[BATCH],
        cadence=Cadence(log=1, checkpoint=1, validate=1),
    )
    with pytest.raises(
        TTrainError, match=rf"the callback Breaks\.{hook} raised ZeroDivisionError\('by itself'\)"
    ):
        trainer.fit()
    assert watcher.events[-1] == "failed TTrainError" and "end 1" not in watcher.events


def stopped_at(losses: Sequence[float], **settings: Any) -> int | None:
    """The number of the validation after which a stop is asked for; the state goes through JSON each time."""
    callback = EarlyStopping(**settings)
    for number, loss in enumerate(losses, start=1):
        callback.validated(10 * number, loss)
        if callback.stop_reason():
            return number
        state = json.loads(json.dumps(callback.state(), allow_nan=False))
        callback = EarlyStopping(**settings)
        callback.load_state(state)
    return None


def test_a_stop_comes_after_so_many_validations_without_a_better_number() -> None:
    assert stopped_at([3.0, 2.0, 1.0, 1.0, 1.0, 1.0], patience=2) == 5
    assert stopped_at([3.0, 2.0, 1.0, 1.0, 0.9, 1.0, 1.0], patience=2) == 7
    assert stopped_at([3.0, math.nan, 2.9, math.nan, math.nan, 2.8], patience=2) == 5
    losses = [3.0, 2.75, 2.5, 2.25]
    assert stopped_at(losses, patience=1, min_delta=0.25) == 2, "lower by min_delta only"
    assert stopped_at(losses, patience=2, min_delta=0.25) is None, (
        "two small steps are one that is large enough"
    )


def test_early_stopping_without_a_row_to_validate_on_is_refused() -> None:
    config = settings_of_training(validate_every_steps=5, early_stopping={"patience": 2})
    with pytest.raises(UsageError, match=r"early_stopping .*heldout_fraction"):
        early_stopping(config, [])
    (callback,) = early_stopping(config, [BATCH])
    assert isinstance(callback, EarlyStopping) and (callback.patience, callback.min_delta) == (
        2,
        0.0,
    )
    assert early_stopping(settings_of_training(), []) == []


def trained(
    directory: Path,
    losses: Sequence[float],
    *,
    ranks: Ranks = ALONE,
    stop_after: int | None = None,
    done: int = 0,
) -> tuple[Any, Trainer]:
    """Twelve steps, each validated; `done` came before, with callbacks in another order."""
    config, model = (
        settings_of_training(tokens=12 * 96, schedule=Schedule(kind="constant")),
        tiny_model(),
    )
    callbacks = [EarlyStopping(2), LossSpike(directory / "guards.jsonl")]
    trainer = make_trainer(
        config,
        model,
        NumberedRows(52),
        directory=directory,
        ranks=ranks,
        validation=[BATCH] * ranks.world,
        callbacks=callbacks[::-1] if done else callbacks,
        cadence=Cadence(log=3, checkpoint=100, validate=1),
        stop_after=stop_after,
        task=Scripted(config, model, losses=losses[done:]),
        keep=9,
    )
    return trainer.fit(), trainer


PLATEAU = (3.0, 2.0, 1.0, 1.0, 1.0, *[0.5] * 7)


def test_all_ranks_stop_at_5_and_hold_the_best_weights(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> tuple[int, str, dict[str, torch.Tensor]]:
        result, trainer = trained(tmp_path / "checkpoints", PLATEAU, ranks=ranks)
        return result.step, result.stop_reason, copies(trainer.weights.state())

    found = in_ranks(2, tmp_path / "ranks", work)
    best = checkpoint.read(tmp_path / "checkpoints" / "step-00000003")
    last = checkpoint.read(tmp_path / "checkpoints" / "step-00000005")
    for step, reason, weights in found:
        assert (step, reason) == (5, STOPPED)
        assert same(weights, best.weights)
        assert not same(weights, last.weights)


def test_a_metrics_file_that_continues_loses_what_comes_again_and_what_is_torn(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [
        json.dumps({"step": step, "tokens": 0, "time": 0.0, "metrics": {}}) + "\n"
        for step in (2, 4, 6)
    ]
    path.write_text("".join(lines) + '{"step": 3, "tok')
    MetricsFile(path).start(4, 8)
    assert path.read_text() == "".join(lines[:2])
    MetricsFile(path).start(0, 8)
    assert path.read_text() == ""


@pytest.mark.parametrize("stop_after", [None, 4])
def test_an_early_stop_is_the_same_after_a_stop_and_when_run_again_and_its_result_is_that_of_the_kept_weights(
    tmp_path: Path, stop_after: int | None
) -> None:
    if stop_after:
        trained(tmp_path, PLATEAU, stop_after=stop_after)
    result, trainer = trained(tmp_path, PLATEAU, done=stop_after or 0)
    assert (result.step, result.stop_reason, result.kept_step) == (5, STOPPED, 3)
    assert (result.validation_loss, result.tokens) == (1.0, 5 * 96)
    kept = checkpoint.read(tmp_path / "step-00000003")
    assert result.loss == kept.state["counters"]["last_loss"] != trainer.counters.loss
    again, other = trained(tmp_path, PLATEAU, done=5)
    assert (again.step, again.stop_reason, again.resumed_from_step) == (5, STOPPED, 5)
    assert same(other.weights.state(), kept.weights)


def test_the_losses_of_a_line_are_means_over_the_tokens_since_the_last_one_on_all_ranks(
    tmp_path: Path,
) -> None:
    """And with the names of MiniMind beside them: `logits_loss` and `aux_loss` make up the loss, `lr` is one number."""

    def work(ranks: Ranks) -> tuple[list[StepRecord], list[LogRecord], int]:
        recorder, options = (
            Recorder(),
            {"ranks": ranks, "rows_per_device": 2, "cadence": Cadence(log=3)},
        )
        config = settings_of_training(tokens=6 * 96, optim=Optim(kind="muon", lr=1e-2))
        result = make_trainer(
            config, tiny_model(), NumberedRows(52), callbacks=[recorder], **options
        ).fit()
        records = [replace(record, rows=None) for record in recorder.steps]  # type: ignore[arg-type]
        return records, recorder.records, result.live_tokens

    steps, lines, live_tokens = in_ranks(2, tmp_path, work)[0]
    assert live_tokens == sum(record.live_tokens for record in steps)
    assert [(line.step, line.steps, line.tokens) for line in lines] == [
        (3, 6, 3 * 96),
        (6, 6, 6 * 96),
    ]
    for line in lines:
        some = steps[line.step - 3 : line.step]
        tokens = [record.live_tokens for record in some]
        assert len({*tokens}) > 1, "steps with other numbers of targets"
        mean = sum(record.loss * record.live_tokens for record in some) / sum(tokens)
        assert line.metrics["loss"] == pytest.approx(mean, rel=1e-12)
        assert (
            line.metrics["logits_loss"] == line.metrics["loss"] and line.metrics["aux_loss"] == 0.0
        )
        assert line.metrics["lr"] == line.metrics["lr_adamw"] != line.metrics["lr_muon"]


def test_the_bar_is_told_of_the_tokens_that_are_done_and_of_all_of_them(tmp_path: Path) -> None:
    file = tmp_path / "progress.json"
    bar = ProgressBar(ProgressWriter(file), 96)
    bar.start(2, 6)
    progress = json.loads(file.read_text())
    assert progress == {**progress, "done": 192, "total": 576, "unit": "tokens", "figures": {}}
    bar.log(LogRecord(6, 6, 576, {"loss": 3.0, "grad_norm": 1.0}))
    progress = json.loads(file.read_text())
    assert progress == {
        **progress,
        "done": 576,
        "total": 576,
        "unit": "tokens",
        "figures": {"loss": 3.0},
    }
