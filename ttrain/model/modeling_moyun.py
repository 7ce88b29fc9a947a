"""Lingmao Moyun's architecture: a post-norm transformer with sinusoidal positions, and the causal mask that it lacked.

This file needs only transformers and its dependencies. It is saved beside the weights of such a model, so that
`AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)` opens it where ttrain is not installed.

Letters in names: B rows, T positions, S positions that can be seen, D width, H heads, K width of a head, V vocabulary.
"""

# No `from __future__ import annotations`: transformers checks the types of a config's fields, which must not be strings.
import math
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

WAVELENGTH = 10_000.0  # of the slowest pair of dimensions, over 2 pi; arXiv:1706.03762, section 3.5


@strict
class MoyunConfig(PreTrainedConfig):  # type: ignore[misc]  # transformers has no types
    """Sizes. `dropout` acts on attention weights, within the feed-forward layer, and on what both add."""

    model_type = "moyun"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {"attention_dropout": "dropout"}

    vocab_size: int = 32_000
    hidden_size: int = 512
    intermediate_size: int = 2048
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    max_position_embeddings: int = 5000
    dropout: float | int = 0.0
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **others: Any) -> None:
        super().__post_init__(**others)
        self.auto_map = {
            "AutoConfig": "modeling_moyun.MoyunConfig",
            "AutoModelForCausalLM": "modeling_moyun.MoyunForCausalLM",
        }

    def validate_architecture(self) -> None:
        """Raise ValueError if heads do not divide the width."""
        if self.hidden_size % self.num_attention_heads:
            heads = self.num_attention_heads
            raise ValueError(f"hidden_size is {self.hidden_size} but must be a multiple of num_attention_heads {heads}")


def sinusoids(length: int, width: int) -> Tensor:
    """[length, width] of sin(p / 10000^(2i/width)) at 2i and the cosine at 2i+1; arXiv:1706.03762, section 3.5."""
    positions_T1 = torch.arange(length, dtype=torch.float32, device="cpu")[:, None]
    pairs = torch.arange(0, width, 2, dtype=torch.float32, device="cpu")
    angles = positions_T1 * torch.exp(pairs * (-math.log(WAVELENGTH) / width))
    table = torch.empty(length, width, device="cpu")
    table[:, 0::2] = angles.sin()
    table[:, 1::2] = angles.cos()[:, : width // 2]
    return table


class MoyunPositions(nn.Module):
    """Adds the position to each embedding; the table is not a parameter, and is recomputed instead of saved."""

    def __init__(self, config: MoyunConfig) -> None:
        super().__init__()
        self.register_buffer("table", sinusoids(config.max_position_embeddings, config.hidden_size), persistent=False)

    def forward(self, x_BTD: Tensor, position_ids_BT: Tensor, last: int) -> Tensor:
        """Add positions. Raises ValueError if position number `last` is beyond the table."""
        table: Any = self.table
        if last >= len(table):
            raise ValueError(f"position {last} is beyond the {len(table)} that the model has (max_position_embeddings)")
        added: Tensor = x_BTD + table[position_ids_BT].to(x_BTD.dtype)
        return added


def eager_attention(
    module: nn.Module, q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, mask: Tensor | None, scaling: float,
    dropout: float = 0.0, **others: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention that also returns its weights, [B, T, H, K]: transformers uses it unless `sdpa` is requested."""
    scores_BHTS = q_BHTK @ k_BHSK.transpose(2, 3) * scaling
    if mask is not None:
        scores_BHTS = scores_BHTS.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores_BHTS + mask
    weights_BHTS = nn.functional.softmax(scores_BHTS, dim=-1, dtype=torch.float32).to(q_BHTK.dtype)
    mixed = nn.functional.dropout(weights_BHTS, dropout, module.training) @ v_BHSK
    return mixed.transpose(1, 2).contiguous(), weights_BHTS


class MoyunAttention(nn.Module):
    """Multi-head attention with biases."""

    def __init__(self, config: MoyunConfig, layer: int) -> None:
        super().__init__()
        D = config.hidden_size
        self.config, self.layer_idx = config, layer
        self.head_dim = D // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.dropout
        self.is_causal = True
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(D, D) for _ in range(4))

    def forward(
        self, x_BTD: Tensor, attention_mask: Tensor | None, past_key_values: Cache | None = None, **others: Any
    ) -> tuple[Tensor, Tensor | None]:
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        q, k, v = (each(x_BTD).view(heads).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        dropout = self.attention_dropout if self.training else 0.0
        mixed, weights = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **others)
        return self.o_proj(mixed.reshape(x_BTD.shape)), weights


class MoyunMLP(nn.Module):
    """Two linear layers with biases and a ReLU between them."""

    def __init__(self, config: MoyunConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        output: Tensor = self.down_proj(self.dropout(self.up_proj(x_BTD).relu()))
        return output


class MoyunLayer(GradientCheckpointingLayer):  # type: ignore[misc]
    """Each part adds to its input, and the sum is normalised after it (post-norm)."""

    def __init__(self, config: MoyunConfig, layer: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = MoyunAttention(config, layer), MoyunMLP(config)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.post_mlp_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, **others: Any) -> Tensor:
        x_BTD = self.post_attention_layernorm(x_BTD + self.dropout(self.self_attn(x_BTD, **others)[0]))
        output: Tensor = self.post_mlp_layernorm(x_BTD + self.dropout(self.mlp(x_BTD)))
        return output


class MoyunPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """Base class with what transformers needs to know of the architecture."""

    config: MoyunConfig
    config_class = MoyunConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["MoyunLayer"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_record_outputs: ClassVar[dict[str, Any]] = {"hidden_states": MoyunLayer, "attentions": MoyunAttention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, MoyunPositions):
            init.copy_(module.table, sinusoids(self.config.max_position_embeddings, self.config.hidden_size))


class MoyunModel(MoyunPreTrainedModel):
    """Embeddings times the root of the width, positions, layers; nothing is normalised after the last of them."""

    def __init__(self, config: MoyunConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.positions = MoyunPositions(config)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(MoyunLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults  # type: ignore[untyped-decorator]
    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast:
        """`attention_mask`: [B, S], True where not padding, or [B, 1, T, S], True where a position may see."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x_BTD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        past_length = past_key_values.get_seq_length() if past_key_values is not None else 0
        T = x_BTD.shape[1]
        if position_ids is None:
            position_ids = torch.arange(past_length, past_length + T, device=x_BTD.device)[None]
        causal_mask = create_causal_mask(
            config=self.config, inputs_embeds=x_BTD, attention_mask=attention_mask, past_key_values=past_key_values,
            position_ids=position_ids,
        )  # fmt: skip
        x_BTD = self.dropout(self.positions(x_BTD * math.sqrt(self.config.hidden_size), position_ids, past_length + T - 1))
        for layer in self.layers:
            x_BTD = layer(x_BTD, attention_mask=causal_mask, past_key_values=past_key_values, **others)
        return BaseModelOutputWithPast(last_hidden_state=x_BTD, past_key_values=past_key_values)


class MoyunForCausalLM(MoyunPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """Causal language model. The output head has a bias; if tied, it shares the embeddings' weight."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MoyunConfig) -> None:
        super().__init__(config)
        self.model = MoyunModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """As `MoyunModel.forward`; labels are shifted here, as in all models of transformers."""
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, past_key_values=past_key_values,
            inputs_embeds=inputs_embeds, use_cache=use_cache, **others,
        )  # fmt: skip
        kept_positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BTV = self.lm_head(outputs.last_hidden_state[:, kept_positions])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits_BTV, labels=labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits_BTV, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )  # fmt: skip
