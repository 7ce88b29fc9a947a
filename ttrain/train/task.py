"""What is trained: the model, its optimizer, its loss as a sum and a count."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ttrain.config import TaskConfig, Training
from ttrain.train import optim


@dataclass(frozen=True)
class LossSum:
    """A loss as a sum over `count` targets, so that it can be divided once, by the targets of the whole global step.

    `parts`: sums that are divided and logged like it, as `loss_NAME`. `sums`: any other sums over the rows, as vectors.
    """

    total: Tensor
    count: int
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    sums: Mapping[str, Tensor] = field(default_factory=dict)


class TrainingTask(ABC):
    """Everything that the trainer needs to know about what it trains."""

    config: Training | TaskConfig

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model, in fp32, on the CPU."""

    @abstractmethod
    def build_optimizer(self, model: nn.Module) -> optim.Optimizers:
        """The optimizers of the model's trainable parameters."""

    @abstractmethod
    def build_scheduler(self, steps: int) -> Callable[[int], float]:
        """Factor of the learning rate at a step, counted from 0."""

    @abstractmethod
    def build_criterion(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Summed loss of outputs and targets."""

    @abstractmethod
    def train_step(self, model: nn.Module, batch: Any, device: torch.device) -> LossSum:
        """Forward pass of one micro-batch; the trainer does the rest."""

    @abstractmethod
    def validation_step(self, model: nn.Module, batch: Any, device: torch.device) -> LossSum:
        """The same without gradients."""

    def after_step(self, sums: Mapping[str, Sequence[float]]) -> None:  # noqa: B027  # most tasks have nothing to do
        """The optimizers made a step: what changes tensors that they do not train belongs here.

        `sums`: those of the step, over its micro-batches and all ranks. Called on every rank, not for skipped steps.
        """

    def figures(self, sums: Mapping[str, Sequence[float]]) -> Mapping[str, float]:
        """Figures for the log, from the sums since the last logging step."""
        return {}

    def derived(self, losses: Mapping[str, float]) -> Mapping[str, float]:
        """Figures for the log, from the means of the loss and its parts (`loss`, `loss_NAME`) since the last one."""
        return {}
