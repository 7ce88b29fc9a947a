"""Which precision `auto` becomes, and how the scale of fp16 moves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ttrain.train import precision
from ttrain.train.precision import LossScale

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda", 0), torch.device("mps")


@pytest.mark.parametrize(
    ("device", "has_bf16", "expected"),
    [(CPU, True, "bf16"), (CPU, False, "fp32"), (CUDA, True, "bf16"), (CUDA, False, "fp16"), (MPS, False, "fp32")],
)
def test_auto_is_bf16_where_the_chip_has_it_else_fp16_on_cuda_else_fp32(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, has_bf16: bool, expected: str
) -> None:
    monkeypatch.setattr(precision, "has_bf16", lambda device: has_bf16)
    assert precision.resolve("auto", device).word == expected


@pytest.mark.parametrize("word", ["bf16", "fp16", "fp32"])
def test_a_named_precision_is_taken_as_it_is_and_only_fp16_is_scaled(word: str) -> None:
    resolved = precision.resolve(word, CPU)
    assert resolved.word == word
    scale = resolved.loss_scale()
    assert (scale.enabled, scale.scale) == (word == "fp16", 2.0**16 if word == "fp16" else 1.0)
    with resolved.autocast():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == precision.DTYPES[word]


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_cuda_has_bf16_from_ampere_on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert precision.has_bf16(CUDA) is expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("flags : fpu avx2 avx512f avx512_bf16 sse", True),
        ("flags : fpu amx_bf16 sse", True),
        ("Features : fp asimd bf16 i8mm", True),
        ("Features : fp asimd i8mm bf16\nCPU part : 0xd40", True),
        ("flags : fpu avx2 avx512f", False),
        ("Features : fp asimd ebf16", False),
    ],
)
def test_a_cpu_has_bf16_where_its_flags_say_so(monkeypatch: pytest.MonkeyPatch, flags: str, expected: bool) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: flags)
    assert precision.has_bf16(CPU) is expected


def test_a_cpu_whose_flags_cannot_be_read_has_no_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", refuse)
    assert precision.has_bf16(CPU) is False


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"),
    [(True, True, "cuda:1"), (True, False, "cuda:1"), (False, True, "mps"), (False, False, "cpu")],
)
def test_the_device_is_cuda_then_mps_then_cpu(monkeypatch: pytest.MonkeyPatch, cuda: bool, mps: bool, expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert str(precision.resolve_device("auto", local_rank=1)) == expected
    assert str(precision.resolve_device("cpu", local_rank=1)) == "cpu"


def test_the_scale_halves_at_an_overflow_and_doubles_after_the_interval() -> None:
    scale = LossScale(8.0, enabled=True)
    scale.update(finite=False)
    assert (scale.scale, scale.good_steps) == (4.0, 0)
    for _ in range(precision.GROWTH_INTERVAL - 1):
        scale.update(finite=True)
    assert scale.scale == 4.0
    scale.update(finite=False)  # an overflow begins the count anew
    assert (scale.scale, scale.good_steps) == (2.0, 0)
    for _ in range(precision.GROWTH_INTERVAL):
        scale.update(finite=True)
    assert (scale.scale, scale.good_steps) == (4.0, 0)


def test_a_scale_that_is_off_never_moves() -> None:
    scale = LossScale(1.0, enabled=False)
    for finite in (False, True):
        scale.update(finite=finite)
    assert scale == LossScale(1.0, enabled=False)
