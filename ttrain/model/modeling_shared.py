"""What ttrain's own architectures share: config, post-norm layers, attention, passes."""
# This file needs only transformers. It is saved with `modeling_moyun.py` or `modeling_tinyseek.py`
# and the weights of such a model.
# Letters in names: B rows, T positions, S visible positions, D width, H heads, K width of a head, V
# vocabulary.

import math
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults


@strict
class OwnConfig(PreTrainedConfig):  # type: ignore[misc]  # transformers has no types
    """Sizes that both architectures have."""

    class_name: ClassVar[str]  # of the classes, before Config and ForCausalLM

    vocab_size: int = 32_000
    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    max_position_embeddings: int = 2048
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
        prefix = f"modeling_{self.model_type}.{self.class_name}"
        self.auto_map = {
            "AutoConfig": f"{prefix}Config",
            "AutoModelForCausalLM": f"{prefix}ForCausalLM",
        }

    def validate_architecture(self) -> None:
        """Raise ValueError unless heads divide the width."""
        heads = self.num_attention_heads
        if self.hidden_size % heads:
            raise ValueError(
                f"hidden_size is {self.hidden_size} but must be a multiple of num_attention_heads "
                f"{heads}"
            )


def eager_attention(
    module: nn.Module,
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSK: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Attention, [B, T, H, K], and its weights; used unless `sdpa` is requested."""
    scores_BHTS = q_BHTK @ k_BHSK.transpose(2, 3) * scaling
    if mask is not None:
        scores_BHTS = (
            scores_BHTS.masked_fill(~mask, -math.inf)
            if mask.dtype == torch.bool
            else scores_BHTS + mask
        )
    weights_BHTS = nn.functional.softmax(scores_BHTS, dim=-1, dtype=torch.float32).to(q_BHTK.dtype)
    mixed = nn.functional.dropout(weights_BHTS, dropout, module.training) @ v_BHSK
    return mixed.transpose(1, 2).contiguous(), weights_BHTS


class ReluMLP(nn.Module):
    """Two linear layers with biases and a ReLU between them."""

    def __init__(self, width: int, inner: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, inner)
        self.down_proj = nn.Linear(inner, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(self.dropout(self.up_proj(x).relu()))
        return output


class PostNormLayer(GradientCheckpointingLayer):  # type: ignore[misc]
    """Each part adds to its input, and the sum is normalised (post-norm)."""

    def __init__(self, config: OwnConfig, self_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.post_mlp_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, *arguments: Any, **others: Any) -> Tensor:
        x_BTD = self.post_attention_layernorm(
            x_BTD + self.dropout(self.self_attn(x_BTD, *arguments, **others))
        )
        output: Tensor = self.post_mlp_layernorm(x_BTD + self.dropout(self.mlp(x_BTD)))
        return output


class OwnPreTrainedModel(PreTrainedModel):  # type: ignore[misc]  # transformers has no types
    """What transformers needs to know of both architectures."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True


class OwnModel:
    """The forward pass of a decoder, whose layers are in `decode`."""

    config: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]  # of the architecture's PreTrainedModel
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.gradient_checkpointing = False

    def decode(
        self, x_BTD: Tensor, position_ids: Tensor, past_length: int, **others: Any
    ) -> Tensor:
        """Hidden states after the last layer. `past_length`: of the cache."""
        raise NotImplementedError

    @merge_with_config_defaults  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast:
        """`attention_mask`: [B, S], True where not padding, or [B, 1, T, S], True where visible."""
        x_BTD = self.embed_tokens(input_ids)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        past_length = cache.get_seq_length() if cache is not None else 0
        if position_ids is None:
            position_ids = torch.arange(
                past_length, past_length + x_BTD.shape[1], device=x_BTD.device
            )[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x_BTD,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=position_ids,
        )
        x_BTD = self.decode(
            x_BTD,
            position_ids,
            past_length,
            attention_mask=mask,
            cache=cache,
            **others,
        )
        return BaseModelOutputWithPast(last_hidden_state=x_BTD, cache=cache)


class OwnForCausalLM:
    """Causal language model. The output head has a bias; if tied, the embeddings' weight."""

    config: Any
    post_init: Any  # of transformers, as is loss_function
    loss_function: Any
    model_class: ClassVar[type[nn.Module]]
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]  # of the architecture's PreTrainedModel
        self.model = self.model_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """As `OwnModel.forward`; labels are shifted here, as in all models of transformers."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            use_cache=use_cache,
            **others,
        )
        kept_positions = (
            slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        )
        logits_BTV = self.lm_head(outputs.last_hidden_state[:, kept_positions])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits_BTV, labels=labels, vocab_size=self.config.vocab_size
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits_BTV, cache=outputs.cache)
