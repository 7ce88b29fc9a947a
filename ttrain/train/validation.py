"""The loss of a model on validation batches, which the ranks share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ttrain.train.distributed import Ranks
from ttrain.train.losses import ReducedSums, added
from ttrain.train.precision import Precision
from ttrain.train.task import TrainingTask


def measure(
    task: TrainingTask, model: nn.Module, batches: Sequence[Any], ranks: Ranks, precision: Precision
) -> tuple[float, dict[str, float]]:
    """Mean loss per target over the batches, NaN if there are none, and the figures of the task over the same batches."""
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    sums: dict[str, Tensor] = {}
    for number in range(ranks.rank, -(-len(batches) // ranks.world) * ranks.world, ranks.world):
        filler = number >= len(batches)  # sharded models must be called equally often on all ranks
        batch = batches[0].without_targets() if filler else batches[number]
        with precision.autocast():
            loss = task.validation_step(model, batch, ranks.device)
        total, count, sums = total + float(loss.total), count + loss.count, added(sums, loss.sums)
    model.train(was_training)
    packed = ReducedSums(ranks)
    mine = packed.flat({}, {name: vector.tolist() for name, vector in sums.items()})
    total, live, *values = ranks.sum([total, float(count), *mine])
    summed = packed.named(values)[1]
    return total / live if live else math.nan, dict(task.figures(summed)) if summed else {}
