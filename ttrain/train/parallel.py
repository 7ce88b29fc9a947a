"""How a model is spread over ranks, and how its gradients come together; the trainer drives it step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch.distributed as dist
from torch import nn

from ttrain.data.loader import MicroBatch
from ttrain.errors import UsageError
from ttrain.train.distributed import Ranks
from ttrain.train.parallel_base import Parallel
from ttrain.train.reduction import TreeSum, tree_order


@final
class Replicated(Parallel):
    """Every rank has the whole model; DDP sums gradients over ranks while the last backward pass still runs."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self._ddp: nn.parallel.DistributedDataParallel | None = None
        if ranks.world > 1:
            ids = [ranks.device.index] if ranks.device.type == "cuda" else None
            # Running statistics of normalization are rank 0's, which are those that a checkpoint keeps.
            kept = {name for name, _ in module.named_buffers()} & {*module.state_dict()}
            self._ddp = nn.parallel.DistributedDataParallel(
                module, device_ids=ids, gradient_as_bucket_view=True, forward_sync_buffers=bool(kept)
            )
            self.loss_factor = float(ranks.world)
        self.module = self._ddp or module

    def before_backward(self, *, last: bool) -> None:
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = last


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
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.detach(), 0)

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


def spread(module: nn.Module, ranks: Ranks, *, parallel: str, reduction: str) -> Parallel:
    """The way that the settings ask for. Raises UsageError where they do not go together."""
    if parallel == "fsdp" and reduction == "tree":
        raise UsageError("runtime.reduction is tree but runtime.parallel is fsdp, which sums in its own order; set one only")
    if reduction == "tree":
        return Tree(module, ranks)
    if parallel == "fsdp" and ranks.world > 1:
        from ttrain.train.sharded import Sharded  # 0.5 s of imports that other runs need not pay

        return Sharded(module, ranks)
    return Replicated(module, ranks)
