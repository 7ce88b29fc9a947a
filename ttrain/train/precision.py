"""Precision and device of a stage. Master weights, gradients and optimizer state stay fp32."""
# `precision` changes the weights, so it is part of a stage's key; also `tf32`, which is fp32 but
# for matrix products on CUDA, whose factors are rounded to 10 bits of mantissa.

import contextlib
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from ttrain.core.machine import cpu_flags
from ttrain.errors import TTrainError, UsageError

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "tf32": torch.float32,
}

GROWTH_INTERVAL = 2000

# Halve 2^16, or a scale that has grown for 32 000 steps, down to 1 and below.
OVERFLOWS_IN_A_ROW = 32

LOWEST_SCALE = 2.0**-16

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # the last is arm's

log = logging.getLogger("ttrain")


@dataclass
class LossScale:
    """Loss scaling (arXiv:1710.03740): halved at an overflow, doubled after 2000 good steps."""

    # Not torch's GradScaler, which unscales one optimizer at a time and on some devices only; here
    # the factor joins the division by targets.

    scale: float
    enabled: bool
    good_steps: int = 0
    overflows: int = 0  # in a row

    def update(self, finite: bool) -> None:
        """Update the scale after a step. Raises TTrainError if no scale helps."""
        if not self.enabled:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        self.overflows = 0 if finite else self.overflows + 1
        if self.overflows >= OVERFLOWS_IN_A_ROW:
            raise TTrainError(
                f"precision is fp16, and the gradients of {self.overflows} steps in a row "
                f"overflowed, the last with a loss scale of {self.scale:g}; no scale helps: set "
                "precision=bf16 or fp32, or lower optim.lr"
            )
        if not finite:
            self.scale = max(self.scale / 2, LOWEST_SCALE)
        elif self.good_steps == GROWTH_INTERVAL:
            self.scale = self.scale * 2
            self.good_steps = 0


@dataclass(frozen=True)
class Precision:
    """A resolved precision, never `auto`, with its device."""

    word: str
    device: torch.device

    def autocast(self) -> Any:
        """Context in which a forward pass computes in this precision."""
        if DTYPES[self.word] is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[self.word])

    @property
    def product_dtype(self) -> torch.dtype:
        """Number format of products outside a forward pass, where no loss scale protects fp16."""
        return torch.bfloat16 if self.word == "bf16" else torch.float32

    def loss_scale(self) -> LossScale:
        """A loss scale that is enabled in fp16 only."""
        return LossScale(2.0**16 if self.word == "fp16" else 1.0, enabled=self.word == "fp16")


def resolve_precision(word: str, device: torch.device) -> Precision:
    """Resolve a precision: `auto` is bf16 if the chip has it, else fp16 on CUDA, else fp32.

    Sets how this process multiplies fp32 matrices. Raises UsageError if the device lacks tf32.
    """
    requested = word
    without_bf16 = "fp16" if device.type == "cuda" else "fp32"
    if word == "auto":
        word = "bf16" if has_bf16(device) else without_bf16
    if word == "tf32" and not is_ampere(device):
        raise UsageError(
            f"precision is tf32, which needs CUDA on Ampere or newer, not {device}; set "
            "precision=fp32 or auto"
        )
    if requested == "bf16" and device.type != "mps" and not has_bf16(device):
        log.warning(
            "precision is bf16, which this %s only emulates; %s is faster",
            device.type,
            without_bf16,
        )
    torch.set_float32_matmul_precision("high" if word == "tf32" else "highest")
    log.info("precision %s on %s%s", word, device, " (from auto)" if requested == "auto" else "")
    return Precision(word, device)


def has_bf16(device: torch.device) -> bool:
    """Whether the device computes bf16 in hardware; not MPS, since Apple's M1 does not."""
    if device.type == "cpu":
        return not BF16_FLAGS.isdisjoint(cpu_flags())
    return is_ampere(device)


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The number format of products with a tensor: that of autocast if on, else its own."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def is_ampere(device: torch.device) -> bool:
    """Whether it is a GPU with bf16, tf32, grouped products and flash attention."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def resolve_device(word: str, local_rank: int = 0, name: str = "runtime.device") -> torch.device:
    """`auto`: cuda, then mps, then cpu. `name`: the setting or option, for messages.

    Raises UsageError if the device, or one for this rank, does not exist.
    """
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    requested = word
    word = next(name for name in available if available[name]) if word == "auto" else word
    if not available[word]:
        raise UsageError(
            f"{name} is {word}, but torch {torch.__version__} finds no such device here; "
            f"take auto, or install the driver and a torch that is built for it"
        )
    count = torch.cuda.device_count() if word == "cuda" else 1
    if word != "cpu" and local_rank >= count:
        raise UsageError(
            f"runtime.device is {requested} and runtime.devices is more than the {count} of "
            f"{word} here; set runtime.devices={count}, or runtime.device=cpu"
        )
    return torch.device(word, local_rank) if word == "cuda" else torch.device(word)


def set_deterministic(on: bool) -> None:
    """Use deterministic kernels; call before the first one runs. Operations without one warn."""
    # Eager CPU code is deterministic anyway. Compiled code gave six results in six runs on two
    # threads, but one with this setting. On CUDA cuBLAS also needs a fixed workspace
    # (docs.nvidia.com/cuda/cublas, "Results reproducibility").
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(on, warn_only=True)
    # A debugging aid that fills every new tensor with NaN.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
