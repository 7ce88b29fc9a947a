"""Mixtures of experts: which architecture of transformers `model.moe` turns a dense one into, and its own names for it.

    kind     without shared experts and bias    else
    llama    mixtral                            ernie4_5_moe    softmax router, its bias added to the probabilities
    qwen3    qwen3_moe                          glm4_moe        sigmoid router with the bias of DeepSeek-V3

All of them normalise the weights of the chosen experts. Any other kind must have experts of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ttrain.config import Model
from ttrain.config.model import Moe
from ttrain.errors import UsageError

SIZE_MULTIPLE = 8  # of an expert's inner width: grouped products want rows of 16 bytes, also in bf16
# What architectures call the same thing; the first name that a config class has is the one it reads.
EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
DENSE = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")


def config(model: Model, common: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(model_type, fields of its config) that `model.kind` with `model.moe` stands for; `model.moe` must be set.

    `common`: the sizes by transformers' names, of which `intermediate_size` is that of a dense layer. The fields returned go
    over those that these sizes give. They hold the weights of the balance as well, by the names in `Moe.IN_CONFIG`, so that
    a stage which starts from these weights balances them in the same way.
    Raises UsageError where no architecture has what is asked for.
    """
    moe = model.moe
    assert moe is not None, "model.moe is not set"
    dense: int = common["intermediate_size"]
    if moe.dense_layers >= model.layers:
        raise UsageError(
            f"model.moe.dense_layers is {moe.dense_layers} but model.layers is {model.layers}, which leaves no layer with "
            f"experts; set model.moe.dense_layers={model.layers - 1} at most"
        )
    balance = {name: getattr(moe, setting) for name, setting in Moe.IN_CONFIG.items()}
    if model.kind == "llama":
        kind, fields = _llama(moe, dense)
    elif model.kind == "qwen3":
        kind, fields = _qwen3(moe, dense)
    else:
        kind, fields = model.kind, _own(model, moe, dense)
    return kind, {**fields, **balance}


def expert_size(moe: Moe, dense: int) -> int:
    """Inner width of an expert; unless set, so that those which a token visits are together as wide as a dense layer."""
    visited = moe.top_k + moe.shared_experts
    return moe.expert_size or -(-dense // (visited * SIZE_MULTIPLE)) * SIZE_MULTIPLE


def _llama(moe: Moe, dense: int) -> tuple[str, dict[str, Any]]:
    if not (moe.shared_experts or moe.bias_rate or moe.dense_layers):
        sizes = {
            "num_local_experts": moe.experts,
            "num_experts_per_tok": moe.top_k,
            "intermediate_size": expert_size(moe, dense),
        }
        return "mixtral", sizes
    return "ernie4_5_moe", {
        "moe_num_experts": moe.experts,
        "moe_k": moe.top_k,
        "moe_num_shared_experts": moe.shared_experts,
        "moe_intermediate_size": expert_size(moe, dense),
        "moe_layer_start_index": moe.dense_layers,
        "intermediate_size": dense,
    }


def _qwen3(moe: Moe, dense: int) -> tuple[str, dict[str, Any]]:
    if not (moe.shared_experts or moe.bias_rate):
        return "qwen3_moe", {
            "num_experts": moe.experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": expert_size(moe, dense),
            "intermediate_size": dense,
            "mlp_only_layers": list(range(moe.dense_layers)),
            "norm_topk_prob": True,
        }
    if not moe.shared_experts:
        raise UsageError(
            f"model.moe.bias_rate is {moe.bias_rate} and model.moe.shared_experts is 0, but with model.kind=qwen3 no "
            f"architecture has routers with a bias and no shared expert; set model.moe.shared_experts=1, or model.kind=llama"
        )
    return "glm4_moe", {
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "n_shared_experts": moe.shared_experts,
        "moe_intermediate_size": expert_size(moe, dense),
        "first_k_dense_replace": moe.dense_layers,
        "intermediate_size": dense,
        "norm_topk_prob": True,
        "use_qk_norm": True,
        "num_mtp_layers": 0,
        "partial_rotary_factor": 1.0,
    }


def _own(model: Model, moe: Moe, dense: int) -> dict[str, Any]:
    """The settings by the names of an architecture that has experts itself. Raises UsageError where it has none."""
    from transformers import AutoConfig

    own = AutoConfig.for_model(model.kind).to_dict()
    experts = _name(EXPERTS, own)
    if experts is None:
        raise UsageError(
            f"model.moe is set but model.kind is {model.kind}, which has no experts; set model.kind=llama or qwen3, or one "
            f"that has them, such as mixtral, qwen3_moe, olmoe, deepseek_v3; or leave model.moe empty"
        )
    fields: dict[str, Any] = {experts: moe.experts}
    for setting, names, value in (("top_k", TOP_K, moe.top_k), ("shared_experts", SHARED, moe.shared_experts)):
        name = _name(names, own)
        if name is not None:
            fields[name] = value
        elif value or setting == "top_k":
            raise UsageError(f"model.moe.{setting} is {value} but model.kind {model.kind} has no such size; leave it out")
    if "moe_intermediate_size" in own:
        fields |= {"moe_intermediate_size": expert_size(moe, dense), "intermediate_size": dense}
    else:
        fields["intermediate_size"] = expert_size(moe, dense)
    one_group = {name: 1 for name in ("n_group", "topk_group") if name in own}  # of experts, from which all are chosen
    return {**fields, **one_group, **_dense_layers(model, moe, own)}


def _dense_layers(model: Model, moe: Moe, own: dict[str, Any]) -> dict[str, Any]:
    name = _name(DENSE, own)
    if name is not None:
        return {name: moe.dense_layers}
    if "mlp_only_layers" in own:
        return {"mlp_only_layers": list(range(moe.dense_layers))}
    if "mlp_layer_types" in own:
        return {"mlp_layer_types": ["dense"] * moe.dense_layers + ["sparse"] * (model.layers - moe.dense_layers)}
    if moe.dense_layers:
        raise UsageError(
            f"model.moe.dense_layers is {moe.dense_layers} but all layers of {model.kind} have experts; set it to 0"
        )
    return {}


def _name(candidates: tuple[str, ...], own: dict[str, Any]) -> str | None:
    return next((name for name in candidates if name in own), None)
