"""What is trained: the model, its optimizer, its loss as a sum and a count.

Letters in names: B rows, T positions, V entries of the vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ttrain.config import Training
from ttrain.data.packing import IGNORE, Batch
from ttrain.train import optim, schedules


@dataclass(frozen=True)
class LossSum:
    """A loss as a sum over `count` targets, so that it can be divided once, by the targets of the whole global step."""

    total: Tensor
    count: int
    parts: Mapping[str, Tensor] = field(default_factory=dict)


class TrainingTask(ABC):
    """Everything that the trainer needs to know about what it trains."""

    config: Training

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
    def train_step(self, model: nn.Module, batch: Batch, device: torch.device) -> LossSum:
        """Forward pass of one micro-batch; the trainer does the rest."""

    @abstractmethod
    def validation_step(self, model: nn.Module, batch: Batch, device: torch.device) -> LossSum:
        """The same without gradients."""


@final
class LanguageModeling(TrainingTask):
    """Next-token prediction; pretraining, SFT and LoRA differ in their rows and in the model they are given."""

    def __init__(self, config: Training, model: nn.Module) -> None:
        self.config = config
        self._model = model
        self._criterion = self.build_criterion()

    def build_model(self) -> nn.Module:
        return self._model

    def build_optimizer(self, model: nn.Module) -> optim.Optimizers:
        return optim.build(model, self.config.optim)

    def build_scheduler(self, steps: int) -> Callable[[int], float]:
        return schedules.schedule(self.config.schedule, steps)

    def build_criterion(self) -> Callable[[Tensor, Tensor], Tensor]:
        return token_loss_sum

    def train_step(self, model: nn.Module, batch: Batch, device: torch.device) -> LossSum:
        input_ids_BT = torch.from_numpy(batch.input_ids_BT).to(device, non_blocking=True)
        labels_BT = torch.from_numpy(batch.labels_BT).to(device, non_blocking=True)
        positions_BT = torch.from_numpy(batch.positions_BT).to(device, non_blocking=True)
        segments_BT = torch.from_numpy(batch.segments_BT).to(device, non_blocking=True)
        outputs = model(
            input_ids=input_ids_BT, position_ids=positions_BT, attention_mask=segment_mask(segments_BT), use_cache=False
        )
        return LossSum(self._criterion(outputs.logits, labels_BT), batch.live_tokens)

    def validation_step(self, model: nn.Module, batch: Batch, device: torch.device) -> LossSum:
        with torch.no_grad():
            return self.train_step(model, batch, device)


def segment_mask(segments_BT: Tensor) -> Tensor:
    """[B, 1, T, T] bool: a position sees itself and the earlier positions of its own record."""
    T = segments_BT.shape[1]
    causal_TT = torch.ones(T, T, dtype=torch.bool, device=segments_BT.device).tril()
    return ((segments_BT[:, :, None] == segments_BT[:, None, :]) & causal_TT)[:, None]


def token_loss_sum(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Summed cross entropy in nats, in fp32; labels of IGNORE do not count, and all of them ignored gives 0, not NaN."""
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), labels_BT.flatten(), ignore_index=IGNORE, reduction="sum")
