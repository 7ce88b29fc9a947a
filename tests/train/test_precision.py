"""Which precision and device the settings become, and how the scale of fp16 moves."""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from ttrain.core import machine
from ttrain.errors import TTrainError, UsageError
from ttrain.train import precision
from ttrain.train.precision import LossScale

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda", 0), torch.device("mps")


@pytest.mark.parametrize(
    ("device", "has_bf16", "expected"),
    [
        (CPU, True, "bf16"),
        (CPU, False, "fp32"),
        (CUDA, True, "bf16"),
        (CUDA, False, "fp16"),
        (MPS, False, "fp32"),
    ],
)
def test_auto_is_bf16_where_the_chip_has_it_else_fp16_on_cuda_else_fp32(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, has_bf16: bool, expected: str
) -> None:
    monkeypatch.setattr(precision, "has_bf16", lambda device: has_bf16)
    assert precision.resolve_precision("auto", device).word == expected


@pytest.mark.parametrize("word", ["bf16", "fp16", "fp32"])
def test_a_named_precision_is_taken_as_it_is_and_only_fp16_is_scaled(word: str) -> None:
    resolved = precision.resolve_precision(word, CPU)
    assert (resolved.word, resolved.product_dtype) == (
        word,
        torch.bfloat16 if word == "bf16" else torch.float32,
    )
    scale = resolved.loss_scale()
    assert (scale.enabled, scale.scale) == (word == "fp16", 2.0**16 if word == "fp16" else 1.0)
    with resolved.autocast():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == precision.DTYPES[word]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("flags : fpu avx512f avx512_bf16 sse", True),
        ("Features : fp i8mm bf16", True),
        ("Features : ebf16", False),
    ],
)
def test_a_cpu_has_bf16_where_its_flags_say_so(
    monkeypatch: pytest.MonkeyPatch, flags: str, expected: bool
) -> None:
    monkeypatch.setattr(Path, "read_text", Mock(return_value=flags))
    monkeypatch.setattr(precision, "cpu_flags", machine.cpu_flags.__wrapped__)
    assert precision.has_bf16(CPU) is expected


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, bool], None]:
    def have(cuda: int, mps: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cuda))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return have


def test_the_device_is_cuda_then_mps_then_cpu_unless_one_is_named(
    devices: Callable[[int, bool], None],
) -> None:
    for cuda, mps, expected in (
        (2, True, "cuda:1"),
        (2, False, "cuda:1"),
        (0, True, "mps"),
        (0, False, "cpu"),
    ):
        devices(cuda, mps)
        assert str(precision.resolve_device("auto", local_rank=min(cuda, 1))) == expected
        assert str(precision.resolve_device("cpu", local_rank=1)) == "cpu"
    for word in ("cuda", "mps"):
        devices(1, True)
        assert precision.resolve_device(word).type == word
        devices(0, False)
        with pytest.raises(UsageError, match=rf"runtime.device is {word}, .*auto"):
            precision.resolve_device(word)


@pytest.mark.parametrize(
    ("word", "cuda", "count"), [("auto", 2, 2), ("cuda", 2, 2), ("auto", 0, 1), ("mps", 2, 1)]
)
def test_more_ranks_than_devices_are_refused_with_their_number(
    devices: Callable[[int, bool], None], word: str, cuda: int, count: int
) -> None:
    devices(cuda, True)
    precision.resolve_device(word, local_rank=count - 1)
    with pytest.raises(
        UsageError,
        match=f"more than the {count} of .* set runtime.devices={count}, or runtime.device=cpu",
    ):
        precision.resolve_device(word, local_rank=count)


def test_tf32_shortens_fp32_matrices_where_the_chip_has_it_and_the_next_precision_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with precision.resolve_precision("tf32", CUDA).autocast():
        assert (torch.get_float32_matmul_precision(), torch.is_autocast_enabled()) == (
            "high",
            False,
        )
    precision.resolve_precision("fp32", CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    for device in (CPU, CUDA):
        with pytest.raises(
            UsageError, match=rf"is tf32, .* not {device}; set precision=fp32 or auto"
        ):
            precision.resolve_precision("tf32", device)
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_scale_halves_at_an_overflow_and_doubles_after_so_many_good_steps_in_a_row() -> None:
    scale = LossScale(8.0, enabled=True)
    for missing in (1, 0):
        good_steps = precision.GROWTH_INTERVAL - missing
        scale.update(finite=False)
        for _ in range(good_steps):
            scale.update(finite=True)
        assert (scale.scale, scale.good_steps) == (4.0, good_steps if missing else 0)


def test_a_scale_that_helps_no_more_ends_the_run_and_one_good_step_forgives() -> None:
    scale = LossScale(2.0**16, enabled=True)
    for _ in range(3):
        for _ in range(precision.OVERFLOWS_IN_A_ROW - 1):
            scale.update(finite=False)
        scale.update(finite=True)
    with pytest.raises(TTrainError, match=r"32 steps.*precision=bf16"):
        for _ in range(precision.OVERFLOWS_IN_A_ROW):
            scale.update(finite=False)
