"""A memory limit is kept, and what broke it is told with the cure; by night training takes less and learns the same."""

import itertools
import sys
from collections.abc import Callable
from datetime import datetime, time, timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.comparing import distance
from support.tiny_data import NumberedRows
from support.tiny_trainers import (
    ALONE,
    CPU,
    Recorder,
    WatchedTask,
    in_ranks,
    make_trainer,
    settings_of_training,
    tiny_model,
)

from ttrain.config import Night
from ttrain.config.loading import load
from ttrain.errors import TTrainError, UsageError
from ttrain.train import resource_limits
from ttrain.train.callbacks import LogRecord
from ttrain.train.distributed import Ranks
from ttrain.train.resource_limits import (
    NightThrottle,
    explain_out_of_memory,
    is_in_window,
    limit_memory,
)
from ttrain.train.trainer import Trainer
from ttrain.train.training_options import Cadence

CUDA = torch.device("cuda", 0)
linux = pytest.mark.skipif(sys.platform != "linux", reason="macOS enforces no limit")


def allocate_within_a_limit() -> list[str]:
    """What is said of 300 MB, where 200 MB are left, of torch, numpy and Python; 100 MB are allocated each time."""
    limit, messages = resource_limits.data_bytes() + 200_000_000, []
    limit_memory(limit, CPU)
    for allocate in (
        lambda n: torch.empty(n, dtype=torch.uint8),
        lambda n: np.empty(n, dtype=np.uint8),
        bytearray,
    ):
        with explain_out_of_memory(limit, 16):
            allocate(100_000_000)
        with pytest.raises(TTrainError) as error, explain_out_of_memory(limit, 16):
            allocate(300_000_000)
        messages.append(str(error.value))
    return messages


@linux
def test_what_exceeds_the_limit_fails_with_the_cure_and_what_does_not_passes(
    tmp_path: Path,
) -> None:
    (messages,) = in_ranks(1, tmp_path, lambda ranks: allocate_within_a_limit())
    for message, name in zip(messages, ("RuntimeError", "MemoryError", "MemoryError"), strict=True):
        for part in ("runtime.rows_per_device", "16", "runtime.memory_limit_gb", name):
            assert part in message


@linux
def test_a_limit_in_which_no_training_can_begin_is_refused_and_nothing_changes() -> None:
    with pytest.raises(UsageError, match=r"has \d+\.\d\d .* needs 0\.\d\d .*set"):
        limit_memory(resource_limits.data_bytes() + 30_000_000, CPU)
    torch.zeros(10_000_000)


@pytest.mark.parametrize(("limit", "fraction"), [(20e9, 0.25), (80e9, 1.0), (100e9, 1.0)])
def test_on_cuda_it_is_a_share_of_the_device(
    monkeypatch: pytest.MonkeyPatch, limit: float, fraction: float
) -> None:
    given: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(total_memory=80_000_000_000),
    )
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *pair: given.append(pair)
    )
    limit_memory(limit, CUDA)
    assert given == [(fraction, CUDA)]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("std::bad_alloc")]
)
def test_out_of_memory_is_told_in_our_words(error: Exception) -> None:
    with (
        pytest.raises(TTrainError, match=r"runtime\.rows_per_device .*8") as found,
        explain_out_of_memory(None, 8),
    ):
        raise error
    assert "memory_limit_gb" not in str(found.value) and found.value.__cause__ is error
    with pytest.raises(RuntimeError, match="shape mismatch"), explain_out_of_memory(1e9, 8):
        raise RuntimeError("shape mismatch")


def clock() -> Callable[[], datetime]:
    """Shows 21:30 at first, then an hour and a half more each time it is asked."""
    times = (datetime(2026, 1, 1, 21, 30) + n * timedelta(minutes=90) for n in itertools.count())
    return lambda: next(times)


class Notes(Recorder):
    trainer: Trainer

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def log(self, record: LogRecord) -> None:
        super().log(record)
        self.seen.append((torch.get_num_threads(), self.trainer.loader.rows_per_device))


def fit(
    night: bool, *, threads: int = 2, ranks: Ranks = ALONE
) -> tuple[Notes, Trainer, WatchedTask]:
    torch.set_num_threads(threads)
    config, model, notes = settings_of_training(tokens=9 * 96), tiny_model(), Notes()
    task = WatchedTask(config, model)
    own_clock = clock() if ranks.first else lambda: datetime(2026, 1, 1)  # midnight
    shift = NightThrottle(Night(), CPU, rows_per_device=4, clock=own_clock) if night else None
    notes.trainer = make_trainer(
        config,
        model,
        NumberedRows(52),
        task=task,
        callbacks=[notes],
        cadence=Cadence(log=1, checkpoint=100),
        night=shift,
        ranks=ranks,
    )
    notes.trainer.fit()
    return notes, notes.trainer, task


def test_from_ten_to_eight_micro_batches_and_threads_are_halved_and_losses_are_those_of_the_day() -> (
    None
):
    by_day, _, day_task = fit(False)
    by_night, trainer, night_task = fit(True)
    lit = [bool(value) for value in by_night.figures("night")]
    assert lit == [False] + [True] * 6 + [False] * 2, (
        "asked at 21:30, 23:00, ..., the night ends at 8:00"
    )
    assert by_night.seen == [(1, 2) if on else (2, 4) for on in lit]
    assert by_night.figures("loss") == pytest.approx(by_day.figures("loss"), rel=1e-5)
    assert distance(day_task.optimizers.gradients[3], night_task.optimizers.gradients[3]) < 1e-5  # type: ignore[union-attr]
    assert night_task.passes == 6 * 3 + 3 * 2, "twice the micro-batches of three, but the last"
    assert day_task.passes == 9 * 2
    assert trainer.loader.consumed == 9


def test_two_ranks_follow_the_clock_of_the_first(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> tuple[int, list[float]]:
        notes, _, task = fit(True, threads=1, ranks=ranks)
        return task.passes, notes.figures("night")

    (first, lit), (second, _) = in_ranks(2, tmp_path, work)
    assert first == second, "both made the same change at the same step"
    assert lit == [0] + [1] * 6 + [0] * 2


def test_a_window_of_the_day() -> None:
    for now, start, end, inside in (
        ("22:00", "22:00", "08:00", True),
        ("08:00", "22:00", "08:00", False),
        ("03:00", "01:00", "05:00", True),
    ):
        assert is_in_window(*(time.fromisoformat(word) for word in (now, start, end))) is inside, (
            now,
            start,
        )


@pytest.mark.parametrize(("used", "by_night"), [(10e9, 0.5), (100e9, 0.625)])
def test_the_profile_takes_half_of_a_gpu_by_night_but_no_less_than_is_in_use(
    monkeypatch: pytest.MonkeyPatch, used: float, by_night: float
) -> None:
    settings, given = load(profiles=["night"]).settings.runtime.night, list[float]()
    assert settings
    properties = SimpleNamespace(total_memory=160_000_000_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: used)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: given.append(share)
    )
    shift = NightThrottle(settings, CUDA, rows_per_device=4)
    shift.set(True)
    shift.set(False)
    assert given == [by_night, 1.0]
