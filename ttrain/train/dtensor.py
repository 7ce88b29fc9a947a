"""Between whole tensors and a rank's part of them. Plain tensors pass through, without importing torch's DTensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered from all ranks, which all ask for it; any other as it is."""
    gather: Any = getattr(tensor, "full_tensor", None)
    found: Tensor = gather() if gather else tensor
    return found


def placed(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor where and as `like` is: this rank's part of it, where `like` is sharded."""
    tensor = tensor.to(like.device)
    sharded: Any = like
    if not hasattr(like, "full_tensor") or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, sharded.device_mesh, sharded.placements, src_data_rank=None)
