"""TinySeek's architecture: latent attention with one rotated part for all heads, experts with biases, post-norm layers.

This file needs only transformers and its dependencies. It is saved beside the weights of such a model, so that
`AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)` opens it where ttrain is not installed.

Letters in names: B rows, T positions, S positions that can be seen, D width, C width of the latent, H heads, K width of a
head, R width of the rotated part, N positions of all rows, E experts, F inner width of an expert, V vocabulary.
"""

# No `from __future__ import annotations`: transformers checks the types of a config's fields, which must not be strings.
import math
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.integrations import use_experts_implementation
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

ALIGNED = 8  # what sizes must be a multiple of for grouped products: rows of 16 bytes, also in bf16


@strict
class TinySeekConfig(PreTrainedConfig):  # type: ignore[misc]  # transformers has no types
    """Sizes; in brackets what TinySeek's own `model_config.json` calls them.

    latent_size             what queries, and keys with values, are made from (d_c)
    rope_head_dim           the rotated part of queries and keys, one for all heads (d_r)
    moe_intermediate_size   inner width of an expert (hidden)
    num_local_experts       routed experts (other_experts), of which each token visits num_experts_per_tok (keep)
    n_shared_experts        experts that every token visits besides (shared_experts)
    router_noise            normal noise of a learnt size on the router's logits, in training only (arXiv:1701.06538, eq. 4)
    router_aux_loss_coef    weight of the balance loss, which the training code computes (alpha)
    dropout                 on what attention and experts add
    share_layers            one layer, passed num_hidden_layers times
    """

    model_type = "tinyseek"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "attention_dropout": "dropout",
        "num_experts": "num_local_experts",
        "n_routed_experts": "num_local_experts",
    }

    vocab_size: int = 5000
    hidden_size: int = 512
    latent_size: int | None = None
    rope_head_dim: int = 8
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    moe_intermediate_size: int = 32
    num_local_experts: int = 64
    num_experts_per_tok: int = 8
    n_shared_experts: int = 4
    router_noise: bool = True
    router_aux_loss_coef: float = 0.01
    share_layers: bool = False
    max_position_embeddings: int = 2048
    rope_parameters: dict[str, Any] | None = None
    dropout: float | int = 0.0
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **others: Any) -> None:
        self.latent_size = self.latent_size or max(self.rope_head_dim, self.hidden_size // 4)
        self.rope_parameters = self.rope_parameters or {"rope_type": "default", "rope_theta": 10_000.0}
        super().__post_init__(**others)
        self.auto_map = {
            "AutoConfig": "modeling_tinyseek.TinySeekConfig",
            "AutoModelForCausalLM": "modeling_tinyseek.TinySeekForCausalLM",
        }

    def validate_architecture(self) -> None:
        """Raise ValueError if sizes do not fit each other."""
        if self.hidden_size % self.num_attention_heads:
            heads = self.num_attention_heads
            raise ValueError(f"hidden_size is {self.hidden_size} but must be a multiple of num_attention_heads {heads}")
        if self.rope_head_dim % 2:
            raise ValueError(f"rope_head_dim is {self.rope_head_dim} but must be even")
        if not 1 <= self.num_experts_per_tok <= self.num_local_experts:
            visited, experts = self.num_experts_per_tok, self.num_local_experts
            raise ValueError(f"num_experts_per_tok is {visited} but must be from 1 to {experts}, as many as there are")
        kind = (self.rope_parameters or {}).get("rope_type", "default")
        if kind != "default":
            raise ValueError(f"rope_type is {kind}, but tinyseek has the plain rotation only; set it to default")


def rotated(x_BTR: Tensor, position_ids_BT: Tensor, theta: float) -> Tensor:
    """RoPE (arXiv:2104.09864) of neighbouring pairs: dimensions 2i and 2i+1 turn by position / theta^(2i/R)."""
    R = x_BTR.shape[-1]
    rates = theta ** (-torch.arange(0, R, 2, dtype=torch.float32, device=x_BTR.device) / R)
    angles = position_ids_BT[..., None].float() * rates
    even, odd = x_BTR[..., 0::2].float(), x_BTR[..., 1::2].float()
    turned = (even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin())
    return torch.stack(turned, -1).flatten(-2).to(x_BTR.dtype)


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


class TinySeekAttention(nn.Module):
    """Multi-head latent attention (arXiv:2405.04434, section 2.1), with biases and a rotated query that heads share."""

    def __init__(self, config: TinySeekConfig) -> None:
        super().__init__()
        D, C, R = config.hidden_size, config.latent_size or 0, config.rope_head_dim
        self.config = config
        self.head_dim = D // config.num_attention_heads
        self.scaling = (self.head_dim + R) ** -0.5
        self.is_causal = True
        self.theta = float((config.rope_parameters or {})["rope_theta"])
        self.q_a_proj, self.kv_a_proj = nn.Linear(D, C), nn.Linear(D, C)
        self.q_b_proj, self.k_b_proj, self.v_b_proj = (nn.Linear(C, D) for _ in range(3))
        self.q_rope_proj, self.k_rope_proj = nn.Linear(C, R), nn.Linear(D, R)
        self.o_proj = nn.Linear(D, D)

    def forward(
        self,
        x_BTD: Tensor,
        number: int,
        position_ids_BT: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Cache | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """`number`: number of the pass through the layers, the index of its keys and values in the cache."""
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        q_BTC, kv_BTC = self.q_a_proj(x_BTD), self.kv_a_proj(x_BTD)
        projections = (self.q_b_proj(q_BTC), self.k_b_proj(kv_BTC), self.v_b_proj(kv_BTC))
        q, k, v = (each.view(heads).transpose(1, 2) for each in projections)
        turned = (self.q_rope_proj(q_BTC), self.k_rope_proj(x_BTD))
        q_R, k_R = (rotated(each, position_ids_BT, self.theta)[:, None].expand(-1, q.shape[1], -1, -1) for each in turned)
        q, k = torch.cat((q, q_R.to(q.dtype)), -1), torch.cat((k, k_R.to(k.dtype)), -1)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, number)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        mixed, weights = attend(self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **others)
        return self.o_proj(mixed.reshape(x_BTD.shape)), weights


class TinySeekMLP(nn.Module):
    """Two linear layers with biases and a ReLU between them; shared experts, whose outputs are summed, are one wide one."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(self.up_proj(x).relu())
        return output


@use_experts_implementation(has_bias=True, has_gate=False)
class TinySeekAlignedExperts(nn.Module):
    """Routed experts, their weights in one tensor; transformers computes them in groups."""

    def __init__(self, config: TinySeekConfig) -> None:
        super().__init__()
        E, D, F = config.num_local_experts, config.hidden_size, config.moe_intermediate_size
        self.num_experts = E
        self.act_fn = ACT2FN["relu"]
        self.up_proj, self.up_proj_bias = nn.Parameter(torch.empty(E, F, D)), nn.Parameter(torch.zeros(E, F))
        self.down_proj, self.down_proj_bias = nn.Parameter(torch.empty(E, D, F)), nn.Parameter(torch.zeros(E, D))

    def forward(self, x_ND: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Used when the experts are not computed in groups."""
        return self.one_by_one(x_ND, top_k_index, top_k_weights)

    def one_by_one(self, x_ND: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute one expert after the other."""
        output = torch.zeros_like(x_ND)
        for expert in range(self.num_experts):
            tokens, places = (top_k_index == expert).nonzero(as_tuple=True)
            inner = nn.functional.linear(x_ND[tokens], self.up_proj[expert], self.up_proj_bias[expert]).relu()
            out = nn.functional.linear(inner, self.down_proj[expert], self.down_proj_bias[expert])
            output.index_add_(0, tokens, (out * top_k_weights[tokens, places, None]).to(output.dtype))
        return output


class TinySeekExperts(TinySeekAlignedExperts):
    """Experts of any size: those not aligned for grouped products are computed one by one."""

    config: TinySeekConfig

    def forward(self, x_ND: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        F, D = self.up_proj.shape[1:]
        grouped = self.config._experts_implementation == "grouped_mm"
        compute = self.one_by_one if grouped and (F % ALIGNED or D % ALIGNED) else super().forward
        output: Tensor = compute(x_ND, top_k_index, top_k_weights)
        return output


class TinySeekTopKRouter(nn.Module):
    """Softmax over the top-k logits alone. In training they carry normal noise, whose size is learnt (softplus).

    `noise_scale` multiplies the noise: 0 turns it off without taking its weight out of the graph.
    """

    def __init__(self, config: TinySeekConfig) -> None:
        super().__init__()
        E, D = config.num_local_experts, config.hidden_size
        self.top_k, self.noise_scale = config.num_experts_per_tok, 1.0
        self.weight = nn.Parameter(torch.empty(E, D))
        self.noise_weight = nn.Parameter(torch.empty(E, D)) if config.router_noise else None

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(logits [N, E], weights [N, k] that sum to 1, experts [N, k])."""
        logits_NE = nn.functional.linear(x_ND, self.weight).float()
        if self.training and self.noise_weight is not None:
            size_NE = nn.functional.softplus(nn.functional.linear(x_ND, self.noise_weight).float())
            logits_NE = logits_NE + torch.randn_like(logits_NE) * size_NE * self.noise_scale
        top, index = logits_NE.topk(self.top_k, dim=-1)
        return logits_NE, top.softmax(-1).to(x_ND.dtype), index


class TinySeekMoE(nn.Module):
    """Routed experts, weighted, and the shared ones."""

    def __init__(self, config: TinySeekConfig) -> None:
        super().__init__()
        self.gate, self.experts = TinySeekTopKRouter(config), TinySeekExperts(config)
        inner = config.n_shared_experts * config.moe_intermediate_size
        self.shared_experts = TinySeekMLP(config.hidden_size, inner) if inner else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.flatten(0, 1)
        _, weights, index = self.gate(x_ND)
        output: Tensor = self.experts(x_ND, index, weights)
        if self.shared_experts is not None:
            output = output + self.shared_experts(x_ND)
        return output.view(x_BTD.shape)


class TinySeekLayer(GradientCheckpointingLayer):  # type: ignore[misc]
    """Each part adds to its input, and the sum is normalised after it (post-norm)."""

    def __init__(self, config: TinySeekConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = TinySeekAttention(config), TinySeekMoE(config)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.post_mlp_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, number: int, position_ids: Tensor, **others: Any) -> Tensor:
        mixed, _ = self.self_attn(x_BTD, number, position_ids, **others)
        x_BTD = self.post_attention_layernorm(x_BTD + self.dropout(mixed))
        output: Tensor = self.post_mlp_layernorm(x_BTD + self.dropout(self.mlp(x_BTD)))
        return output


class TinySeekPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """Base class with what transformers needs to know of the architecture."""

    config: TinySeekConfig
    config_class = TinySeekConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["TinySeekLayer"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_record_outputs: ClassVar[dict[str, Any]] = {
        "router_logits": OutputRecorder(TinySeekTopKRouter, index=0),
        "hidden_states": TinySeekLayer,
        "attentions": TinySeekAttention,
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, TinySeekExperts):
            init.normal_(module.up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
            init.zeros_(module.up_proj_bias)
            init.zeros_(module.down_proj_bias)
        elif isinstance(module, TinySeekTopKRouter):
            init.normal_(module.weight, mean=0.0, std=std)
            if module.noise_weight is not None:
                init.normal_(module.noise_weight, mean=0.0, std=std)


class TinySeekModel(TinySeekPreTrainedModel):
    """Embeddings and layers; nothing is normalised after the last of them."""

    def __init__(self, config: TinySeekConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        layer_count = 1 if config.share_layers else config.num_hidden_layers
        self.layers = nn.ModuleList(TinySeekLayer(config) for _ in range(layer_count))
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
        if position_ids is None:
            past_length = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(past_length, past_length + x_BTD.shape[1], device=x_BTD.device)[None]
        causal_mask = create_causal_mask(
            config=self.config, inputs_embeds=x_BTD, attention_mask=attention_mask, past_key_values=past_key_values,
            position_ids=position_ids,
        )  # fmt: skip
        for number in range(self.config.num_hidden_layers):
            layer = self.layers[number % len(self.layers)]
            x_BTD = layer(x_BTD, number, position_ids, attention_mask=causal_mask, past_key_values=past_key_values, **others)
        return BaseModelOutputWithPast(last_hidden_state=x_BTD, past_key_values=past_key_values)


class TinySeekForCausalLM(TinySeekPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """Causal language model. The output head has a bias; if tied, it shares the embeddings' weight."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: TinySeekConfig) -> None:
        super().__init__(config)
        self.model = TinySeekModel(config)
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
        """As `TinySeekModel.forward`; labels are shifted here, as in all models of transformers."""
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
