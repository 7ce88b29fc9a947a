"""Example of a user-defined task: a small network learns a function in seconds."""

from typing import final

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ttrain.config import Optim, TaskConfig
from ttrain.train.task import Criterion, LossSum, UserTask


@final
class Regression(UserTask):
    """Learns y = sin(3a) + ab for a and b between -1 and 1, by the squared error."""

    class Config(TaskConfig):
        """The task's own settings, and other defaults for common ones."""

        hidden: int = Field(64, ge=1, description="width of the two hidden layers")
        examples: int = Field(2048, ge=1, description="rows to learn from")
        optim: Optim = Optim(lr=1e-2, weight_decay=0.0)

    config: Config

    def rows(self) -> TensorDataset:
        return self._drawn(self.config.examples, seed=self.config.seed)

    def heldout_rows(self) -> TensorDataset:
        return self._drawn(256, seed=self.config.seed + 1)

    def build_model(self) -> nn.Module:
        hidden = self.config.hidden
        return nn.Sequential(
            nn.Linear(2, hidden),
            nn.Tanh(),
            nn.Linear(hidden, hidden),
            nn.Tanh(),
            nn.Linear(hidden, 1),
        )

    def build_criterion(self) -> Criterion:
        return nn.MSELoss(reduction="sum")

    def train_step(self, model: nn.Module, batch: list[Tensor], device: torch.device) -> LossSum:
        x, y = (tensor.to(device) for tensor in batch)
        return LossSum(self.criterion(model(x).squeeze(1), y), count=len(y))

    def validation_step(
        self, model: nn.Module, batch: list[Tensor], device: torch.device
    ) -> LossSum:
        with torch.no_grad():
            return self.train_step(model, batch, device)

    def _drawn(self, count: int, seed: int) -> TensorDataset:
        x = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
        return TensorDataset(x, torch.sin(3 * x[:, 0]) + x[:, 0] * x[:, 1])
