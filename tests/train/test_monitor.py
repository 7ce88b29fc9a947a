"""Performance metrics: times against a clock that the test turns, counts against torch's own."""

from typing import Any

import pytest
from support.comparing import PERFORMANCE
from support.tiny_trainers import CPU

from ttrain.train.callbacks import StepRecord
from ttrain.train.monitor import PerformanceMonitor


def test_figures_are_of_the_time_since_the_last_log() -> None:
    now = 1000.0
    options: dict[str, Any] = {"flops_per_token": 5e3, "peak_flops": 1e6, "clock": lambda: now}
    monitor = PerformanceMonitor(device=CPU, steps_per_epoch=8, **options)
    monitor.start(0, 10)
    metrics: Any = {}
    steps = enumerate([(9.0, 0.0), (1.0, 0.0), (1.0, 0.25), (2.0, 0.5), (3.0, 0.75)], start=1)
    for step, (seconds, data_seconds) in steps:
        now += seconds
        times = {"seconds": seconds, "data_seconds": data_seconds}
        rest: dict[str, Any] = {"tokens": 100, "tokens_read": 100 * step, "skipped": False}
        rest |= {"loss": 1.0, "grad_norm": 1.0, "live_tokens": 1, "rows": list}
        record = StepRecord(step, 10, **times, **rest)
        monitor.step_end(record)
        if step in (1, 2, 5):
            metrics = monitor.figures(record)
        now += 2.0 if step == 4 else 0.0
    rate = 3 * 100 / 8
    expected = {
        "tokens_per_second": rate,
        "step_seconds": 2.0,
        "data_wait_fraction": 0.25,
        "mfu": rate * 5e3 / 1e6,
        "epoch_time": 8 * 8 / 3,  # eight steps an epoch, three in 8 s
        "eta_seconds": 5 * (2.0 + 2.0 / 5),  # the shortest and the longest step are left out
    }
    assert {*metrics} == {*PERFORMANCE}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
