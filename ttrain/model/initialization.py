"""Initialisation beyond what an architecture does by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ttrain.config import Model
from ttrain.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

# Last parts of the names of what writes into the residual stream: attention's and the feed-forward layer's output.
RESIDUAL = frozenset({"o_proj", "down_proj", "c_proj", "out_proj", "dense", "dense_4h_to_h", "fc2", "fc_out", "w2", "wo",
                      "Wo", "linear_out", "proj_down"})  # fmt: skip
# Parts of the names of what is called alike and writes elsewhere: a first matrix, a head, a router, a norm.
ELSEWHERE = frozenset({"intermediate", "transform", "lm_head", "predictions", "generator_predictions", "gate", "router_mlp",
                       "input_layernorm"})  # fmt: skip


def scale_residuals(model: PreTrainedModel, config: Model) -> None:
    """Where the settings ask for it, draw anew what writes into the residual stream, with init_std / sqrt(2 layers).

    So the stream's variance does not grow with depth: GPT-2 (Radford et al. 2019, section 2.3). Every layer adds twice.
    Raises UsageError where the architecture has nothing of a name that is known to write there.
    """
    if not config.scaled_residuals:
        return
    found = residual_weights(model)
    if not found:
        raise UsageError(
            f"model.scaled_residuals is set, but which weights of {model.config.model_type} write into the residual stream "
            f"is not known; leave it out"
        )
    std = config.init_std / (2 * config.layers) ** 0.5
    for weight in found.values():
        torch.nn.init.normal_(weight, std=std)


def residual_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Weights that write into the residual stream, by name; of experts all at once, with three dimensions."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and _writes(name.removesuffix(".weight").split("."))
    }


def _writes(parts: Sequence[str]) -> bool:
    return parts[-1] in RESIDUAL and ELSEWHERE.isdisjoint(parts)
