"""Performance metrics: times against a clock that the test turns, counts against torch's own."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.comparing import PERFORMANCE
from support.tiny_trainers import CPU, tiny_model
from torch.utils.flop_counter import FlopCounterMode

from ttrain.train.callbacks import StepRecord
from ttrain.train.monitor import (
    TERA,
    PerformanceMonitor,
    datasheet_flops,
    flops_per_token,
    trimmed_mean,
)


class Run:
    """Steps of 100 tokens under a clock that stands still unless it is turned."""

    def __init__(self, steps: int) -> None:
        self.now, self.steps, self.done = 1000.0, steps, 0
        self.monitor = PerformanceMonitor(
            device=CPU,
            steps_per_epoch=8,
            clock=lambda: self.now,
            flops_per_token=5e3,
            peak_flops=1e6,
        )
        self.monitor.start(0, steps)

    def step(self, seconds: float, data_seconds: float = 0.0, after: float = 0.0) -> StepRecord:
        self.now += seconds
        self.done += 1
        figures: dict[str, Any] = {
            "loss": 1.0,
            "grad_norm": 1.0,
            "live_tokens": 1,
            "skipped": False,
        }
        times = {"seconds": seconds, "data_seconds": data_seconds}
        tokens = {"tokens": 100, "tokens_read": 100 * self.done}
        rows = np.zeros(1, np.int64)
        record = StepRecord(self.done, self.steps, rows=lambda: rows, **figures, **times, **tokens)
        self.monitor.step_end(record)
        self.now += after
        return record


def test_rates_are_means_over_the_time_since_the_last_log() -> None:
    run = Run(10)
    for seconds in (9.0, 1.0):
        run.monitor.figures(run.step(seconds))
    run.step(1.0, data_seconds=0.25)
    run.step(2.0, data_seconds=0.5, after=2.0)
    figures = run.monitor.figures(run.step(3.0, data_seconds=0.75))
    assert {*figures} == {*PERFORMANCE}
    rate = 3 * 100 / 8
    expected = {
        "tokens_per_second": rate,
        "step_seconds": 2.0,
        "data_wait_fraction": 0.25,
        "mfu": rate * 5e3 / 1e6,
        "epoch_time": 8 * 8 / 3,  # eight steps an epoch, three in 8 s
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)


COMPILING, STALLING = [60.0, *[1.0] * 199], [*[1.0] * 50, 300.0, *[1.0] * 149]


@pytest.mark.parametrize("seconds", [COMPILING, STALLING], ids=["first step compiles", "one stall"])
def test_the_eta_at_half_is_within_20_percent_of_what_is_left(seconds: Sequence[float]) -> None:
    """With a validation of 5 s after every tenth step."""
    run, etas, times = Run(len(seconds)), list[float](), list[float]()
    for number, value in enumerate(seconds, start=1):
        record = run.step(value, after=5.0 if number % 10 == 0 else 0.0)
        etas.append(run.monitor.figures(record)["eta_seconds"])
        times.append(run.now)
    half = len(seconds) // 2 - 1
    assert etas[half] == pytest.approx(times[-1] - times[half], rel=0.2)
    assert etas[-1] == 0


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
        ({"kind": "gpt2"}, 32, 0.05),  # biases and norms are some percent
        ({"kind": "moyun"}, 32, 0.05),
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


@pytest.mark.parametrize(
    ("values", "mean"), [([], 0.0), ([3.0], 3.0), ([1.0, 3.0], 2.0), ([0.0, 4.0, 90.0], 4.0)]
)
def test_one_value_of_each_end_is_trimmed_of_three_or_more(
    values: list[float], mean: float
) -> None:
    assert trimmed_mean(deque(values)) == mean
