"""A memory limit is kept, and its error names the fix; by night training takes less and learns the
same."""

import itertools
import sys
from datetime import datetime, time, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.comparing import distance
from support.tiny_data import NumberedRows
from support.tiny_trainers import ALONE, Recorder, WatchedTask, in_ranks, make_trainer, tiny_model
from support.tiny_trainers import settings_of_training as settings_of

from ttrain.config import Night
from ttrain.config.loading import load
from ttrain.errors import TTrainError, UsageError
from ttrain.train import resource_limits
from ttrain.train.callbacks import LogRecord
from ttrain.train.distributed import Ranks
from ttrain.train.resource_limits import NightThrottle, explain_out_of_memory, limit_memory
from ttrain.train.trainer import Trainer
from ttrain.train.training_options import Cadence

CPU, CUDA = ALONE.device, torch.device("cuda", 0)
linux = pytest.mark.skipif(sys.platform != "linux", reason="macOS enforces no limit")


def allocate_within_a_limit(ranks: Ranks) -> list[str]:
    """Errors of 300 MB where 200 MB are left, of torch and Python; 100 MB pass each time."""
    limit, messages = resource_limits.data_bytes() + 200_000_000, []
    limit_memory(limit, CPU)
    for allocate in (lambda n: torch.empty(n, dtype=torch.uint8), bytearray):
        with explain_out_of_memory(limit, 16):
            allocate(100_000_000)
        with pytest.raises(TTrainError) as error, explain_out_of_memory(limit, 16):
            allocate(300_000_000)
        messages.append(str(error.value))
    return messages


@linux
def test_what_exceeds_the_limit_fails_with_the_fix(tmp_path: Path) -> None:
    (messages,) = in_ranks(1, tmp_path, allocate_within_a_limit)
    for message, name in zip(messages, ("RuntimeError", "MemoryError"), strict=True):
        for part in ("runtime.rows_per_device", "16", "runtime.memory_limit_gb", name):
            assert part in message


@linux
def test_a_limit_in_which_no_training_can_begin_is_refused_and_nothing_changes() -> None:
    with pytest.raises(UsageError, match=r"\d+\.\d\d .*0\.\d\d"):
        limit_memory(resource_limits.data_bytes() + 30_000_000, CPU)
    torch.zeros(10_000_000)


@pytest.fixture
def fractions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, torch.device]]:
    """The shares that were set of a GPU of 160 GB."""
    pairs: list[tuple[float, torch.device]] = []
    properties = SimpleNamespace(total_memory=160_000_000_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    set_fraction = "set_per_process_memory_fraction"
    monkeypatch.setattr(torch.cuda, set_fraction, lambda *pair: pairs.append(pair))
    return pairs


def test_on_cuda_the_limit_is_a_share_of_the_device(fractions: Any) -> None:
    for limit in (40e9, 160e9, 200e9):
        limit_memory(limit, CUDA)
    assert fractions == [(0.25, CUDA), (1.0, CUDA), (1.0, CUDA)]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("std::bad_alloc")]
)
def test_out_of_memory_names_the_setting(error: Exception) -> None:
    with (
        pytest.raises(TTrainError, match=r"runtime\.rows_per_device .*8") as raised,
        explain_out_of_memory(None, 8),
    ):
        raise error
    assert "memory_limit_gb" not in str(raised.value) and raised.value.__cause__ is error
    with pytest.raises(RuntimeError, match="shape mismatch"), explain_out_of_memory(1e9, 8):
        raise RuntimeError("shape mismatch")


class ThreadsAndRows(Recorder):
    """Notes the threads and the rows of a micro-batch at each log."""

    trainer: Trainer

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int]] = []

    def log(self, record: LogRecord) -> None:
        super().log(record)
        self.sizes.append((torch.get_num_threads(), self.trainer.loader.rows_per_device))


def fit(night: bool, *, threads: int = 2, ranks: Ranks = ALONE) -> tuple[Any, Trainer, Any]:
    """The clock of rank 0 begins at 21:30 and advances 90 minutes each time; others are at
    midnight."""
    torch.set_num_threads(threads)
    config, model = settings_of(tokens=9 * 96), tiny_model()
    recorder, task = ThreadsAndRows(), WatchedTask(config, model)
    begin = datetime(2026, 1, 1, 21, 30)
    times = (begin + number * timedelta(minutes=90) for number in itertools.count())
    clock = (lambda: next(times)) if ranks.first else lambda: datetime(2026, 1, 1)
    throttle = NightThrottle(Night(), CPU, rows_per_device=4, clock=clock) if night else None
    options: dict[str, Any] = {"task": task, "callbacks": [recorder], "night": throttle}
    options |= {"ranks": ranks, "cadence": Cadence(log=1, checkpoint=100)}
    recorder.trainer = make_trainer(config, model, NumberedRows(52), **options)
    recorder.trainer.fit()
    return recorder, recorder.trainer, task


def test_at_night_micro_batches_and_threads_are_halved_and_losses_are_equal() -> None:
    by_day, _, day_task = fit(False)
    by_night, trainer, night_task = fit(True)
    is_night = [bool(value) for value in by_night.figures("night")]
    assert is_night == [False] + [True] * 6 + [False] * 2, "from 23:00, the night ends at 8:00"
    assert by_night.sizes == [(1, 2) if on else (2, 4) for on in is_night]
    assert by_night.figures("loss") == pytest.approx(by_day.figures("loss"), rel=1e-5)
    gradients = [task.optimizers.gradients[3] for task in (day_task, night_task)]
    assert distance(*gradients) < 1e-5
    assert night_task.passes == 6 * 3 + 3 * 2, "twice the micro-batches of three, but the last"
    assert day_task.passes == 9 * 2
    assert trainer.loader.consumed == 9


def test_two_ranks_follow_the_clock_of_the_first(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> tuple[int, list[float]]:
        recorder, _, task = fit(True, threads=1, ranks=ranks)
        return task.passes, recorder.figures("night")

    (first, nights), (second, _) = in_ranks(2, tmp_path, work)
    assert first == second, "both made the same change at the same step"
    assert nights == [0] + [1] * 6 + [0] * 2


@pytest.mark.parametrize(
    ("now", "start", "end", "inside"), [(22, 22, 8, True), (8, 22, 8, False), (3, 1, 5, True)]
)
def test_a_window_of_the_day(now: int, start: int, end: int, inside: bool) -> None:
    assert resource_limits.is_in_window(time(now), time(start), time(end)) is inside


@pytest.mark.parametrize(("used", "by_night"), [(10e9, 0.5), (100e9, 0.625)])
def test_the_profile_takes_half_of_a_gpu_by_night_but_no_less_than_is_in_use(
    fractions: Any, monkeypatch: pytest.MonkeyPatch, used: float, by_night: float
) -> None:
    settings = load(profiles=["night"]).settings.runtime.night
    assert settings
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: used)
    throttle = NightThrottle(settings, CUDA, rows_per_device=4)
    throttle.set(True)
    throttle.set(False)
    assert fractions == [(by_night, CUDA), (1.0, CUDA)]
