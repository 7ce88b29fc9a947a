"""Which number format a stage computes in. Master weights, gradients and optimizer state stay fp32."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GROWTH_INTERVAL = 2000
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # the last is arm's


@dataclass
class LossScale:
    """Dynamic loss scaling (arXiv:1710.03740): halved where a gradient overflows, doubled after 2000 steps that did not.

    torch's GradScaler unscales one optimizer at a time, and on some devices only; here the factor joins the division by
    targets.
    """

    scale: float
    enabled: bool
    good_steps: int = 0

    def update(self, finite: bool) -> None:
        """Note the outcome of a step."""
        if not self.enabled:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.good_steps == GROWTH_INTERVAL:
            self.scale, self.good_steps = self.scale * 2, 0


@dataclass(frozen=True)
class Precision:
    """A resolved word: never `auto`."""

    word: str
    device: torch.device

    def autocast(self) -> Any:
        """Context in which a forward pass computes in this precision."""
        if self.word == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[self.word])

    def loss_scale(self) -> LossScale:
        """Scales the loss in fp16, and does nothing otherwise."""
        return LossScale(2.0**16 if self.word == "fp16" else 1.0, enabled=self.word == "fp16")


def resolve(word: str, device: torch.device) -> Precision:
    """`auto`: bf16 where the chip has it, else fp16 on CUDA, else fp32."""
    if word == "auto":
        word = "bf16" if has_bf16(device) else "fp16" if device.type == "cuda" else "fp32"
    return Precision(word, device)


def has_bf16(device: torch.device) -> bool:
    """Whether bf16 is computed in hardware; emulated, it is slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        try:
            words = Path("/proc/cpuinfo").read_text().split()
        except OSError:
            return False
        return not BF16_FLAGS.isdisjoint(words)
    return False


def resolve_device(word: str, local_rank: int = 0) -> torch.device:
    """`auto`: cuda, then mps, then cpu."""
    if word == "auto":
        word = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    return torch.device(word, local_rank) if word == "cuda" else torch.device(word)
