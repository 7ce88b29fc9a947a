"""Callbacks: the order of their hooks, and that they change a training by a requested stop only."""

import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparing import same
from support.tiny_data import NumberedRows
from support.tiny_trainers import Recorder, WatchedTask, make_trainer, tiny_model
from support.tiny_trainers import settings_of_training as settings_of

from ttrain.config import Optim, Schedule
from ttrain.data.packing import Batch
from ttrain.errors import TTrainError, UsageError
from ttrain.train import checkpoint
from ttrain.train.callbacks import Callback
from ttrain.train.early_stopping import EarlyStopping, early_stopping
from ttrain.train.guards import LossSpike
from ttrain.train.task import LossSum
from ttrain.train.trainer import STOPPED, Trainer
from ttrain.train.training_options import Cadence

BATCH = NumberedRows(2).batch([0, 1])
CONSTANT = Schedule(kind="constant")
# Six steps of 6 rows, 18 rows in an epoch; the validation of step 5 is the best so far.
GOLDEN = """
    start 0, epoch_start 0,
    step_start 1, step_end 1,
    step_start 2, step_end 2, figures 2, log 2,
    step_start 3, step_end 3, epoch_end 0,
    epoch_start 1, step_start 4, step_end 4, figures 4, log 4, state, saved 4,
    step_start 5, step_end 5, validated 5, validation_figures, log 5, state, saved 5,
    step_start 6, step_end 6, figures 6, log 6, validated 6, validation_figures, log 6,
    state, saved 6, epoch_end 1, end 6
"""
PLATEAU = (3.0, 2.0, 1.0, 1.0, 1.0, *[0.5] * 7)


class HookRecorder(Callback):
    """Records every hook by its name, with the step, epoch or error that it gets."""

    def __init__(self) -> None:
        self.events: list[str] = []
        for hook, value in vars(Callback).items():
            if callable(value) and hook not in ("load_state", "stop_reason"):
                setattr(self, hook, partial(self.note, hook))

    def note(self, hook: str, *arguments: Any) -> dict[str, Any]:
        subject = getattr(arguments[0], "step", arguments[0]) if arguments else ""
        shown = type(subject).__name__ if isinstance(subject, BaseException) else subject
        self.events.append(hook if hook in ("state", "validation_figures") else f"{hook} {shown}")
        return {}


class Scripted(WatchedTask):
    losses: Iterator[float]

    def validation_step(self, model: Any, batch: Batch, device: Any) -> LossSum:
        return LossSum(torch.tensor(next(self.losses), dtype=torch.float64), 1)


def scripted_trainer(tokens: int, losses: Sequence[float], **options: Any) -> Trainer:
    config, model = settings_of(tokens=tokens, schedule=CONSTANT), tiny_model()
    task = Scripted(config, model)
    task.losses = iter(losses)
    options = {"validation": [BATCH], "task": task, **options}
    return make_trainer(config, model, options.pop("rows", NumberedRows(52)), **options)


def test_the_order_of_hooks_is_golden(tmp_path: Path) -> None:
    recorder, cadence = HookRecorder(), Cadence(log=2, checkpoint=4, validate=5)
    options = {"rows": NumberedRows(18), "directory": tmp_path, "cadence": cadence}
    scripted_trainer(6 * 96, [3.0, 4.0], callbacks=[recorder], **options).fit()
    assert recorder.events == [event.strip() for event in GOLDEN.split(",")]


@pytest.mark.parametrize("hook", ["start", "validation_figures", "end"])
def test_a_callback_that_raises_is_named_and_failed_is_the_last_hook_of_all(hook: str) -> None:
    def broken(self: Callback, *arguments: Any) -> None:
        raise ZeroDivisionError("by itself")

    breaks, recorder = type("Breaks", (Callback,), {hook: broken, "failed": broken}), HookRecorder()
    options = {"callbacks": [breaks(), recorder], "cadence": Cadence(log=1, validate=1)}
    with pytest.raises(TTrainError, match=rf"Breaks\.{hook} raised ZeroDivisionError"):
        scripted_trainer(96, [1.0], **options).fit()
    assert recorder.events[-1] == "failed TTrainError" and "end 1" not in recorder.events


FALLING = [3.0, 2.75, 2.5, 2.25]


@pytest.mark.parametrize(
    ("losses", "settings", "stop"),
    [
        ([3.0, 2.0, 1.0, 1.0, 1.0, 1.0], {"patience": 2}, 5),
        ([3.0, 2.0, 1.0, 1.0, 0.9, 1.0, 1.0], {"patience": 2}, 7),
        ([3.0, math.nan, 2.9, math.nan, math.nan, 2.8], {"patience": 2}, 5),
        (FALLING, {"patience": 1, "min_delta": 0.25}, 2),  # lower by min_delta only
        (FALLING, {"patience": 2, "min_delta": 0.25}, None),  # two small steps are large enough
    ],
)
def test_a_stop_follows_so_many_validations_without_a_better_loss(
    losses: Sequence[float], settings: dict[str, Any], stop: int | None
) -> None:
    """The state goes through JSON after each validation."""
    callback, stops = EarlyStopping(**settings), list[int]()
    for number, loss in enumerate(losses, start=1):
        callback.validated(10 * number, loss)
        if callback.stop_reason():
            stops.append(number)
            break
        state = json.loads(json.dumps(callback.state(), allow_nan=False))
        callback = EarlyStopping(**settings)
        callback.load_state(state)
    assert stops == ([] if stop is None else [stop])


def test_early_stopping_needs_rows_to_validate_on() -> None:
    config = settings_of(validate_every_steps=5, early_stopping={"patience": 2})
    with pytest.raises(UsageError, match=r"early_stopping .*heldout_fraction"):
        early_stopping(config, [])
    assert len(early_stopping(config, [BATCH])) == 1 and early_stopping(settings_of(), []) == []


def trained(directory: Path, *, stop_after: int | None = None, done: int = 0) -> Any:
    """Twelve steps, each validated; `done` came before, with callbacks in another order."""
    callbacks = [EarlyStopping(2), LossSpike(directory / "guards.jsonl")]
    options: dict[str, Any] = {"directory": directory, "stop_after": stop_after, "keep": 9}
    options |= {"cadence": Cadence(log=3, checkpoint=100, validate=1)}
    options |= {"callbacks": callbacks[::-1] if done else callbacks}
    trainer = scripted_trainer(12 * 96, PLATEAU[done:], **options)
    return trainer.fit(), trainer


@pytest.mark.parametrize("stop_after", [None, 4])
def test_an_early_stop_is_the_same_when_continued(tmp_path: Path, stop_after: int | None) -> None:
    if stop_after:
        trained(tmp_path, stop_after=stop_after)
    result, trainer = trained(tmp_path, done=stop_after or 0)
    assert (result.step, result.stop_reason, result.kept_step) == (5, STOPPED, 3)
    assert (result.validation_loss, result.tokens) == (1.0, 5 * 96)
    kept = checkpoint.read(tmp_path / "step-00000003")
    assert result.loss == kept.state["counters"]["last_loss"] != trainer.counters.loss
    rerun, rerun_trainer = trained(tmp_path, done=5)
    assert (rerun.step, rerun.stop_reason, rerun.resumed_from_step) == (5, STOPPED, 5)
    assert same(rerun_trainer.weights.state(), kept.weights)


def test_logged_losses_are_means_over_the_tokens_since_the_last_log() -> None:
    config = settings_of(tokens=6 * 96, optim=Optim(kind="muon", lr=1e-2))
    options: dict[str, Any] = {"callbacks": [recorder := Recorder()], "cadence": Cadence(log=3)}
    trainer = make_trainer(config, tiny_model(), NumberedRows(52), **options)
    steps, lines = recorder.steps, recorder.records
    assert trainer.fit().live_tokens == sum(record.live_tokens for record in steps)
    assert [(line.step, line.steps, line.tokens) for line in lines] == [(3, 6, 288), (6, 6, 576)]
    for line in lines:
        records, metrics = steps[line.step - 3 : line.step], line.metrics
        tokens = [record.live_tokens for record in records]
        assert len({*tokens}) > 1, "steps with other numbers of targets"
        mean = sum(record.loss * record.live_tokens for record in records) / sum(tokens)
        assert metrics["loss"] == pytest.approx(mean, rel=1e-12)
        assert metrics["logits_loss"] == metrics["loss"] and metrics["aux_loss"] == 0.0
        assert metrics["lr"] == metrics["lr_adamw"] != metrics["lr_muon"]
