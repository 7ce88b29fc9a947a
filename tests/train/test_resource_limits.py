"""Precision, device, memory limit, and quiet hours: which the settings become, and what they do."""

import itertools
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.comparing import distance
from support.tiny_data import NumberedRows
from support.tiny_trainers import ALONE, Recorder, WatchedTask, in_ranks, make_trainer, tiny_model
from support.tiny_trainers import settings_of_training as settings_of

from ttrain.config import QuietHours
from ttrain.config.loading import load
from ttrain.core import machine
from ttrain.errors import TTrainError, UsageError
from ttrain.train import precision, resource_limits
from ttrain.train.distributed import Ranks
from ttrain.train.precision import LossScale, resolve_device, resolve_precision
from ttrain.train.resource_limits import QuietHoursThrottle, explain_out_of_memory, limit_memory
from ttrain.train.training_options import Cadence

CPU, CUDA, MPS = ALONE.device, torch.device("cuda", 0), torch.device("mps")
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


def fit(night: bool, ranks: Ranks = ALONE) -> tuple[Recorder, Any]:
    """Rank 0's clock begins at 21:30 and advances 90 minutes each time; others are at midnight."""
    config, model = settings_of(tokens=9 * 96), tiny_model()
    recorder, task = Recorder(), WatchedTask(config, model)
    begin = datetime(2026, 1, 1, 21, 30)
    times = (begin + number * timedelta(minutes=90) for number in itertools.count())
    clock = (lambda: next(times)) if ranks.first else lambda: datetime(2026, 1, 1)
    throttle = (
        QuietHoursThrottle(QuietHours(), CPU, rows_per_device=4, clock=clock) if night else None
    )
    options: dict[str, Any] = {"task": task, "callbacks": [recorder], "quiet_hours": throttle}
    options |= {"ranks": ranks, "cadence": Cadence(log=1, checkpoint=100)}
    make_trainer(config, model, NumberedRows(52), **options).fit()
    return recorder, task


def test_at_night_micro_batches_are_halved_and_losses_are_equal() -> None:
    (by_day, day_task), (by_night, night_task) = fit(False), fit(True)
    is_night = [bool(value) for value in by_night.figures("quiet_hours")]
    assert is_night == [False] + [True] * 6 + [False] * 2, "from 23:00, the night ends at 8:00"
    assert by_night.figures("loss") == pytest.approx(by_day.figures("loss"), rel=1e-5)
    gradients = [task.optimizers.gradients[3] for task in (day_task, night_task)]
    assert distance(*gradients) < 1e-5
    assert night_task.passes == 6 * 3 + 3 * 2, "twice the micro-batches of three, but the last"
    assert day_task.passes == 9 * 2


def test_two_ranks_follow_the_clock_of_the_first(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> tuple[int, list[float]]:
        recorder, task = fit(True, ranks)
        return task.passes, recorder.figures("quiet_hours")

    (first, nights), (second, _) = in_ranks(2, tmp_path, work)
    assert first == second, "both made the same change at the same step"
    assert nights == [0] + [1] * 6 + [0] * 2


@pytest.mark.parametrize(("used", "by_night"), [(10e9, 0.5), (100e9, 0.625)])
def test_the_profile_takes_half_of_gpu_and_threads_by_night_but_no_less_than_is_in_use(
    fractions: Any, monkeypatch: pytest.MonkeyPatch, used: float, by_night: float
) -> None:
    settings = load(profiles=["quiet-hours"]).settings.runtime.quiet_hours
    assert settings
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: used)
    torch.set_num_threads(4)
    throttle = QuietHoursThrottle(settings, CUDA, rows_per_device=4)
    assert (throttle.set(True), torch.get_num_threads()) == (2, 2)
    assert (throttle.set(False), torch.get_num_threads()) == (4, 4)
    assert fractions == [(by_night, CUDA), (1.0, CUDA)]


def test_auto_is_bf16_where_the_chip_has_it_else_fp16_on_cuda_else_fp32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for has_bf16, words in ((True, ["bf16"] * 3), (False, ["fp32", "fp16", "fp32"])):
        monkeypatch.setattr(precision, "has_bf16", lambda device, has_bf16=has_bf16: has_bf16)
        assert [resolve_precision("auto", device).word for device in (CPU, CUDA, MPS)] == words


@pytest.mark.parametrize(("word", "is_scaled"), [("bf16", False), ("fp16", True), ("fp32", False)])
def test_a_named_precision_is_taken_as_it_is_and_only_fp16_is_scaled(
    word: str, is_scaled: bool
) -> None:
    resolved = resolve_precision(word, CPU)
    assert resolved.word == word
    assert resolved.product_dtype == (torch.bfloat16 if word == "bf16" else torch.float32)
    assert resolved.loss_scale() == LossScale(2.0**16 if is_scaled else 1.0, enabled=is_scaled)
    with resolved.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == precision.DTYPES[word]


def test_a_cpu_has_bf16_by_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "cpu_flags", machine.cpu_flags.__wrapped__)
    for flags, has_bf16 in (
        ("flags : fpu avx512f avx512_bf16 sse", True),
        ("Features : fp i8mm bf16", True),
        ("Features : ebf16", False),
    ):
        monkeypatch.setattr(Path, "read_text", Mock(return_value=flags))
        assert precision.has_bf16(CPU) is has_bf16


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, bool], None]:
    def have(cuda: int, mps: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cuda))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return have


Devices = Callable[[int, bool], None]


def test_the_device_is_cuda_then_mps_then_cpu_unless_one_is_named(devices: Devices) -> None:
    for cuda, mps, name in ((2, True, "cuda:1"), (0, True, "mps"), (0, False, "cpu")):
        devices(cuda, mps)
        assert str(resolve_device("auto", local_rank=min(cuda, 1))) == name
        assert str(resolve_device("cpu", local_rank=1)) == "cpu"
    for word in ("cuda", "mps"):
        devices(1, True)
        assert resolve_device(word).type == word
        devices(0, False)
        with pytest.raises(UsageError, match=rf"runtime.device is {word}, .*auto"):
            resolve_device(word)


@pytest.mark.parametrize(("word", "cuda", "count"), [("auto", 2, 2), ("cuda", 2, 2), ("mps", 2, 1)])
def test_more_ranks_than_devices_are_refused(
    devices: Devices, word: str, cuda: int, count: int
) -> None:
    devices(cuda, True)
    resolve_device(word, local_rank=count - 1)
    with pytest.raises(UsageError, match=rf"runtime.devices={count}, .*device=cpu"):
        resolve_device(word, local_rank=count)


def test_tf32_shortens_fp32_matrices_until_the_next_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with resolve_precision("tf32", CUDA).autocast():
        assert torch.get_float32_matmul_precision() == "high"
        assert not torch.is_autocast_enabled()
    resolve_precision("fp32", CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    for device in (CPU, CUDA):
        with pytest.raises(UsageError, match=rf"tf32, .* {device}; .*precision=fp32"):
            resolve_precision("tf32", device)
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_scale_halves_at_an_overflow_and_doubles_after_enough_good_steps_in_a_row() -> None:
    scale = LossScale(8.0, enabled=True)
    for missing in (1, 0):
        good_steps = precision.GROWTH_INTERVAL - missing
        scale.update(finite=False)
        for _ in range(good_steps):
            scale.update(finite=True)
        assert (scale.scale, scale.good_steps) == (4.0, good_steps if missing else 0)


def test_too_many_overflows_in_a_row_end_the_run() -> None:
    scale = LossScale(2.0**16, enabled=True)
    for _ in range(3):
        for _ in range(precision.OVERFLOWS_IN_A_ROW - 1):
            scale.update(finite=False)
        scale.update(finite=True)
    with pytest.raises(TTrainError, match=r"32 steps.*precision=bf16"):
        for _ in range(precision.OVERFLOWS_IN_A_ROW):
            scale.update(finite=False)
