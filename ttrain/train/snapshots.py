"""Snapshots of a run at the end of a step, copied into reusable memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import LifoQueue
from typing import Any

import torch
from torch import Tensor

from ttrain.train.distributed import Tensors

HEADERS_BYTES = 1 << 20  # headers and JSON files; every checkpoint so far had less than half of it

# Held for weights, and for the optimizer's state.
Memory = tuple[dict[str, Tensor], dict[str, Tensor]]


@dataclass(frozen=True)
class Snapshot:
    """Copy of a run's state at the end of a step. `release()` gives its memory back."""

    step: int
    weights: Tensors
    optimizer: Tensors
    state: Mapping[str, Any]
    release: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)


class SnapshotBuffers:
    """CPU memory for the snapshots of one run, which stays allocated; pinned for CUDA."""

    # New memory costs a page fault every 4 KiB: copying 300 MB took 90 to 500 ms into it on two
    # EPYC cores, 17 ms into old memory. The second set is allocated only if a snapshot is taken
    # while the first is written; if both are in use, the trainer waits.

    def __init__(self, sets: int = 2) -> None:
        self._free: LifoQueue[Memory] = LifoQueue()
        for _ in range(sets):
            self._free.put(({}, {}))

    def take(
        self, step: int, weights: Tensors, optimizer: Tensors, state: Mapping[str, Any]
    ) -> Snapshot:
        """Copy the tensors, from any device. Waits while all sets are in use.

        The caller passes the snapshot to `Checkpoints.save`, or calls its `release`, once.
        """
        memory = self._free.get()
        copies = _copy_into(memory[0], weights), _copy_into(memory[1], optimizer)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
            torch.cuda.synchronize()  # the next step changes what is being copied
        return Snapshot(step, *copies, state, release=lambda: self._free.put(memory))


def copy_tensors(tensors: Tensors) -> dict[str, Tensor]:
    """Contiguous copies in CPU memory, which training no longer changes."""
    return {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
    }


def needed_bytes(snapshot: Snapshot) -> int:
    """Disk space of one checkpoint in bytes, slightly overestimated."""
    tensors = [*snapshot.weights.values(), *snapshot.optimizer.values()]
    return sum(tensor.nbytes for tensor in tensors) + HEADERS_BYTES


def _copy_into(buffers: dict[str, Tensor], tensors: Tensors) -> dict[str, Tensor]:
    for name in buffers.keys() - tensors.keys():
        del buffers[name]
    for name, tensor in tensors.items():
        memory = buffers.get(name)
        if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
            memory = buffers[name] = torch.empty(
                tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
            )
        memory.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
    return dict(buffers)
