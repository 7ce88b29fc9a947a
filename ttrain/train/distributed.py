"""The processes that train together (ranks), and their collectives."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, cast

import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from ttrain.core.signals import RENDEZVOUS
from ttrain.core.text import first_line
from ttrain.errors import RankLost

Tensors = Mapping[str, Tensor]  # by name

NETWORK_WORDS = ("gloo", "nccl", "connection closed by peer", "connection reset")


@dataclass(frozen=True)
class Ranks:
    """This process among `world` equal ones; alone unless the environment gives a rank."""

    rank: int
    world: int
    device: torch.device

    @classmethod
    def join(cls, device: torch.device, timeout_seconds: float) -> Self:
        """Join the process group by torchrun's variables: gloo, and NCCL on CUDA.

        A rank that waits longer than `timeout_seconds` for another one fails.
        """
        world = int(os.environ.get("WORLD_SIZE", "1"))
        rank = int(os.environ.get("RANK", "0"))
        ranks = cls(rank, world, device)
        if world > 1:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            file = os.environ.get(RENDEZVOUS)
            with ranks._naming_lost_ranks("joining"):
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                    store=dist.FileStore(file, world) if file else None,  # type: ignore[attr-defined]
                    rank=rank,
                    world_size=world,
                    timeout=timedelta(seconds=timeout_seconds),
                )
        return ranks

    @property
    def first(self) -> bool:
        """Rank 0 logs and saves."""
        return self.rank == 0

    @property
    def on_one_machine(self) -> bool:
        """Whether no network lies between the ranks; False where that is unknown."""
        return os.environ.get("LOCAL_WORLD_SIZE") == str(self.world)

    def sum(self, values: list[float]) -> list[float]:
        """Sums over all ranks in fp64: the one collective by which a step agrees on anything.

        On the CPU, so that no rank waits for its GPU.
        """
        return (
            values
            if self.world == 1
            else list(self.add_up(torch.tensor(values, dtype=torch.float64)).tolist())
        )

    def add_up(self, figures: Tensor) -> Tensor:
        """Sum a tensor over all ranks in place, on its device."""
        if self.world > 1:
            with self._naming_lost_ranks():
                dist.all_reduce(figures)
        return figures

    def gather(self, numbers_N: Tensor) -> Tensor:
        """The numbers of all ranks, [W, N], on their device; each rank has N."""
        gathered_WN = numbers_N.new_empty((self.world, len(numbers_N)))
        with self._naming_lost_ranks():  # as bytes: not every backend knows bf16
            dist.all_gather([*gathered_WN.view(torch.uint8)], numbers_N.view(torch.uint8))
        return gathered_WN

    def union(self, names: Iterable[str]) -> list[str]:
        """All names that any rank has, sorted."""
        if self.world == 1:
            return sorted(names)
        gathered = [list[str]()] * self.world
        with self._naming_lost_ranks():
            dist.all_gather_object(gathered, sorted(names))
        return sorted(set().union(*gathered))

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.sum([0.0])

    def exchanging(self) -> contextlib.AbstractContextManager[None]:
        """Turn network errors of backward passes, which exchange gradients, into RankLost."""
        return self._naming_lost_ranks("exchanging gradients", NETWORK_WORDS)

    @contextlib.contextmanager
    def _naming_lost_ranks(
        self, activity: str = "waiting for the others", words: Sequence[str] = ("",)
    ) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if self.world == 1 or not any(word in str(error).lower() for word in words):
                raise
            raise RankLost(
                f"another rank ended while rank {self.rank} was {activity}, or it hangs: "
                f"{first_line(error)}; run the same command again, which continues at the last "
                "checkpoint"
            ) from error

    def leave(self) -> None:
        """Leave the process group."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def share_cores(threads: int | None) -> int:
    """Set the threads, by default this process's share; returns its rank on this machine."""
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) // local_world_size))
    return int(os.environ.get("LOCAL_RANK", "0"))


def full_tensor(tensor: Any) -> Tensor:
    """Gather a sharded tensor, called on all ranks; returns any other tensor unchanged."""
    return cast(Tensor, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor)


def local_part(tensor: Any) -> Tensor:
    """This rank's part of a sharded tensor; experts are split between experts."""
    return cast(Tensor, tensor.to_local() if hasattr(tensor, "to_local") else tensor)


def shard_like(tensor: Tensor, like: Any) -> Tensor:
    """Move a full tensor to the device of `like`; returns this rank's shard if that is sharded."""
    tensor = tensor.to(like.device)
    if not hasattr(like, "full_tensor") or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def on_device(arrays: Iterable[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Arrays as tensors on the device; pinned, since other copies would wait for the GPU."""
    tensors = (torch.from_numpy(array) for array in arrays)
    return [
        (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
        for tensor in tensors
    ]
