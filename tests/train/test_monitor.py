"""What watches each step: performance metrics, against a clock that the test turns, and guards."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.comparing import PERFORMANCE
from support.tiny_data import NumberedRows
from support.tiny_trainers import CPU, WatchedTask, make_trainer, settings_of_training, tiny_model
from torch.utils.flop_counter import FlopCounterMode

from ttrain.data.order import ShuffledOrder
from ttrain.train.callbacks import Callback, LogRecord, StepRecord
from ttrain.train.guards import LossSpike, Overfit, counts
from ttrain.train.monitor import (
    TERA,
    PerformanceMonitor,
    datasheet_flops,
    flops_per_token,
)


def step_record(step: int, steps: int, loss: float, tokens: int, **more: Any) -> StepRecord:
    figures: dict[str, Any] = {"grad_norm": 1.0, "live_tokens": 60, "skipped": False}
    figures |= {"seconds": 0.1, "data_seconds": 0.0, "rows": Mock(), **more}
    return StepRecord(step, steps, loss, tokens=tokens, tokens_read=tokens * step, **figures)


def test_rates_are_means_over_the_time_since_the_last_log() -> None:
    clock, figures = Mock(return_value=1000.0), dict[str, float]()
    options: dict[str, Any] = {"flops_per_token": 5e3, "peak_flops": 1e6, "steps_per_epoch": 8}
    monitor = PerformanceMonitor(device=CPU, clock=clock, **options)
    monitor.start(0, 10)
    times = [(9.0, 0.0), (1.0, 0.0), (1.0, 0.25), (2.0, 0.5), (3.0, 0.75)]
    for step, (seconds, data_seconds) in enumerate(times, start=1):
        clock.return_value += seconds
        record = step_record(step, 10, 1.0, 100, seconds=seconds, data_seconds=data_seconds)
        monitor.step_end(record)
        if step in (1, 2, 5):
            figures |= monitor.figures(record)
        if step == 4:
            clock.return_value += 2.0  # a validation
    assert {*figures} == {*PERFORMANCE}
    expected = {"tokens_per_second": 37.5, "step_seconds": 2.0, "data_wait_fraction": 0.25}
    expected |= {"mfu": 37.5 * 5e3 / 1e6, "epoch_time": 8 * 8 / 3}  # 8 steps, three in 8 s
    expected |= {"eta_seconds": 5 * (2.0 + 2.0 / 5)}  # the middle steps, and 2 s between all
    assert {name: figures[name] for name in expected} == pytest.approx(expected)


def counted_flops(model: torch.nn.Module, T: int) -> float:
    """FLOPs a token of a forward and a backward pass, as torch counts its matrix products."""
    model.set_attn_implementation("eager")  # type: ignore[operator]  # torch counts no fused ones
    model.set_experts_implementation("eager")  # type: ignore[operator]
    ids = torch.arange(2 * T).reshape(2, T) % 50
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    return counter.get_total_flops() / (2 * T)


SPARSE = {"experts": 6, "top_k": 3, "expert_size": 16, "shared_experts": 1, "dense_layers": 1}


@pytest.mark.parametrize(
    ("options", "T", "error"),
    [
        ({"kv_heads": 2}, 16, 0.02),
        ({"kv_heads": 2, "tie_embeddings": False}, 96, 0.02),
        ({"kind": "qwen3", "moe": SPARSE}, 32, 0.05),
    ],
)
def test_flops_per_token_are_those_that_torch_counts(
    options: dict[str, Any], T: int, error: float
) -> None:
    model = tiny_model(**{"hidden_size": 64, "heads": 4, **options})
    assert flops_per_token(model, T) == pytest.approx(counted_flops(model, T), rel=error)


def test_a_chip_is_known_by_its_name_unless_the_board_differs() -> None:
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA GeForce RTX 4090 Laptop GPU")
    expected = [989.4 * TERA, 756 * TERA, 0]
    assert [datasheet_flops(name, "bf16") for name in names] == expected


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
        rows = ORDER.step_rows(step - 1)
        guard.step_end(step_record(step, ORDER.steps, loss, 6, rows=lambda rows=rows: rows))


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
        assert "1.9 → 2.05" in line["message"] and "2.9 → 2.6" in line["message"]
