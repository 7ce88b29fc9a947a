"""Guards: each speaks of the step and the rows of its mistake, keeps silent where there is none, and ends nothing."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_data import NumberedRows
from support.tiny_trainers import WatchedTask, make_trainer, settings_of_training, tiny_model

from ttrain.data.order import Order, ShuffledOrder
from ttrain.train.callbacks import Callback, LogRecord, StepRecord
from ttrain.train.guards import LossSpike, Overfit, counts, default_guards
from ttrain.train.trainer import QUICK

ORDER = ShuffledOrder(60, 6, 60_000, 1)


@pytest.fixture
def book(tmp_path: Path) -> Path:
    return tmp_path / "guards.jsonl"


def lines(book: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in book.read_text().splitlines()] if book.exists() else []


def record(step: int, loss: float = 1.0, live_tokens: int = 60, order: Order = ORDER) -> StepRecord:
    return StepRecord(
        step,
        order.steps,
        loss,
        1.0,
        live_tokens,
        False,
        0.1,
        0.0,
        lambda: order.step_rows(step - 1),
        6,
        6 * step,
    )


def steps(guard: Callback, losses: Sequence[float], first: int = 1) -> None:
    for step, loss in enumerate(losses, start=first):
        guard.step_end(record(step, loss))


def noisy(count: int, level: float = 3.0, deviation: float = 0.1) -> list[float]:
    return np.random.default_rng(0).normal(level, deviation, count).tolist()


def test_a_spike_is_told_once_with_its_step_loss_and_rows(
    book: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guard = LossSpike(book)
    steps(guard, [*noisy(40), 4.5, *noisy(40)])
    (line,) = lines(book)
    assert (line["step"], line["guard"], line["rows"]) == (
        41,
        "loss-spike",
        ORDER.step_rows(40).tolist(),
    )
    assert line["message"].startswith("the loss is 4.5, after 2.99 ± 0.08 over the 40 steps before")
    assert [entry.levelno for entry in caplog.records] == [logging.WARNING]
    assert f"step 41: {line['message']}; rows {line['rows'][0]}, " in caplog.text


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        pytest.param(noisy(500), [], id="noise"),
        pytest.param([3.0] * 10 + [9.0] + [3.0] * 30, [], id="too early to say"),
        pytest.param(
            [*noisy(30), float("nan"), float("inf"), *noisy(30)],
            [],
            id="no number, which the trainer tells",
        ),
        pytest.param(
            [*noisy(60), *noisy(60, 6.0), *noisy(60, 12.0)],
            [61, 121],
            id="two rises, each of which stays",
        ),
    ],
)
def test_a_spike_is_a_rise_above_the_noise(
    book: Path, losses: list[float], told: list[int]
) -> None:
    steps(LossSpike(book), losses)
    assert [line["step"] for line in lines(book)] == told


def test_a_spike_in_a_run_names_the_rows_of_its_step_and_the_run_goes_on(book: Path) -> None:
    config, model = settings_of_training(tokens=24 * 96), tiny_model(layers=1)
    task = WatchedTask(config, model, spoil=lambda passes: 3.0 if passes == 22 else 1.0)
    trainer = make_trainer(config, model, NumberedRows(60), rows_per_device=6, task=task)
    trainer.callback_list.callbacks = default_guards(book, trainer.loader.order)
    assert trainer.fit().step == 24
    (line,) = lines(book)
    assert (line["guard"], line["step"]) == ("loss-spike", 22)
    assert line["rows"] == trainer.loader.order.step_rows(21).tolist()
    assert counts(book) == {"loss-spike": 1}


def validations(guard: Callback, losses: Sequence[tuple[float, float]], first: int = 1) -> None:
    """Pairs of the training loss of ten steps and of the validation after them."""
    for number, (train, held_out) in enumerate(losses, start=first):
        steps(guard, [train] * 10, first=10 * number - 9)
        guard.log(LogRecord(10 * number, ORDER.steps, 0, {"validation_loss": held_out}))


RISING = [(3.0, 2.0), (2.9, 1.9), (2.8, 1.95), (2.7, 2.0), (2.6, 2.05), (2.5, 2.1)]


def test_overfitting_is_told_after_three_rises_with_its_beginning_and_how_often_rows_were_read(
    book: Path,
) -> None:
    validations(Overfit(book, ORDER), RISING)
    (line,) = lines(book)
    assert (line["step"], line["guard"], line["rows"]) == (
        50,
        "overfit",
        ORDER.step_rows(49).tolist(),
    )
    assert all(
        part in line["message"] for part in ("step 20", "1.9 → 2.05", "2.9 → 2.6", "5.0 times")
    )


AGAIN = [(2.4 - n / 10, loss) for n, loss in enumerate([1.5, 1.6, 1.7, 1.8, 1.9])]


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        pytest.param(
            [(3.0, 2.0), (2.9, 2.1), (2.8, 2.2), (2.7, 2.1), (2.6, 2.2), (2.5, 2.3)],
            [],
            id="two rises at a time",
        ),
        pytest.param(
            [(3.0, 2.0), (3.1, 2.1), (3.2, 2.2), (3.3, 2.3), (3.4, 2.4)],
            [],
            id="both rise: it diverges",
        ),
        pytest.param([*RISING, *AGAIN], [50, 100], id="it ends and begins again"),
    ],
)
def test_overfitting_is_three_rises_while_the_training_loss_falls(
    book: Path, losses: list[tuple[float, float]], told: list[int]
) -> None:
    validations(Overfit(book, ORDER), losses)
    assert [line["step"] for line in lines(book)] == told


def test_overfitting_is_told_by_the_quick_validations_while_it_happens(book: Path) -> None:
    """As by default: quick validations, and a single full one at the end, on other rows."""
    guard = Overfit(book, ORDER)
    guard.log(LogRecord(0, ORDER.steps, 0, {QUICK: 7.7}))  # before the first step
    for number, held_out in enumerate([5.7, 5.85, 5.9], start=1):  # thirty passes over 50 kB
        steps(guard, [6.0 / number] * 10, first=10 * number - 9)
        guard.log(LogRecord(10 * number, ORDER.steps, 0, {QUICK: held_out}))
    steps(guard, [1.0] * 10, first=31)
    guard.log(LogRecord(40, ORDER.steps, 0, {QUICK: 9.0, "validation_loss": 9.0}))
    assert lines(book) == [], "all rows are not compared with a few of them"
    guard.log(LogRecord(45, ORDER.steps, 0, {QUICK: 7.0}))
    (line,) = lines(book)
    assert (line["step"], line["guard"]) == (45, "overfit") and "5.7 → 7" in line["message"]
