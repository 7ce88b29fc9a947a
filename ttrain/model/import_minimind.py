"""MiniMind's weights (github.com/jingyaogong/minimind) as the architectures of transformers that compute the same.

    its model                                  architecture
    2025, without norms on queries and keys    llama, with experts granitemoeshared
    2026, with them                            qwen3, with experts qwen3_moe

Its state dicts come without a config. What shapes do not tell is taken from a `config.json`, else from its code's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ttrain.errors import ArtifactError
from ttrain.model.import_common import Converted, Source, agree, told

if TYPE_CHECKING:
    from transformers import PretrainedConfig

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
OLD_MARK = "tok_embeddings.weight"  # of 2024
MARKS = frozenset({EMBEDDING, OLD_MARK})
RECOMPUTED = ("model.freqs_cos", "model.freqs_sin")  # tables of the rotary positions, in some files
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Defaults of its code; the ids are those of its tokenizer.
HEADS, THETA, MAX_LENGTH, TOP_K = 8, 1e6, 32_768, {False: 2, True: 1}
EPS = {False: 1e-5, True: 1e-6}  # without and with norms on queries and keys
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def convert(weights: dict[str, Tensor], settings: Mapping[str, Any], where: str) -> Converted:
    """Raises ArtifactError where something does not fit, or no architecture of transformers computes the same."""
    if OLD_MARK in weights:
        raise ArtifactError(f"{where} is of MiniMind's layout of 2024 (wq, wk, ...), which is not known here")
    for name in RECOMPUTED:
        weights.pop(name, None)
    if settings.get("inference_rope_scaling"):
        raise ArtifactError(
            f"the config of {where} sets inference_rope_scaling, whose frequencies transformers computes otherwise; set it "
            f"to false: positions up to 2048 need none"
        )
    try:
        sizes = _Sizes(weights, settings)
    except (KeyError, ValueError, IndexError) as error:
        raise ArtifactError(f"{where} has MiniMind's embedding, but {error} is missing or mis-shaped") from None
    if sizes.K * sizes.heads != sizes.query or sizes.key % sizes.K:
        raise ArtifactError(
            f"{where} has {sizes.query} rows of queries and {sizes.key} of keys, which {sizes.heads} heads do not divide; "
            f"set num_attention_heads in a --config"
        )
    agree(settings, sizes.told_by_shapes, where)
    tied = HEAD not in weights or torch.equal(weights[HEAD], weights[EMBEDDING])
    source = Source(weights, where)
    found = {EMBEDDING: source.take(EMBEDDING, sizes.V, sizes.D), NORM: source.take(NORM, sizes.D)}
    if HEAD in weights:
        head = source.take(HEAD, sizes.V, sizes.D)
        found |= {} if tied else {HEAD: head}
    for number in range(sizes.layers):
        found |= _layer(source, f"model.layers.{number}", sizes)
    source.finish()
    return Converted("MiniMind", _config(sizes, settings, tied, where), found, sizes.assumed)


class _Sizes:
    """Sizes that shapes tell, and those that they do not. D width, F inner width, E experts, S shared ones, K of a head."""

    def __init__(self, weights: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
        first = "model.layers.0"
        self.assumed: dict[str, Any] = {}
        self.V, self.D = weights[EMBEDDING].shape
        self.layers = len({name.split(".")[2] for name in weights if name.startswith("model.layers.")})
        self.query, self.key = (weights[f"{first}.self_attn.{name}.weight"].shape[0] for name in ("q_proj", "k_proj"))
        self.normed = f"{first}.self_attn.q_norm.weight" in weights
        if self.normed:
            self.K = weights[f"{first}.self_attn.q_norm.weight"].shape[0]
            self.heads = self.query // self.K
        else:
            self.heads = max(1, int(told(settings, "num_attention_heads", HEADS, self.assumed)))
            self.K = max(1, self.query // self.heads)
        mlp = f"{first}.mlp"
        self.E, self.S = (
            sum(name.startswith(f"{mlp}.{kind}.") and name.endswith("gate_proj.weight") for name in weights)
            for kind in ("experts", "shared_experts")
        )
        self.F = weights[f"{mlp}.experts.0.gate_proj.weight" if self.E else f"{mlp}.gate_proj.weight"].shape[0]
        kv_heads = self.key // self.K
        self.told_by_shapes = {
            "vocab_size": self.V, "hidden_size": self.D, "num_hidden_layers": self.layers, "num_key_value_heads": kv_heads,
            "num_attention_heads": self.heads,
        }  # fmt: skip
        if self.E:
            experts = "num_experts" if self.normed else "n_routed_experts"
            width = "moe_intermediate_size" if self.normed else "intermediate_size"
            self.told_by_shapes |= {experts: self.E, width: self.F}
        else:
            self.told_by_shapes["intermediate_size"] = self.F


def _layer(source: Source, name: str, sizes: _Sizes) -> dict[str, Tensor]:
    D, F = sizes.D, sizes.F
    found: dict[str, Tensor] = {}
    for part, out, into in (
        ("q_proj", sizes.query, D), ("k_proj", sizes.key, D), ("v_proj", sizes.key, D), ("o_proj", D, sizes.query),
    ):  # fmt: skip
        found |= source.linear(f"{name}.self_attn.{part}", f"{name}.self_attn.{part}", out, into, bias=False)
    norms = {"input_layernorm": D, "post_attention_layernorm": D}
    if sizes.normed:
        norms |= {"self_attn.q_norm": sizes.K, "self_attn.k_norm": sizes.K}
    found |= {f"{name}.{norm}.weight": source.take(f"{name}.{norm}.weight", width) for norm, width in norms.items()}
    if not sizes.E:
        for part, out, into in _shapes(D, F):
            found |= source.linear(f"{name}.mlp.{part}", f"{name}.mlp.{part}", out, into, bias=False)
        return found
    block, router = ("mlp", "gate") if sizes.normed else ("block_sparse_moe", "router")
    found[f"{name}.{block}.{router}.weight"] = source.take(f"{name}.mlp.gate.weight", sizes.E, D)
    gate, up, down = (
        source.stacked((f"{name}.mlp.experts.{expert}.{part}.weight" for expert in range(sizes.E)), out, into)
        for part, out, into in _shapes(D, F)
    )
    found[f"{name}.{block}.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
    found[f"{name}.{block}.experts.down_proj"] = down
    if sizes.S:
        gate, up, down = (
            source.stacked((f"{name}.mlp.shared_experts.{expert}.{part}.weight" for expert in range(sizes.S)), out, into)
            for part, out, into in _shapes(D, F)
        )
        found[f"{name}.shared_mlp.input_linear.weight"] = torch.cat((gate.flatten(0, 1), up.flatten(0, 1)))
        found[f"{name}.shared_mlp.output_linear.weight"] = torch.cat([*down], dim=1)
    return found


def _shapes(D: int, F: int) -> list[tuple[str, int, int]]:
    return [("gate_proj", F, D), ("up_proj", F, D), ("down_proj", D, F)]


def _config(sizes: _Sizes, settings: Mapping[str, Any], tied: bool, where: str) -> PretrainedConfig:
    from transformers import GraniteMoeSharedConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig

    assumed = sizes.assumed
    theta = float(told(settings, "rope_theta", THETA, assumed))
    common: dict[str, Any] = {
        **{name: told(settings, name, value, assumed) for name, value in IDS.items()},
        "vocab_size": sizes.V,
        "hidden_size": sizes.D,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.key // sizes.K,
        "hidden_act": told(settings, "hidden_act", "silu", assumed),
        "max_position_embeddings": told(settings, "max_position_embeddings", MAX_LENGTH, assumed),
        "rms_norm_eps": told(settings, "rms_norm_eps", EPS[sizes.normed], assumed),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": tied,
    }
    kind = Qwen3Config if sizes.normed else LlamaConfig
    if not sizes.E:
        return kind(**common, intermediate_size=sizes.F, head_dim=sizes.K)
    top_k = told(settings, "num_experts_per_tok", TOP_K[sizes.normed], assumed)
    normalised = told(settings, "norm_topk_prob", True, assumed)
    if sizes.normed:
        experts = {"num_experts": sizes.E, "moe_intermediate_size": sizes.F, "norm_topk_prob": normalised}
        if sizes.S:
            raise ArtifactError(f"{where} has norms on queries and keys and shared experts, which MiniMind has not both")
        return Qwen3MoeConfig(
            **common, **experts, num_experts_per_tok=top_k, intermediate_size=sizes.F, head_dim=sizes.K,
        )  # fmt: skip
    if not normalised or top_k == 1:
        raise ArtifactError(
            f"{where} weights experts with probabilities that do not sum to 1 (num_experts_per_tok {top_k}, norm_topk_prob "
            f"{normalised}), which no architecture of transformers does with such layers"
        )
    return GraniteMoeSharedConfig(
        **common, num_local_experts=sizes.E, num_experts_per_tok=top_k, intermediate_size=sizes.F,
        shared_intermediate_size=sizes.S * sizes.F, attention_multiplier=sizes.K**-0.5,
    )  # fmt: skip
