"""What the trainer is given beside task, loader and callbacks, and what a training ends with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

COMPLETED, INTERRUPTED, STOPPED = "completed", "interrupted", "stopped by a callback"


class Weights(Protocol):
    """Reads the trained weights of a model and loads them."""

    def state(self) -> dict[str, Tensor]: ...

    def load(self, weights: dict[str, Tensor]) -> None: ...


@dataclass(frozen=True)
class Cadence:
    """Intervals of logging, checkpoints and validation, in steps; 0 is never."""

    log: int = 10
    checkpoint: int = 100
    checkpoint_steps: frozenset[int] = frozenset()  # in addition to those of the cadence
    validate: int = 0
    quick_validations: int = 0  # over the whole run, on the few rows of `Trainer.quick`


@dataclass(frozen=True)
class TrainerOptions:
    """Options that change only speed and memory; results are equal up to the order of summation."""

    compile: bool = False
    parallel: str = "ddp"
    reduction: str = "fast"
    defer: bool | None = None  # figures are read at logging steps only; None: on CUDA


@dataclass
class FitResult:
    """Result of a training run."""

    step: int
    stop_reason: str  # COMPLETED, INTERRUPTED or STOPPED
    resumed_from_step: int
    loss: float | None
    validation_loss: float | None
    skipped_steps: int
    live_tokens: int
    seconds: float
