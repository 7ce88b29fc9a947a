"""Tiny mixtures of experts, and rows for them."""

from typing import Any

import torch
from support.tiny_data import NumberedRows
from support.tiny_trainers import tiny_model
from torch import nn

from ttrain.data.packing import Batch
from ttrain.train.moe import Routers

EXPERTS: dict[str, Any] = {"experts": 4}
SHARED = {"experts": 4, "shared_experts": 1, "bias_rate": 0.01}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"kind": "llama", "moe": EXPERTS},
    "qwen3_moe": {"kind": "qwen3", "moe": EXPERTS},
    "ernie4_5_moe": {"kind": "llama", "moe": SHARED},
    "glm4_moe": {"kind": "qwen3", "moe": SHARED},
}


def tiny_moe(kind: str, **more: Any) -> Any:
    """Two layers of four experts, of which a token visits two; `more` are settings of theirs."""
    settings = KINDS[kind]
    return tiny_model(kind=settings["kind"], moe={**settings["moe"], **more})


def blocks(model: nn.Module) -> list[Any]:
    return [part for part in model.modules() if hasattr(part, "gate") and hasattr(part, "experts")]


def padded_rows() -> Batch:
    """Rows of sixteen tokens: row n ends with n of padding; row 4 has no target."""
    batch = NumberedRows(6).batch(range(6))
    for row in range(6):
        batch.segments_BT[row, 16 - row :] = -1
        batch.labels_BT[row, 16 - row :] = -100
    batch.labels_BT[4] = -100
    return batch


def spread_routers(model: Any) -> Any:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for block in blocks(model):
            block.gate.weight.normal_(0.0, 1.0, generator=generator)
        for bias in Routers(model).biases:
            if bias is not None:
                bias.normal_(0.0, 0.1, generator=generator)
    return model
