"""Which precision and device the settings become, and how the scale of fp16 moves."""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from ttrain.core import machine
from ttrain.errors import TTrainError, UsageError
from ttrain.train import precision
from ttrain.train.precision import LossScale, resolve_device, resolve_precision

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda", 0), torch.device("mps")


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
