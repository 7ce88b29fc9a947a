"""How fast it runs: each figure against a clock that the test turns, each count against torch's own."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.comparing import PERFORMANCE
from support.tiny_trainers import CPU, tiny_model
from torch.utils.flop_counter import FlopCounterMode

from ttrain.train.callbacks import StepRecord
from ttrain.train.monitor import TERA, PerformanceMonitor, datasheet_flops, flops_per_token


class Run:
    """Steps under a clock that stands still unless it is turned."""

    def __init__(self, steps: int, **settings: float) -> None:
        self.now, self.steps, self.done = 1000.0, steps, 0
        self.tokens = int(settings.get("tokens_per_step", 100))
        self.monitor = PerformanceMonitor(
            device=CPU,
            steps_per_epoch=8,
            clock=lambda: self.now,
            flops_per_token=settings.get("flops_per_token", 0.0),
            peak_flops=settings.get("peak", 0.0),
        )
        self.monitor.start(0, steps)

    def step(self, seconds: float, *, data_seconds: float = 0.0, after: float = 0.0) -> StepRecord:
        self.now += seconds
        self.done += 1
        record = StepRecord(
            self.done,
            self.steps,
            1.0,
            1.0,
            1,
            False,
            seconds,
            data_seconds,
            lambda: np.zeros(1, np.int64),
            self.tokens,
            self.done * self.tokens,
        )
        self.monitor.step_end(record)
        self.now += after
        return record


def test_rates_are_means_over_the_time_since_the_last_log() -> None:
    run = Run(10, tokens_per_step=100, flops_per_token=5e3, peak=1e6)
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
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    assert figures["epoch_time"] == pytest.approx(8 * 8 / 3), "eight steps an epoch, three in 8 s"


@pytest.mark.parametrize(
    "seconds",
    [[60.0, *[1.0] * 199], [*[1.0] * 50, 300.0, *[1.0] * 149]],
    ids=["the first step compiles", "one stall"],
)
def test_the_eta_at_half_is_within_20_percent_of_what_is_left(seconds: Sequence[float]) -> None:
    """With a validation of 5 s after every tenth step."""
    run, found, halfway = Run(len(seconds)), 0.0, 0.0
    for number, value in enumerate(seconds, start=1):
        record = run.step(value, after=5.0 if number % 10 == 0 else 0.0)
        figures = run.monitor.figures(record)
        if number == len(seconds) // 2:
            found, halfway = figures["eta_seconds"], run.now
    assert found == pytest.approx(run.now - halfway, rel=0.2)
    assert figures["eta_seconds"] == 0


def counted(model: torch.nn.Module, T: int) -> float:
    """FLOPs a token of a forward and a backward pass, as torch counts its matrix products."""
    model.set_attn_implementation("eager")  # type: ignore[operator]  # torch counts no fused attention on a CPU
    model.set_experts_implementation("eager")  # type: ignore[operator]  # nor grouped experts
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
        # of these biases and norms are some percent
        ({"kind": "gpt2"}, 32, 0.05),
        ({"kind": "moyun"}, 32, 0.05),
        ({"kind": "qwen3", "moe": SPARSE}, 32, 0.05),
    ],
)
def test_flops_per_token_are_those_that_torch_counts(
    options: dict[str, Any], T: int, error: float
) -> None:
    model = tiny_model(**{"hidden_size": 64, "heads": 4, **options})
    assert flops_per_token(model, T) == pytest.approx(counted(model, T), rel=error)


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4 * TERA),
        ("NVIDIA H100 PCIe", 756 * TERA),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_a_chip_is_found_by_its_name_and_a_board_that_differs_is_not_taken_for_it(
    name: str, bf16: float | None
) -> None:
    assert datasheet_flops(name, "bf16") == bf16
