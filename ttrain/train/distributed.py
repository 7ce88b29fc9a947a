"""The processes that train together, and the few things they tell each other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ttrain.core.parent_process import RENDEZVOUS
from ttrain.errors import RankLost
from ttrain.train import watchdog
from ttrain.train.watchdog import Watchdog

# The last net, under the watchdog: for a lost machine, and for waits in which a GPU keeps the process busy.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
NETWORK_WORDS = ("gloo", "nccl", "connection closed by peer", "connection reset")


@dataclass(frozen=True)
class Ranks:
    """This process among `world` equal ones; alone where the environment gives it no place."""

    rank: int
    world: int
    device: torch.device
    watch: Watchdog | None = None

    @classmethod
    def join(cls, device: torch.device) -> Ranks:
        """Take the place that the environment gives, in torchrun's words: NCCL on CUDA, gloo otherwise."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        rank = int(os.environ.get("RANK", "0"))
        ranks = cls(rank, world, device, watchdog.current())
        if world > 1:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            file = os.environ.get(RENDEZVOUS)
            store = dist.FileStore(file, world) if file else None  # type: ignore[attr-defined]  # torch's export
            backend = "nccl" if device.type == "cuda" else "gloo"
            with ranks._together("joining"):
                dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT)
        return ranks

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
        with self.watch.arriving() if self.watch else contextlib.nullcontext(), self._together():
            dist.all_reduce(tensor)
            return [float(value) for value in tensor.tolist()]

    def union(self, names: Iterable[str]) -> list[str]:
        """All names that any rank has, sorted; the same list on all of them."""
        if self.world == 1:
            return sorted(names)
        found: list[list[str]] = [[] for _ in range(self.world)]
        with self.watch.doing(watchdog.WAITING) if self.watch else contextlib.nullcontext(), self._together():
            dist.all_gather_object(found, sorted(names))
        return sorted({name for some in found for name in some})

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Announce work that is no step, such as "saving", so that the others wait for it with more patience."""
        with self.watch.doing(what, busy=True) if self.watch else contextlib.nullcontext():
            yield

    def barrier(self) -> None:
        """Wait for all."""
        if self.world > 1:
            with self.watch.doing(watchdog.WAITING) if self.watch else contextlib.nullcontext(), self._together():
                dist.barrier()

    @contextlib.contextmanager
    def _together(self, what: str = "waiting for the others") -> Iterator[None]:
        """Around what fails where another rank has ended: RankLost says so instead of the network's words."""
        try:
            yield
        except RuntimeError as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RankLost(f"another rank ended while rank {self.rank} was {what}: {reason}") from error

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """Around backward passes, in which gradients are exchanged: the network's words for a lost rank become RankLost."""
        try:
            yield
        except RuntimeError as error:
            if self.world > 1 and any(word in str(error).lower() for word in NETWORK_WORDS):
                with self._together("exchanging gradients"):
                    raise
            raise

    def leave(self) -> None:
        """End the group."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def global_norm(parameters: list[Tensor]) -> Tensor:
    """L2 norm of all gradients together."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)
