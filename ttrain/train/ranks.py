"""The processes that train together, and the few things they tell each other."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # rank 0 may write slowly, but a dead peer must not be waited for for ever


@dataclass(frozen=True)
class Ranks:
    """This process among `world` equal ones; alone where torchrun did not start it."""

    rank: int
    world: int
    device: torch.device

    @classmethod
    def join(cls, device: torch.device) -> Ranks:
        """Take the place that torchrun's environment gives: NCCL on CUDA, gloo otherwise."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        rank = int(os.environ.get("RANK", "0"))
        if world > 1:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=COLLECTIVE_TIMEOUT)
        return cls(rank, world, device)

    @property
    def first(self) -> bool:
        """Rank 0 logs and saves."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Sums over all ranks, in fp64: the one collective in which all agreement travels."""
        if self.world == 1:
            return values
        kind = torch.float32 if self.device.type == "mps" else torch.float64
        tensor = torch.tensor(values, dtype=kind, device=self.device)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor.tolist()]

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as DDP replicates it; as it is where one rank trains alone."""
        if self.world == 1:
            return model
        ids = [self.device.index] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(
            model, device_ids=ids, gradient_as_bucket_view=True, broadcast_buffers=False
        )

    def barrier(self) -> None:
        """Wait for all."""
        if self.world > 1:
            dist.barrier()

    def leave(self) -> None:
        """End the group."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def global_norm(parameters: list[Tensor]) -> Tensor:
    """L2 norm of all gradients together."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)
