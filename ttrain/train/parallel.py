"""Data parallelism over ranks: replicated, tree-reduced or sharded models, and how gradients are summed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ttrain.data.loader import MicroBatch
from ttrain.errors import UsageError
from ttrain.train.compiling import CompiledLayers, layers_of
from ttrain.train.distributed import Ranks, full_tensor, shard_like


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
        """Called when the gradients of a micro-batch are in the parameters."""

    def finish(self) -> None:
        """Called after the last micro-batch; afterwards the parameters hold the gradients of the whole step."""

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The full tensors, as a single rank would have them; all ranks must call this."""
        return dict(tensors)

    def load(self, own_tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Load full weights into the model's own tensors."""
        with torch.no_grad():
            for name, tensor in own_tensors.items():
                tensor.copy_(shard_like(weights[name], tensor))


@final
class Replicated(Parallel):
    """Every rank has the whole model; DDP sums gradients over ranks while the last backward pass still runs."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self._ddp: nn.parallel.DistributedDataParallel | None = None
        self._bare, self._saved_buffers = module, list[str]()
        if ranks.world > 1:
            # No device_ids: with them DDP moves all tensors to the GPU, also those that are read on the CPU.
            self._ddp = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True, forward_sync_buffers=False)
            self._saved_buffers = sorted({name for name, _ in module.named_buffers()} & {*module.state_dict()})
            self.loss_factor = float(ranks.world)
        self.module = self._ddp or module

    def before_backward(self, *, last: bool) -> None:
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = last

    def finish(self) -> None:
        # Running statistics are those of rank 0, which are saved in checkpoints. A module may replace its buffers.
        broadcast([self._bare.get_buffer(name) for name in self._saved_buffers])


@final
class Tree(Parallel):
    """Every rank has the whole model; gradients are summed in an order that the number of ranks does not change."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        if ranks.world & (ranks.world - 1):
            raise UsageError(
                f"runtime.reduction is tree but runtime.devices is {ranks.world}, and only 1, 2, 4, 8 ranks can share a "
                f"tree; set runtime.devices={1 << (ranks.world.bit_length() - 1)}, or runtime.reduction=fast"
            )
        self.module, self._ranks = module, ranks
        self._sum: TreeSum | None = None
        if ranks.world > 1:
            broadcast((*module.parameters(), *module.buffers()))

    def begin(self, micro_batches: Sequence[MicroBatch], parts: int) -> Sequence[MicroBatch]:
        trained = [p for p in self.module.parameters() if p.requires_grad]
        self._sum = TreeSum(trained, parts, self._ranks.rank, self._ranks.world)
        return tree_order(micro_batches, parts, self._ranks.world)

    def after_backward(self, micro: MicroBatch) -> None:
        assert self._sum is not None, "begin() comes first"
        self._sum.take(micro)

    def finish(self) -> None:
        assert self._sum is not None, "begin() comes first"
        self._sum.finish()
        self._sum = None


def place(
    module: nn.Module, ranks: Ranks, parallel: str, reduction: str, attempt: Callable[[nn.Module], None] | None
) -> tuple[Parallel, CompiledLayers | None]:
    """Distribute a module over the ranks; and its compiled layers, which `attempt` asks for by a pass to try.

    It is tried before the module is replicated: a pass that ends within DDP leaves it in the middle of a reduction. Sharded
    layers can be tried only where they are.
    """
    layers = None if attempt is None else CompiledLayers(module)
    sharded = parallel == "fsdp" and ranks.world > 1
    if layers and attempt and not sharded and not layers.keep(partial(attempt, module), ranks, sharded=False):
        layers = None
    placed = parallelize(module, ranks, parallel=parallel, reduction=reduction)
    if layers and attempt and sharded and not layers.keep(partial(attempt, placed.module), ranks, sharded=True):
        layers = None
    return placed, layers


def parallelize(module: nn.Module, ranks: Ranks, *, parallel: str, reduction: str) -> Parallel:
    """Distribute a module over the ranks as the settings say. Raises UsageError if they cannot be combined."""
    if parallel == "fsdp" and reduction == "tree":
        raise UsageError("runtime.reduction is tree but runtime.parallel is fsdp, which sums in its own order; set one only")
    if reduction == "tree":
        return Tree(module, ranks)
    if parallel == "fsdp" and ranks.world > 1:
        return Sharded(module, ranks)
    with ranks.exchanging():
        return Replicated(module, ranks)


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


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor]) -> None:
    """Give all ranks the numbers that rank 0 has. gloo takes a tensor with gaps in memory for one without."""
    for tensor in tensors:
        contiguous = tensor.detach().contiguous()
        dist.broadcast(contiguous, 0)
        if contiguous.data_ptr() != tensor.data_ptr():
            tensor.copy_(contiguous)


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


@final
class Sharded(Parallel):
    """Each layer is gathered when needed and freed afterwards: FSDP2 (arXiv:2304.11277), torch's `fully_shard`."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        from torch.distributed.device_mesh import init_device_mesh  # 0.5 s of imports that other runs need not pay
        from torch.distributed.fsdp import fully_shard

        self._first = ranks.first
        mesh = init_device_mesh(ranks.device.type, (ranks.world,))
        for layer in layers_of(module):
            fully_shard(layer, mesh=mesh)
        self._sharded = fully_shard(module, mesh=mesh)
        self.module = module
        self.loss_factor = float(ranks.world)  # gradients are averaged over ranks; gloo knows no other way

    def before_backward(self, *, last: bool) -> None:
        self._sharded.set_requires_gradient_sync(last)

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather the full tensors one at a time into rank 0's CPU memory; other ranks return {}."""
        full_tensors = {}
        for name, tensor in tensors.items():
            gathered = full_tensor(tensor)
            if self._first:
                full_tensors[name] = gathered.detach().to("cpu")
        return full_tensors
