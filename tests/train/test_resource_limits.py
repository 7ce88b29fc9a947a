"""A memory limit is kept, and what broke it is told with the cure."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.tiny_trainers import CPU, in_ranks

from ttrain.errors import TTrainError, UsageError
from ttrain.train import resource_limits
from ttrain.train.resource_limits import explain_out_of_memory, limit_memory

CUDA = torch.device("cuda", 0)
linux = pytest.mark.skipif(sys.platform != "linux", reason="macOS enforces no limit")


def allocate_within_a_limit() -> list[str]:
    """What is said of 300 MB, where 200 MB are left, of torch, numpy and Python; 100 MB are allocated each time."""
    limit, said = resource_limits.data_bytes() + 200_000_000, []
    limit_memory(limit, CPU)
    for allocate in (lambda n: torch.empty(n, dtype=torch.uint8), lambda n: np.empty(n, dtype=np.uint8), bytearray):
        with explain_out_of_memory(limit, 16):
            allocate(100_000_000)
        with pytest.raises(TTrainError) as error, explain_out_of_memory(limit, 16):
            allocate(300_000_000)
        said.append(str(error.value))
    return said


@linux
def test_what_exceeds_the_limit_fails_with_the_cure_and_what_does_not_passes(tmp_path: Path) -> None:
    (said,) = in_ranks(1, tmp_path, lambda ranks: allocate_within_a_limit())
    for line, name in zip(said, ("RuntimeError", "MemoryError", "MemoryError"), strict=True):
        assert "out of memory: lower runtime.rows_per_device (it is 16" in line
        assert "runtime.memory_limit_gb (it is " in line
        assert name in line


@linux
def test_a_limit_below_what_is_there_is_refused_and_nothing_changes() -> None:
    with pytest.raises(UsageError, match=r"memory_limit_gb is 0\.001, but the process has \d+\.\d\d before it trains"):
        limit_memory(1e6, CPU)
    torch.zeros(10_000_000)


@pytest.mark.parametrize(("limit", "fraction"), [(20e9, 0.25), (80e9, 1.0), (100e9, 1.0)])
def test_on_cuda_it_is_a_share_of_the_device(monkeypatch: pytest.MonkeyPatch, limit: float, fraction: float) -> None:
    given: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80_000_000_000))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *pair: given.append(pair))
    limit_memory(limit, CUDA)
    assert given == [(fraction, CUDA)]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("std::bad_alloc"),
        RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)"),
    ],
)
def test_out_of_memory_is_told_in_our_words(error: Exception) -> None:
    with pytest.raises(TTrainError, match=r"out of memory: lower runtime\.rows_per_device \(it is 8") as found:
        with explain_out_of_memory(None, 8):
            raise error
    assert "memory_limit_gb" not in str(found.value)
    assert found.value.__cause__ is error


def test_other_errors_rise_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="shape mismatch"):
        with explain_out_of_memory(1e9, 8):
            raise RuntimeError("shape mismatch")
