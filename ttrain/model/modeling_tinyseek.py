"""TinySeek's architecture: latent attention, experts with biases, post-norm layers."""
# This file and `modeling_shared.py` need only transformers. They are saved with the weights of such
# a model, so that `AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)` opens
# it without ttrain.
# Letters in names: B rows, T positions, S visible positions, D width, C width of the latent, H
# heads, K width of a head, R width of the rotated part, N positions of all rows, E experts, F inner
# width of an expert, V vocabulary.

# No `from __future__ import annotations`: transformers checks the types of a config's fields, which
# must not be strings.
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.integrations import use_experts_implementation
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

ALIGNED = 8  # what sizes must be a multiple of for grouped products: rows of 16 bytes, also in bf16


@strict
class TinySeekConfig(OwnConfig):
    """Sizes; in brackets their names in TinySeek's own `model_config.json`.

    latent_size             width of the latent of queries, and of keys with values (d_c)
    rope_head_dim           the rotated part of queries and keys, one for all heads (d_r)
    moe_intermediate_size   inner width of an expert (hidden)
    num_local_experts       routed experts (other_experts)
    num_experts_per_tok     routed experts that a token visits (keep)
    n_shared_experts        experts that every token visits (shared_experts)
    router_noise            normal noise of a learned size on logits in training
                            (arXiv:1701.06538, eq. 4)
    router_aux_loss_coef    weight of the balance loss, which the training code computes (alpha)
    dropout                 on what attention and experts add
    share_layers            one layer, passed num_hidden_layers times
    """

    model_type = "tinyseek"
    class_name = "TinySeek"
    attribute_map: ClassVar[dict[str, str]] = {
        "attention_dropout": "dropout",
        "num_experts": "num_local_experts",
        "n_routed_experts": "num_local_experts",
    }

    vocab_size: int = 5000
    latent_size: int | None = None
    rope_head_dim: int = 8
    moe_intermediate_size: int = 32
    num_local_experts: int = 64
    num_experts_per_tok: int = 8
    n_shared_experts: int = 4
    router_noise: bool = True
    router_aux_loss_coef: float = 0.01
    share_layers: bool = False
    rope_parameters: dict[str, Any] | None = None

    def __post_init__(self, **others: Any) -> None:
        self.latent_size = self.latent_size or max(self.rope_head_dim, self.hidden_size // 4)
        self.rope_parameters = self.rope_parameters or {
            "rope_type": "default",
            "rope_theta": 10_000.0,
        }
        super().__post_init__(**others)

    def validate_architecture(self) -> None:
        """Raise ValueError if sizes do not fit each other."""
        super().validate_architecture()
        if self.rope_head_dim % 2:
            raise ValueError(f"rope_head_dim is {self.rope_head_dim} but must be even")
        if not 1 <= self.num_experts_per_tok <= self.num_local_experts:
            visited = self.num_experts_per_tok
            experts = self.num_local_experts
            raise ValueError(
                f"num_experts_per_tok is {visited} but must be from 1 to {experts}, as many as "
                "there are"
            )
        kind = (self.rope_parameters or {}).get("rope_type", "default")
        if kind != "default":
            raise ValueError(
                f"rope_type is {kind}, but tinyseek has the plain rotation only; set it to default"
            )


def rotated(x_BTR: Tensor, position_ids_BT: Tensor, theta: float) -> Tensor:
    """RoPE (arXiv:2104.09864) of pairs: dimensions 2i, 2i+1 turn by position / theta^(2i/R)."""
    R = x_BTR.shape[-1]
    rates = theta ** (-torch.arange(0, R, 2, dtype=torch.float32, device=x_BTR.device) / R)
    angles = position_ids_BT[..., None].float() * rates
    even = x_BTR[..., 0::2].float()
    odd = x_BTR[..., 1::2].float()
    turned = (even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin())
    return torch.stack(turned, -1).flatten(-2).to(x_BTR.dtype)


class TinySeekAttention(nn.Module):
    """Latent attention (arXiv:2405.04434, section 2.1), with biases and a shared rotated query."""

    def __init__(self, config: TinySeekConfig) -> None:
        super().__init__()
        D = config.hidden_size
        C = config.latent_size or 0
        R = config.rope_head_dim
        self.config = config
        self.head_dim = D // config.num_attention_heads
        self.scaling = (self.head_dim + R) ** -0.5
        self.is_causal = True
        self.theta = float((config.rope_parameters or {})["rope_theta"])
        self.q_a_proj = nn.Linear(D, C)
        self.kv_a_proj = nn.Linear(D, C)
        self.q_b_proj, self.k_b_proj, self.v_b_proj = (nn.Linear(C, D) for _ in range(3))
        self.q_rope_proj = nn.Linear(C, R)
        self.k_rope_proj = nn.Linear(D, R)
        self.o_proj = nn.Linear(D, D)

    def forward(
        self,
        x_BTD: Tensor,
        number: int,
        position_ids_BT: Tensor,
        attention_mask: Tensor | None,
        cache: Cache | None = None,
        **others: Any,
    ) -> Tensor:
        """`number`: of the pass through the layers, the index in the cache."""
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        q_BTC = self.q_a_proj(x_BTD)
        kv_BTC = self.kv_a_proj(x_BTD)
        projections = (self.q_b_proj(q_BTC), self.k_b_proj(kv_BTC), self.v_b_proj(kv_BTC))
        q, k, v = (each.view(heads).transpose(1, 2) for each in projections)
        turned = (self.q_rope_proj(q_BTC), self.k_rope_proj(x_BTD))
        q_R, k_R = (
            rotated(each, position_ids_BT, self.theta)[:, None].expand(-1, q.shape[1], -1, -1)
            for each in turned
        )
        q = torch.cat((q, q_R.to(q.dtype)), -1)
        k = torch.cat((k, k_R.to(k.dtype)), -1)
        if cache is not None:
            k, v = cache.update(k, v, number)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention
        )
        mixed, _ = attend(
            self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **others
        )
        output: Tensor = self.o_proj(mixed.reshape(x_BTD.shape))
        return output


@use_experts_implementation(has_bias=True, has_gate=False)
class TinySeekAlignedExperts(nn.Module):
    """Routed experts, their weights in one tensor; transformers computes them in groups."""

    def __init__(self, config: TinySeekConfig) -> None:
        super().__init__()
        E = config.num_local_experts
        D = config.hidden_size
        F = config.moe_intermediate_size
        self.num_experts = E
        self.act_fn = ACT2FN["relu"]
        self.up_proj = nn.Parameter(torch.empty(E, F, D))
        self.up_proj_bias = nn.Parameter(torch.zeros(E, F))
        self.down_proj = nn.Parameter(torch.empty(E, D, F))
        self.down_proj_bias = nn.Parameter(torch.zeros(E, D))

    def forward(self, x_ND: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Used when the experts are not computed in groups."""
        return self.one_by_one(x_ND, top_k_index, top_k_weights)

    def one_by_one(self, x_ND: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute one expert after the other."""
        output = torch.zeros_like(x_ND)
        for expert in range(self.num_experts):
            tokens, places = (top_k_index == expert).nonzero(as_tuple=True)
            inner = nn.functional.linear(
                x_ND[tokens], self.up_proj[expert], self.up_proj_bias[expert]
            ).relu()
            out = nn.functional.linear(inner, self.down_proj[expert], self.down_proj_bias[expert])
            output.index_add_(
                0, tokens, (out * top_k_weights[tokens, places, None]).to(output.dtype)
            )
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
    """Softmax over the top-k logits alone, in training with normal noise of a learned size.

    `noise_scale`: a factor; 0 turns the noise off with its weight still in the graph.
    """

    def __init__(self, config: TinySeekConfig) -> None:
        super().__init__()
        E = config.num_local_experts
        D = config.hidden_size
        self.top_k = config.num_experts_per_tok
        self.noise_scale = 1.0
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
        self.gate = TinySeekTopKRouter(config)
        self.experts = TinySeekExperts(config)
        inner = config.n_shared_experts * config.moe_intermediate_size
        # One wide one: outputs are summed.
        self.shared_experts = ReluMLP(config.hidden_size, inner) if inner else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.flatten(0, 1)
        _, weights, index = self.gate(x_ND)
        output: Tensor = self.experts(x_ND, index, weights)
        if self.shared_experts is not None:
            output = output + self.shared_experts(x_ND)
        return output.view(x_BTD.shape)


class TinySeekLayer(PostNormLayer):
    """Latent attention and experts."""

    def __init__(self, config: TinySeekConfig) -> None:
        super().__init__(config, TinySeekAttention(config), TinySeekMoE(config))


class TinySeekPreTrainedModel(OwnPreTrainedModel):
    """Base class with what transformers needs to know of the architecture."""

    config: TinySeekConfig
    config_class = TinySeekConfig
    _no_split_modules: ClassVar[list[str]] = ["TinySeekLayer"]

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


class TinySeekModel(OwnModel, TinySeekPreTrainedModel):
    """Embeddings and layers; nothing is normalised after the last of them."""

    def __init__(self, config: TinySeekConfig) -> None:
        super().__init__(config)
        layer_count = 1 if config.share_layers else config.num_hidden_layers
        self.layers = nn.ModuleList(TinySeekLayer(config) for _ in range(layer_count))
        self.post_init()

    def decode(
        self, x_BTD: Tensor, position_ids: Tensor, past_length: int, **others: Any
    ) -> Tensor:
        for number in range(self.config.num_hidden_layers):
            x_BTD = self.layers[number % len(self.layers)](x_BTD, number, position_ids, **others)
        return x_BTD


class TinySeekForCausalLM(
    OwnForCausalLM,
    TinySeekPreTrainedModel,
    GenerationMixin,  # type: ignore[misc]
):
    """The causal language model."""

    model_class = TinySeekModel
