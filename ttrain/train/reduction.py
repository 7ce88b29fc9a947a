"""How the gradients of a step's micro-batches come together.

`fast`: each rank adds up its own as they come, DDP or FSDP sums over ranks. Equal for any number of ranks to 1e-6.
`tree`: summed pairwise in an order that only the numbers of the micro-batches decide, so 1, 2, 4, ... ranks give the same
bits. Floating-point addition is commutative but not associative, so it is the order of the pairs that must be fixed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ttrain.data.loader import MicroBatch


def tree_order(micro_batches: Sequence[MicroBatch], parts: int, world: int) -> list[MicroBatch]:
    """This rank's micro-batches in the order that `TreeSum` needs: bit-reversed, so that few sums wait at a time."""
    slots = _slots(parts, world) // world
    by_slot = {micro.number // world: micro for micro in micro_batches if not micro.filler}
    return [by_slot[slot] for turn in range(slots) if (slot := _reversed(turn, slots)) in by_slot]


class TreeSum:
    """Sums gradients over micro-batches 0 .. parts-1 along a binary tree whose root splits them by the lowest bit.

    A rank r of W = 2**k owns the micro-batches r, r+W, ..., which are a subtree. Within it at most log2(parts) partial sums
    wait; across ranks partners swap and add, log2(W) times.
    """

    def __init__(self, parameters: Sequence[Tensor], parts: int, rank: int, world: int) -> None:
        self._parameters, self._rank, self._world = parameters, rank, world
        self._slots = _slots(parts, world) // world
        self._waiting: list[tuple[int, list[Tensor]]] = []  # (leaves below, sum)
        self._turn = 0

    def take(self, micro: MicroBatch) -> None:
        """Move the gradients of a micro-batch into the tree. Those of absent ones before it count as zeros."""
        while _reversed(self._turn, self._slots) != micro.number // self._world:
            self._push([torch.zeros_like(p) for p in self._parameters])
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        self._push(gradients)

    def finish(self) -> None:
        """Put the sum over all ranks into the parameters' gradients."""
        while self._turn < self._slots:
            self._push([torch.zeros_like(p) for p in self._parameters])
        ((_, gradients),) = self._waiting
        distance = self._world // 2
        while distance:
            swap_and_add(gradients, self._rank ^ distance)
            distance //= 2
        torch._foreach_add_(gradients, 0.0)  # -0.0 becomes 0.0: how many absent leaves were added must not show
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def _push(self, gradients: list[Tensor]) -> None:
        leaves = 1
        while self._waiting and self._waiting[-1][0] == leaves:
            _, first = self._waiting.pop()
            torch._foreach_add_(first, gradients)
            gradients, leaves = first, leaves * 2
        self._waiting.append((leaves, gradients))
        self._turn += 1


def swap_and_add(tensors: list[Tensor], partner: int) -> None:
    """Add the partner's tensors to ours, as it adds ours to its own; the sums are the same bits on both."""
    ours = torch.cat([tensor.flatten() for tensor in tensors])
    theirs = torch.empty_like(ours)
    requests = dist.batch_isend_irecv([dist.P2POp(dist.isend, ours, partner), dist.P2POp(dist.irecv, theirs, partner)])
    for request in requests:
        request.wait()
    start = 0
    for tensor in tensors:
        tensor.add_(theirs[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()


def _slots(parts: int, world: int) -> int:
    """Leaves of the tree: the next power of two."""
    return max(1 << (parts - 1).bit_length(), world)


def _reversed(number: int, size: int) -> int:
    """The number with its bits in reverse, below `size`, a power of two."""
    bits = size.bit_length() - 1
    return int(format(number, f"0{bits}b")[::-1], 2) if bits else 0
