"""Which precision and device the settings become, and how the scale of fp16 moves."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ttrain.errors import TTrainError, UsageError
from ttrain.train import precision
from ttrain.train.precision import LossScale, resolve_device, resolve_precision

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda", 0), torch.device("mps")


@pytest.mark.parametrize(
    ("device", "has_bf16", "word"),
    [
        (CPU, True, "bf16"),
        (CPU, False, "fp32"),
        (CUDA, True, "bf16"),
        (CUDA, False, "fp16"),
        (MPS, False, "fp32"),
    ],
)
def test_auto_is_bf16_where_the_chip_has_it_else_fp16_on_cuda_else_fp32(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, has_bf16: bool, word: str
) -> None:
    monkeypatch.setattr(precision, "has_bf16", lambda device: has_bf16)
    assert resolve_precision("auto", device).word == word


@pytest.mark.parametrize(
    ("word", "product_dtype", "scale"),
    [
        ("bf16", torch.bfloat16, LossScale(1.0, enabled=False)),
        ("fp16", torch.float32, LossScale(2.0**16, enabled=True)),
        ("fp32", torch.float32, LossScale(1.0, enabled=False)),
    ],
)
def test_fp16_alone_is_scaled(word: str, product_dtype: torch.dtype, scale: LossScale) -> None:
    resolved = resolve_precision(word, CPU)
    assert (resolved.word, resolved.product_dtype) == (word, product_dtype)
    assert resolved.loss_scale() == scale
    with resolved.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == precision.DTYPES[word]


def set_devices(monkeypatch: pytest.MonkeyPatch, cuda: int, mps: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cuda))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


@pytest.mark.parametrize(
    ("cuda", "mps", "word", "device"),
    [
        (2, True, "auto", "cuda:1"),
        (0, True, "auto", "mps"),
        (0, False, "auto", "cpu"),
        (2, True, "mps", "mps"),
        (2, True, "cpu", "cpu"),
        (0, False, "cuda", None),
        (0, False, "mps", None),
    ],
)
def test_the_device_is_cuda_then_mps_then_cpu_unless_one_is_named(
    monkeypatch: pytest.MonkeyPatch, cuda: int, mps: bool, word: str, device: str | None
) -> None:
    set_devices(monkeypatch, cuda, mps)
    if device:
        assert str(resolve_device(word, local_rank=int(device != "mps" and cuda > 1))) == device
    else:
        with pytest.raises(UsageError, match=rf"runtime.device is {word}, .*auto"):
            resolve_device(word)


@pytest.mark.parametrize(("word", "cuda", "count"), [("auto", 2, 2), ("auto", 0, 1), ("mps", 2, 1)])
def test_more_ranks_than_devices_are_refused_with_their_number(
    monkeypatch: pytest.MonkeyPatch, word: str, cuda: int, count: int
) -> None:
    set_devices(monkeypatch, cuda, mps=True)
    resolve_device(word, local_rank=count - 1)
    message = rf"the {count} of .*runtime.devices={count}, .*device=cpu"
    with pytest.raises(UsageError, match=message):
        resolve_device(word, local_rank=count)


def test_tf32_is_for_new_gpus_and_until_the_next_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    capability: Any = Mock(return_value=(8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    resolve_precision("tf32", CUDA)
    assert torch.get_float32_matmul_precision() == "high"
    resolve_precision("fp32", CUDA)
    assert torch.get_float32_matmul_precision() == "highest"
    capability.return_value = (7, 5)
    for device in (CPU, CUDA):
        with pytest.raises(UsageError, match=rf"tf32, .* {device}; .*precision=fp32"):
            resolve_precision("tf32", device)


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
