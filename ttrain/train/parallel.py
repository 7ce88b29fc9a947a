"""Data parallelism over ranks: replicated or sharded models, and how gradients are summed."""

from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from ttrain.train.compiling import CompiledLayers, layers_of
from ttrain.train.distributed import Ranks, Tensors, full_tensor, shard_like


class Parallel:
    """The module that training calls, with hooks for its backward passes; here of one rank."""

    # Factor on the loss. DDP and FSDP average gradients over ranks; there it is the number of
    # ranks, which turns the average into a sum.
    loss_factor = 1.0

    def __init__(self, module: Any) -> None:
        self.module = module

    def before_backward(self, *, last: bool) -> None:
        """Called before each forward pass; `last`: the step's last micro-batch on this rank."""

    def finish(self) -> None:
        """Called after the last micro-batch; the parameters then hold the step's gradients."""

    def whole(self, tensors: Tensors) -> Tensors:
        """The full tensors, as a single rank has them; all ranks must call this."""
        return dict(tensors)

    def load(self, own_tensors: Tensors, weights: Tensors) -> None:
        """Load full weights into the model's own tensors."""
        with torch.no_grad():
            for name, tensor in own_tensors.items():
                tensor.copy_(shard_like(weights[name], tensor))


@final
class Replicated(Parallel):
    """Every rank has the whole model; DDP sums gradients during the last backward pass."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        # No device_ids: with them DDP moves all tensors to the GPU, also those that are read on the
        # CPU.
        super().__init__(
            nn.parallel.DistributedDataParallel(
                module, gradient_as_bucket_view=True, forward_sync_buffers=False
            )
        )
        self._bare = module
        self._saved_buffers = sorted(
            {name for name, _ in module.named_buffers()} & {*module.state_dict()}
        )
        self.loss_factor = float(ranks.world)

    def before_backward(self, *, last: bool) -> None:
        self.module.require_backward_grad_sync = last

    @torch.no_grad()
    def finish(self) -> None:
        # Running statistics are those of rank 0, which are saved in checkpoints. A module may
        # replace its buffers.
        for buffer in map(self._bare.get_buffer, self._saved_buffers):
            # Gloo ignores strides and treats every tensor as contiguous.
            contiguous = buffer.detach().contiguous()
            dist.broadcast(contiguous, 0)
            buffer.copy_(contiguous)


def place(
    module: nn.Module, ranks: Ranks, parallel: str, attempt: Callable[[nn.Module], None] | None
) -> tuple[Parallel, CompiledLayers]:
    """Distribute a module over the ranks; returns it with its compiled layers.

    `attempt`: a trial pass that tests whether the layers compile; None: do not compile.
    """
    # Try compilation before DDP wraps the module: a pass that fails inside DDP leaves a gradient
    # reduction unfinished. Sharded layers can be tried only after sharding.
    layers = CompiledLayers(module if attempt else None)
    if parallel == "fsdp" and ranks.world > 1:
        placed: Parallel = Sharded(module, ranks)
        if attempt:
            layers.keep(partial(attempt, placed.module), ranks, sharded=True)
        return placed, layers
    if attempt:
        layers.keep(partial(attempt, module), ranks, sharded=False)
    with ranks.exchanging():
        return Replicated(module, ranks) if ranks.world > 1 else Parallel(module), layers


@final
class Sharded(Parallel):
    """Each layer is gathered when needed: FSDP2 (arXiv:2304.11277), torch's `fully_shard`."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        # 0.5 s of imports that other runs need not pay.
        from torch.distributed.device_mesh import (
            init_device_mesh,
        )
        from torch.distributed.fsdp import fully_shard

        self._is_first = ranks.first
        mesh = init_device_mesh(ranks.device.type, (ranks.world,))
        for layer in layers_of(module):
            fully_shard(layer, mesh=mesh)
        super().__init__(fully_shard(module, mesh=mesh))
        # Gradients are averaged over ranks; gloo knows no other way.
        self.loss_factor = float(ranks.world)

    def before_backward(self, *, last: bool) -> None:
        self.module.set_requires_gradient_sync(last)

    def whole(self, tensors: Tensors) -> Tensors:
        """Gather the full tensors one by one into rank 0's CPU memory; other ranks return {}."""
        gathered = ((name, full_tensor(tensor)) for name, tensor in tensors.items())
        return {name: tensor.detach().to("cpu") for name, tensor in gathered if self._is_first}
