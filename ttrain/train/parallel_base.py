"""What every way of spreading a model over ranks offers to the trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ttrain.data.loader import MicroBatch
from ttrain.train.dtensor import placed


class Parallel:
    """The module that training calls, and what happens around its backward passes."""

    module: nn.Module
    loss_factor = 1.0  # the loss is multiplied by it, so that gradients end as sums over ranks where the method averages

    def begin(self, micro_batches: Sequence[MicroBatch], parts: int) -> Sequence[MicroBatch]:
        """A step of `parts` micro-batches over all ranks begins; returns this rank's in the order to compute them."""
        return micro_batches

    def before_backward(self, *, last: bool) -> None:
        """Called before the forward pass of each micro-batch; `last`: the step's last one on this rank."""

    def after_backward(self, micro: MicroBatch) -> None:
        """The gradients of a micro-batch are in the parameters."""

    def finish(self) -> None:
        """All micro-batches are through: afterwards the parameters hold the gradients of the whole step."""

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as one rank alone would have them; all ranks take part."""
        return dict(tensors)

    def load(self, held: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Give the model's own tensors these values, each of which is whole."""
        with torch.no_grad():
            for name, tensor in held.items():
                tensor.copy_(placed(weights[name], tensor))
