"""Lingmao Moyun's architecture: a post-norm transformer with sinusoidal positions."""
# This file and `modeling_shared.py` need only transformers. They are saved with the weights of such
# a model, so that `AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)` opens
# it without ttrain.
# Letters in names: B rows, T positions, S visible positions, D width, H heads, K width of a head, V
# vocabulary.

# No `from __future__ import annotations`: transformers checks the types of a config's fields, which
# must not be strings.
import math
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .modeling_shared import (
    OwnConfig,
    OwnForCausalLM,
    OwnModel,
    OwnPreTrainedModel,
    PostNormLayer,
    ReluMLP,
    eager_attention,
)

WAVELENGTH = 10_000.0  # of the slowest pair of dimensions, over 2 pi; arXiv:1706.03762, section 3.5


@strict
class MoyunConfig(OwnConfig):
    """Sizes. `dropout` acts on attention weights, in the feed-forward layer, on what both add."""

    model_type = "moyun"
    class_name = "Moyun"
    attribute_map: ClassVar[dict[str, str]] = {"attention_dropout": "dropout"}

    intermediate_size: int = 2048
    max_position_embeddings: int = 5000


def sinusoids(length: int, width: int) -> Tensor:
    """[length, width]: sin(p / 10000^(2i/width)) at 2i, the cosine at 2i+1; arXiv:1706.03762."""
    positions_T1 = torch.arange(length, dtype=torch.float32, device="cpu")[:, None]
    pairs = torch.arange(0, width, 2, dtype=torch.float32, device="cpu")
    angles = positions_T1 * torch.exp(pairs * (-math.log(WAVELENGTH) / width))
    table = torch.empty(length, width, device="cpu")
    table[:, 0::2] = angles.sin()
    table[:, 1::2] = angles.cos()[:, : width // 2]
    return table


class MoyunPositions(nn.Module):
    """Adds the position to each embedding; the table is recomputed instead of saved."""

    def __init__(self, config: MoyunConfig) -> None:
        super().__init__()
        self.register_buffer(
            "table", sinusoids(config.max_position_embeddings, config.hidden_size), persistent=False
        )

    def forward(self, x_BTD: Tensor, position_ids_BT: Tensor, last: int) -> Tensor:
        """Add positions. Raises ValueError if position number `last` is beyond the table."""
        table: Any = self.table
        if last >= len(table):
            raise ValueError(
                f"position {last} is beyond the {len(table)} that the model has "
                "(max_position_embeddings)"
            )
        added: Tensor = x_BTD + table[position_ids_BT].to(x_BTD.dtype)
        return added


class MoyunAttention(nn.Module):
    """Multi-head attention with biases."""

    def __init__(self, config: MoyunConfig, layer: int) -> None:
        super().__init__()
        D = config.hidden_size
        self.config = config
        self.layer_idx = layer
        self.head_dim = D // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.dropout
        self.is_causal = True
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(D, D) for _ in range(4))

    def forward(
        self,
        x_BTD: Tensor,
        attention_mask: Tensor | None,
        cache: Cache | None = None,
        **others: Any,
    ) -> Tensor:
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        q, k, v = (
            each(x_BTD).view(heads).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention
        )
        dropout = self.attention_dropout if self.training else 0.0
        mixed, _ = attend(
            self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **others
        )
        output: Tensor = self.o_proj(mixed.reshape(x_BTD.shape))
        return output


class MoyunLayer(PostNormLayer):
    """Attention and a feed-forward layer."""

    def __init__(self, config: MoyunConfig, layer: int) -> None:
        attention = MoyunAttention(config, layer)
        super().__init__(
            config, attention, ReluMLP(config.hidden_size, config.intermediate_size, config.dropout)
        )


class MoyunPreTrainedModel(OwnPreTrainedModel):
    """Base class with what transformers needs to know of the architecture."""

    config: MoyunConfig
    config_class = MoyunConfig
    _no_split_modules: ClassVar[list[str]] = ["MoyunLayer"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, MoyunPositions):
            init.copy_(
                module.table,
                sinusoids(self.config.max_position_embeddings, self.config.hidden_size),
            )


class MoyunModel(OwnModel, MoyunPreTrainedModel):
    """Embeddings times the root of the width, positions, layers; no norm after the last one."""

    def __init__(self, config: MoyunConfig) -> None:
        super().__init__(config)
        self.positions = MoyunPositions(config)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            MoyunLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.post_init()

    def decode(
        self, x_BTD: Tensor, position_ids: Tensor, past_length: int, **others: Any
    ) -> Tensor:
        last = past_length + x_BTD.shape[1] - 1
        x_BTD = self.dropout(
            self.positions(x_BTD * math.sqrt(self.config.hidden_size), position_ids, last)
        )
        for layer in self.layers:
            x_BTD = layer(x_BTD, **others)
        return x_BTD


class MoyunForCausalLM(OwnForCausalLM, MoyunPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The causal language model."""

    model_class = MoyunModel
