"""The same run, the same bits."""

from __future__ import annotations

import os

import torch


def set_deterministic(on: bool) -> None:
    """Choose kernels whose sums have a fixed order, before the first of them runs; one that has none of that kind warns.

    Eager code on a CPU is deterministic as it is. Compiled code is not: on two threads it gave six results in six runs, and
    with this one. On CUDA cuBLAS also needs its workspace fixed (docs.nvidia.com/cuda/cublas, "Results reproducibility").
    """
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(on, warn_only=True)
    # A debugging aid that fills every new tensor with NaN.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # set through a module class
