"""TinySeek's weights (github.com/lybx-leyw/tinyseek-ai, and tinyseek-UT with one layer for all passes) in our names.

Two things are written otherwise and compute the same. Its normalisation divides by the deviation over D - 1, ours over D, so
that the scale takes the root of (D - 1) / D. Its shared experts are summed; ours is one that is as wide as all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ttrain.errors import ArtifactError
from ttrain.model.import_common import Converted, Source, agree, told
from ttrain.model.modeling_tinyseek import TinySeekConfig

EMBEDDING = "tokenEmbedding.tokenEmbedding.weight"
MARKS = frozenset({EMBEDDING, f"model.0.{EMBEDDING}", f"gate_model.{EMBEDDING}"})
SHARED, LAYERS = "synonymous_layer", "layers"
NORM_EPS = 1e-13
SECOND_WEIGHT = 1.0  # of the second head's loss in the sum
# What TinySeek's ConfigManager fills in, and the length and ids of its training scripts and vocabulary.
ROPE_THETA, DROPOUT, ALPHA, PAD, END, MAX_LENGTH = 10_000.0, 0.1, 0.01, 0, 1, 512


def convert(weights: dict[str, Tensor], settings: Mapping[str, Any], where: str) -> Converted:
    """The first head becomes the output head, the second one lies beside. Raises ArtifactError where they do not fit."""
    if EMBEDDING not in weights:
        raise ArtifactError(
            f"{where} holds several TinySeek models with their gate; save one of its experts' state_dict() and import that"
        )
    if adapted := sorted(name for name in weights if "lora" in name.lower() or "prefix" in name.lower()):
        raise ArtifactError(f"{where} holds an adapter ({adapted[0]}, ...); merge it into the weights it was made for first")
    shared = any(name.startswith(f"{SHARED}.") for name in weights)
    for name in ("n_head", "keep", "n_layer") if shared else ("n_head", "keep"):
        if not isinstance(settings.get(name), int):
            raise ArtifactError(
                f"{name} of {where} is not known, and its weights do not tell; put TinySeek's model_config.json beside it, "
                f"or name it with --config"
            )
    sizes = _sizes(weights, SHARED if shared else f"{LAYERS}.0", where)
    agree(settings, sizes, where)
    assumed: dict[str, Any] = {}
    config = TinySeekConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["d_model"],
        latent_size=sizes["d_c"],
        rope_head_dim=sizes["d_r"],
        num_hidden_layers=settings["n_layer"] if shared else sizes["n_layer"],
        num_attention_heads=settings["n_head"],
        moe_intermediate_size=sizes["hidden"],
        num_local_experts=sizes["other_experts"],
        num_experts_per_tok=settings["keep"],
        n_shared_experts=sizes["shared_experts"],
        router_noise=True,
        share_layers=shared,
        rope_parameters={"rope_type": "default", "rope_theta": told(settings, "ro_theta", ROPE_THETA, assumed)},
        dropout=told(settings, "dropout", DROPOUT, assumed),
        router_aux_loss_coef=told(settings, "alpha", ALPHA, assumed),
        layer_norm_eps=NORM_EPS,
        max_position_embeddings=told(settings, "max_len", MAX_LENGTH, assumed),
        pad_token_id=told(settings, "pad_idx", PAD, assumed),
        eos_token_id=told(settings, "eos_token_id", END, assumed),
        tie_word_embeddings=False,
    )
    if not shared:
        config.multi_token_loss_weight = SECOND_WEIGHT
    source = Source(weights, where)
    V, D = sizes["vocab_size"], sizes["d_model"]
    found = {"model.embed_tokens.weight": source.take(EMBEDDING, V, D)}
    for number in range(1 if shared else config.num_hidden_layers):
        found |= _layer(source, SHARED if shared else f"{LAYERS}.{number}", f"model.layers.{number}", config)
    head = source.linear("fc" if shared else "fc1", "lm_head", V, D, bias=True)
    second = {} if shared else source.linear("fc2", "second", V, D, bias=True)
    source.finish()
    kept = {name.removeprefix("second."): tensor for name, tensor in second.items()}
    return Converted("TinySeek", config, found | head, assumed, kept)


def _sizes(weights: Mapping[str, Tensor], layer: str, where: str) -> dict[str, int]:
    """Sizes by TinySeek's names, from the shapes of the first layer."""
    try:
        V, D = weights[EMBEDDING].shape
        F, _ = weights[f"{layer}.moe_ffn.experts.0.fc1.weight"].shape
        shared = f"{layer}.moe_ffn.shared_experts."
        found = {
            "vocab_size": V,
            "d_model": D,
            "d_c": weights[f"{layer}.mla.w_dkv.weight"].shape[0],
            "d_r": weights[f"{layer}.mla.w_kr.weight"].shape[0],
            "hidden": F,
            "other_experts": weights[f"{layer}.moe_ffn.w_g"].shape[1],
            "shared_experts": sum(name.startswith(shared) and name.endswith(".fc1.weight") for name in weights),
        }
    except (KeyError, ValueError, IndexError) as error:
        raise ArtifactError(f"{where} has TinySeek's embedding, but {error} is missing or mis-shaped") from None
    if not layer.startswith(SHARED):
        found["n_layer"] = len({name.split(".")[1] for name in weights if name.startswith(f"{LAYERS}.")})
    return found


def _layer(source: Source, name: str, to: str, config: TinySeekConfig) -> dict[str, Tensor]:
    D, C, R = config.hidden_size, config.latent_size or 0, config.rope_head_dim
    E, F, S = config.num_local_experts, config.moe_intermediate_size, config.n_shared_experts
    shapes = {
        "w_dq": ("q_a_proj", C, D), "w_uq": ("q_b_proj", D, C), "w_qr": ("q_rope_proj", R, C),
        "w_dkv": ("kv_a_proj", C, D), "w_uk": ("k_b_proj", D, C), "w_uv": ("v_b_proj", D, C),
        "w_kr": ("k_rope_proj", R, D), "w_o": ("o_proj", D, D),
    }  # fmt: skip
    found: dict[str, Tensor] = {}
    for theirs, (ours, out, into) in shapes.items():
        found |= source.linear(f"{name}.mla.{theirs}", f"{to}.self_attn.{ours}", out, into, bias=True)
    for theirs, ours in (("norm1", "post_attention_layernorm"), ("norm2", "post_mlp_layernorm")):
        found[f"{to}.{ours}.weight"] = source.take(f"{name}.{theirs}.gamma", D) * math.sqrt((D - 1) / D)
        found[f"{to}.{ours}.bias"] = source.take(f"{name}.{theirs}.beta", D)
    moe = f"{name}.moe_ffn"
    found[f"{to}.mlp.gate.weight"] = source.take(f"{moe}.w_g", D, E).T.contiguous()
    found[f"{to}.mlp.gate.noise_weight"] = source.take(f"{moe}.w_n", D, E).T.contiguous()
    for theirs, ours, out, into in (("fc1", "up_proj", F, D), ("fc2", "down_proj", D, F)):
        experts = [f"{moe}.experts.{expert}.{theirs}" for expert in range(E)]
        found[f"{to}.mlp.experts.{ours}"] = source.stacked((f"{each}.weight" for each in experts), out, into)
        found[f"{to}.mlp.experts.{ours}_bias"] = source.stacked((f"{each}.bias" for each in experts), out)
    if S:
        shared = [f"{moe}.shared_experts.{expert}" for expert in range(S)]
        wide = f"{to}.mlp.shared_experts"
        found[f"{wide}.up_proj.weight"] = source.stacked((f"{each}.fc1.weight" for each in shared), F, D).flatten(0, 1)
        found[f"{wide}.up_proj.bias"] = source.stacked((f"{each}.fc1.bias" for each in shared), F).flatten()
        down = [source.take(f"{each}.fc2.weight", D, F) for each in shared]
        found[f"{wide}.down_proj.weight"] = torch.cat(down, dim=1)
        found[f"{wide}.down_proj.bias"] = source.stacked((f"{each}.fc2.bias" for each in shared), D).sum(0)
    return found
