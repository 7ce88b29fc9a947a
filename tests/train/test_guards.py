"""Guards: a warning names the step and its rows, and none ends a run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_data import NumberedRows
from support.tiny_trainers import WatchedTask, make_trainer, settings_of_training, tiny_model

from ttrain.data.order import ShuffledOrder
from ttrain.train.callbacks import Callback, LogRecord, StepRecord
from ttrain.train.guards import LossSpike, Overfit, counts

ORDER = ShuffledOrder(60, 6, 60_000, 1)
NAN, INF = float("nan"), float("inf")
RISING = [(3.0, 2.0), (2.9, 1.9), (2.8, 1.95), (2.7, 2.0), (2.6, 2.05), (2.5, 2.1)]
FALLING_AND_RISING = [(2.4, 1.5), (2.3, 1.6), (2.2, 1.7), (2.1, 1.8), (2.0, 1.9)]
TWO_RISES_AT_A_TIME = [(3.0, 2.0), (2.9, 2.1), (2.8, 2.2), (2.7, 2.1), (2.6, 2.2), (2.5, 2.3)]
DIVERGING = [(3.0, 2.0), (3.1, 2.1), (3.2, 2.2), (3.3, 2.3), (3.4, 2.4)]


@pytest.fixture
def book(tmp_path: Path) -> Path:
    return tmp_path / "guards.jsonl"


def lines(book: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in book.read_text().splitlines()] if book.exists() else []


def end_steps(guard: Callback, losses: Sequence[float], first: int = 1) -> None:
    for step, loss in enumerate(losses, start=first):
        figures: dict[str, Any] = {"grad_norm": 1.0, "live_tokens": 60, "skipped": False}
        figures |= {"seconds": 0.1, "data_seconds": 0.0, "tokens": 6, "tokens_read": 6 * step}
        rows = ORDER.step_rows(step - 1)
        guard.step_end(StepRecord(step, ORDER.steps, loss, rows=lambda rows=rows: rows, **figures))


def noisy(count: int, level: float = 3.0) -> list[float]:
    return np.random.default_rng(0).normal(level, 0.1, count).tolist()


@pytest.mark.parametrize(
    ("losses", "steps"),
    [
        (noisy(500), []),
        ([3.0] * 10 + [9.0] + [3.0] * 30, []),  # too early
        ([*noisy(30), NAN, INF, *noisy(30)], []),  # the trainer reports these
        ([*noisy(40), 4.5, *noisy(40)], [41]),
        ([*noisy(60), *noisy(60, 6.0), *noisy(60, 12.0)], [61, 121]),  # each rise stays
    ],
    ids=["noise", "early", "not finite", "one", "two rises"],
)
def test_a_spike_rises_above_the_noise(book: Path, losses: list[float], steps: list[int]) -> None:
    end_steps(LossSpike(book), losses)
    assert [line["step"] for line in lines(book)] == steps


def test_a_run_continues_after_a_spike(book: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, model = settings_of_training(tokens=24 * 96), tiny_model(layers=1)
    task = WatchedTask(config, model, spoil=lambda passes: 3.0 if passes == 22 else 1.0)
    trainer = make_trainer(config, model, NumberedRows(60), rows_per_device=6, task=task)
    trainer.callback_list.callbacks = [LossSpike(book), Overfit(book, trainer.loader.order)]
    assert trainer.fit().step == 24
    (line,) = lines(book)
    rows = trainer.loader.order.step_rows(21).tolist()
    assert (line["step"], line["guard"], line["rows"]) == (22, "loss-spike", rows)
    assert f"step 22: {line['message']}; rows {rows[0]}, " in caplog.text
    assert counts(book) == {"loss-spike": 1}


@pytest.mark.parametrize(
    ("losses", "steps"),
    [
        (RISING, [50]),
        (TWO_RISES_AT_A_TIME, []),
        (DIVERGING, []),
        ([*RISING, *FALLING_AND_RISING], [50, 100]),
    ],
)
def test_overfitting_is_three_rises_while_the_training_loss_falls(
    book: Path, losses: list[tuple[float, float]], steps: list[int]
) -> None:
    """Pairs of the training loss of ten steps and of the validation after them."""
    guard = Overfit(book, ORDER)
    for number, (train, held_out) in enumerate(losses, start=1):
        end_steps(guard, [train] * 10, first=10 * number - 9)
        guard.log(LogRecord(10 * number, ORDER.steps, 0, {"validation_loss": held_out}))
    assert [line["step"] for line in lines(book)] == steps
    for line in lines(book)[:1]:
        assert (line["guard"], line["rows"]) == ("overfit", ORDER.step_rows(49).tolist())
        for part in ("step 20", "1.9 → 2.05", "2.9 → 2.6", "5.0 times"):
            assert part in line["message"]
