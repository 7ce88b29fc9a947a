"""A prefix adapter in rows of several records: each sees the virtual tokens, and none another record.

Letters in names: B rows, T positions, P virtual tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ttrain.errors import UsageError


def count(model: nn.Module) -> int:
    """Virtual tokens that PEFT's model puts before a text; 0 for every other model."""
    settings = getattr(model, "active_peft_config", None)
    return int(settings.num_virtual_tokens) if settings is not None and settings.is_prompt_learning else 0


def prepend(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The causal model's inputs with the prefix of PEFT's `model`, where it has one: as if each record stood alone.

    The keys and values of P virtual tokens stand once before the row. The mask, [B, 1, T, T], is widened to [B, 1, T, P + T]
    so that all positions see them, and every record begins at position P, as PEFT has it for a single text.
    """
    virtual = count(model)
    if not virtual:
        return dict(inputs)
    mask: Tensor = inputs["attention_mask"]
    B, _, T, _ = mask.shape
    return {
        **inputs,
        "past_key_values": model.get_prompt(B, max_cache_len=virtual + T),
        "position_ids": inputs["position_ids"] + virtual,
        "attention_mask": torch.cat([mask.new_ones(B, 1, T, virtual), mask], -1),
    }


def check_checkpointing(model: nn.Module) -> None:
    """Raise UsageError where the model has a prefix: layers that are computed again are not given its keys a second time."""
    if count(model):
        raise UsageError(
            "runtime.gradient_checkpointing is true but lora.kind is prefix, whose keys and values a layer that is computed "
            "again does not see; set runtime.gradient_checkpointing=false, or lora.kind=lora"
        )
