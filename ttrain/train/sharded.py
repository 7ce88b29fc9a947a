"""Models over one device: every rank holds a part of each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ttrain.train.distributed import Ranks
from ttrain.train.dtensor import whole
from ttrain.train.parallel_base import Parallel


@final
class Sharded(Parallel):
    """A layer is gathered when it is needed and let go after it: FSDP2 (arXiv:2304.11277), torch's `fully_shard`."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self._first = ranks.first
        mesh = init_device_mesh(ranks.device.type, (ranks.world,))
        layers = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
        for part in module.modules():
            if type(part).__name__ in layers:
                fully_shard(part, mesh=mesh)
        self._sharded = fully_shard(module, mesh=mesh)
        self.module = module
        self.loss_factor = float(ranks.world)  # gradients are averaged over ranks; gloo knows no other way

    def before_backward(self, *, last: bool) -> None:
        self._sharded.set_requires_gradient_sync(last)

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One tensor at a time, into the memory of rank 0's CPU; other ranks hold none of it."""
        found = {}
        for name, tensor in tensors.items():
            gathered = whole(tensor)
            if self._first:
                found[name] = gathered.detach().to("cpu")
        return found
