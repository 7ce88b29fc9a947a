"""Converts model settings to the config of a transformers architecture, with checks."""
# Most sizes have the same names in all configs (`attribute_map`); exceptions are listed here. A
# changed setting that the architecture does not have is refused.

import contextlib
import copy
import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any, get_args

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PretrainedConfig

from ttrain.config import Model
from ttrain.config.model import Moe
from ttrain.config.rules import usual_intermediate_size
from ttrain.config.yaml_text import one_line
from ttrain.errors import UsageError
from ttrain.model import kinds

Fields = dict[str, Any]  # of a config of transformers

# Our setting, transformers' name for it, and other names that configs have where `attribute_map`
# does not say so.
NAMES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size",),
    "layers": ("num_hidden_layers", "num_layers"),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "intermediate_size": (
        "intermediate_size",
        "n_inner",
        "ffn_dim",
        "ffn_hidden_size",
        "d_ff",
        "inner_dim",
    ),
    "max_length": (
        "max_position_embeddings",
        "max_seq_len",
        "n_positions",
        "max_sequence_length",
        "context_length",
    ),
    "tie_embeddings": ("tie_word_embeddings",),
    "init_std": ("initializer_range", "init_std"),
    "dropout": ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout"),
}

ROPE = ("rope_theta", "rope_type", "rope_factor")

# Rotary settings of the architecture that we have no setting for.
OWN_ROPE = ("partial_rotary_factor",)

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # those of Llama 3.1 (arXiv:2407.21783)
# A record alone in a row gave other logits than in a packed row, by 0.2 to 0.3 at logits of 0.5.
OFFSET = frozenset(
    {
        "camembert",
        "data2vec-text",
        "roberta",
        "roberta-prelayernorm",
        "trocr",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)

# Come from the tokenizer.
OURS = frozenset({"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"})


# Of an expert's inner width: grouped products want rows of 16 bytes, also in bf16.
SIZE_MULTIPLE = 8
# Field names of the same setting; the first one that a config class has is used.
EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
DENSE = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
# What makes glm4_moe a qwen3 with shared experts.
AS_QWEN3 = {
    "norm_topk_prob": True,
    "use_qk_norm": True,
    "num_mtp_layers": 0,
    "partial_rotary_factor": 1.0,
}


def build_config(config: Model, *, vocab_size: int, ids: Mapping[str, int]) -> PretrainedConfig:
    """The architecture's config. Raises UsageError naming a setting.

    `ids`: bos_token_id, eos_token_id, pad_token_id.
    """
    names = FieldNames(config.kind)
    mixture = Fields()
    if config.moe:
        names, mixture = _mixture(config, config.moe)
    values = {
        **names.decoder(),
        **_sizes(config, names),
        **mixture,
        **_fields(config, names),
        "vocab_size": vocab_size,
        **ids,
    }
    try:
        hf_config = names.make(**values)
        _set_rope(config, hf_config, names)
    except (
        StrictDataclassError,
        ValueError,
        TypeError,
        ArithmeticError,
        KeyError,
        AttributeError,
    ) as error:
        raise UsageError(
            f"model.kind is {names.kind}, whose config refuses these settings: "
            f"{one_line(str(error), most=1000)}"
        ) from None
    return hf_config


class FieldNames:
    """Field names of an architecture's config. Raises UsageError if it is no plain decoder."""

    def __init__(self, kind: str) -> None:
        kinds.check_kind(kind)
        if kind in kinds.OWN_KINDS:
            kinds.register_own()
        self.kind = kind
        self.make: Callable[..., PretrainedConfig] = CONFIG_MAPPING[kind]
        config_class: Any = self.make
        inherited = {field.name for field in dataclasses.fields(PretrainedConfig)}
        self.fields = {
            field.name: field
            for field in dataclasses.fields(config_class)
            if field.name not in inherited
        }
        self.aliases: dict[str, str] = dict(config_class.attribute_map)
        if why := _unsuitable(config_class, kind):
            decoder = f"{kind}_text"
            hint = (
                f"set model.kind={decoder}"
                if decoder in kinds.names()
                else "choose a decoder: llama, qwen3, gpt2, ..."
            )
            raise UsageError(f"model.kind is '{kind}', which {why}; {hint}")

    def of(self, setting: str) -> str | None:
        """The field that holds one of our settings, or None."""
        candidates = (self.aliases.get(name, name) for name in NAMES[setting])
        return next((name for name in candidates if name in self.fields), None)

    def decoder(self) -> Fields:
        """Fields of a decoder to train: causal, with a cache, all its own dropouts 0."""
        fields: Fields = {
            name: True for name in ("is_decoder", "causal", "use_cache") if name in self.fields
        }
        return fields | {
            name: type(field.default)(0)
            for name, field in self.fields.items()
            if "drop" in name
            and isinstance(field.default, int | float)
            and not isinstance(field.default, bool)
        }


def _unsuitable(config_class: Any, kind: str) -> str:
    if config_class.sub_configs:
        return "is made of several models"
    if config_class.is_encoder_decoder:
        return "has an encoder"
    return (
        "counts positions from pad_token_id on, not from 0 in each record" if kind in OFFSET else ""
    )


def _dense_size(config: Model) -> int:
    return config.intermediate_size or usual_intermediate_size(config.hidden_size)


def _sizes(config: Model, names: FieldNames) -> Fields:
    values = {setting: getattr(config, setting) for setting in NAMES}
    values |= {
        "kv_heads": config.kv_heads or config.heads,
        "intermediate_size": _dense_size(config),
    }
    sizes = (
        {"head_dim": config.hidden_size // config.heads} if "head_dim" in names.fields else Fields()
    )
    for setting, value in values.items():
        name = names.of(setting)
        if name is None:
            _refuse_if_set(config, setting, names)
        elif (
            setting == "intermediate_size"
            and config.intermediate_size is None
            and names.fields[name].default is None
        ):
            continue  # the architecture derives it in its own way
        else:
            sizes[name] = value
    return sizes


def _refuse_if_set(config: Model, setting: str, names: FieldNames) -> None:
    value = getattr(config, setting)
    default = Model.model_fields[setting].default
    if value == default or setting == "max_length":  # without such a field any length is allowed
        return
    near = difflib.get_close_matches(
        NAMES.get(setting, (setting,))[0], names.fields, n=2, cutoff=0.5
    )
    hint = f", or set the fields that it has with model.fields ({', '.join(near)})" if near else ""
    raise UsageError(
        f"model.{setting} is {value} but the architecture {names.kind} has no such setting; "
        f"leave it {'empty' if default is None else f'at {default}'}{hint}"
    )


def _fields(config: Model, names: FieldNames) -> Fields:
    reserved = {names.of(setting): f"model.{setting}" for setting in NAMES} | dict.fromkeys(
        OURS, "tokenizer"
    )
    fields = {}
    for field_name, value in config.fields.items():
        name = names.aliases.get(field_name, field_name)
        if name not in names.fields:
            near = difflib.get_close_matches(
                field_name, [*names.fields, *names.aliases], n=3, cutoff=0.5
            )
            hint = (
                f"did you mean {' or '.join(near)}?"
                if near
                else f"there are {', '.join(sorted(names.fields))}"
            )
            raise UsageError(
                f"model.fields.{field_name} is not a field of the config of {names.kind}; {hint}"
            )
        if name in reserved:
            raise UsageError(
                f"model.fields.{field_name} is what {reserved[name]} says; leave it out"
            )
        # transformers completes mappings in place.
        fields[name] = _typed(copy.deepcopy(value), names.fields[name].type)
    return fields


def _typed(value: Any, kind: Any) -> Any:
    types = get_args(kind) or (kind,)
    is_number = isinstance(value, str) or (isinstance(value, int) and int not in types)
    if float not in types or str in types or isinstance(value, bool) or not is_number:
        return value
    with contextlib.suppress(ValueError):
        return float(value)
    return value


def _set_rope(config: Model, hf_config: PretrainedConfig, names: FieldNames) -> None:
    present = getattr(hf_config, "rope_parameters", None) or {}
    if "rope_type" not in present:
        for setting in ROPE:
            _refuse_if_set(config, setting, names)
        return
    if "rope_parameters" in config.fields:
        for setting in ROPE:
            if getattr(config, setting) != Model.model_fields[setting].default:
                raise UsageError(
                    f"model.{setting} is set, and so is model.fields.rope_parameters; leave one out"
                )
        return
    rope = {name: present[name] for name in OWN_ROPE if name in present}
    rope |= {"rope_theta": config.rope_theta, "rope_type": config.rope_type}
    if config.rope_type != "default":
        rope["factor"] = config.rope_factor
    if config.rope_type in ("yarn", "llama3"):
        rope["original_max_position_embeddings"] = int(config.max_length / config.rope_factor)
    if config.rope_type == "llama3":
        rope |= LLAMA3
    hf_config.rope_parameters = rope
    hf_config.validate()


def _mixture(model: Model, moe: Moe) -> tuple[FieldNames, Fields]:
    """(architecture, fields of its config) for `model.kind` with `model.moe`."""
    # The fields override those of `_sizes`. They hold the weights of the balance, too, so that a
    # stage that starts from these weights balances them in the same way.
    if moe.dense_layers >= model.layers:
        raise UsageError(
            f"model.moe.dense_layers is {moe.dense_layers} but model.layers is {model.layers}, "
            f"which leaves no layer with experts; set model.moe.dense_layers={model.layers - 1} "
            "at most"
        )
    kind = model.kind
    added = Fields()
    if kind == "llama":
        kind = (
            "ernie4_5_moe" if moe.shared_experts or moe.bias_rate or moe.dense_layers else "mixtral"
        )
    elif kind == "qwen3" and moe.shared_experts:
        kind = "glm4_moe"
        added = AS_QWEN3
    elif kind == "qwen3":
        if moe.bias_rate:
            raise UsageError(
                f"model.moe.bias_rate is {moe.bias_rate} and model.moe.shared_experts is 0, but "
                "with model.kind=qwen3 no architecture has routers with a bias and no shared "
                "expert; set model.moe.shared_experts=1, or model.kind=llama"
            )
        kind = "qwen3_moe"
        added = {"norm_topk_prob": True}
    names = FieldNames(kind)
    balance = {name: getattr(moe, setting) for name, setting in Moe.IN_CONFIG.items()}
    return names, {**_expert_fields(names, model, moe), **added, **balance}


def _expert_fields(names: FieldNames, model: Model, moe: Moe) -> Fields:
    experts = _name(EXPERTS, names)
    if experts is None:
        raise UsageError(
            f"model.moe is set but model.kind is {names.kind}, which has no experts; set "
            "model.kind=llama or qwen3, or one that has them, such as mixtral, qwen3_moe, olmoe, "
            "deepseek_v3; or leave model.moe empty"
        )
    fields: Fields = {experts: moe.experts}
    for setting, candidates, value in (
        ("top_k", TOP_K, moe.top_k),
        ("shared_experts", SHARED, moe.shared_experts),
    ):
        if name := _name(candidates, names):
            fields[name] = value
        elif value:
            raise UsageError(
                f"model.moe.{setting} is {value} but model.kind {names.kind} has no such size; "
                "leave it out"
            )
    dense = _dense_size(model)
    visited = moe.top_k + moe.shared_experts
    # By default, a token's experts together are as wide as a dense layer
    width = moe.expert_size or -(-dense // (visited * SIZE_MULTIPLE)) * SIZE_MULTIPLE
    fields["intermediate_size"] = width
    if "moe_intermediate_size" in names.fields:
        fields |= {"moe_intermediate_size": width, "intermediate_size": dense}
    # All experts form one group.
    fields |= {name: 1 for name in ("n_group", "topk_group") if name in names.fields}
    if name := _name(DENSE, names):
        fields[name] = moe.dense_layers
    elif "mlp_only_layers" in names.fields:
        fields["mlp_only_layers"] = list(range(moe.dense_layers))
    elif "mlp_layer_types" in names.fields:
        fields["mlp_layer_types"] = ["dense"] * moe.dense_layers + ["sparse"] * (
            model.layers - moe.dense_layers
        )
    elif moe.dense_layers:
        raise UsageError(
            f"model.moe.dense_layers is {moe.dense_layers} but all layers of {names.kind} have "
            "experts; set it to 0"
        )
    return fields


def _name(candidates: tuple[str, ...], names: FieldNames) -> str | None:
    return next((name for name in candidates if name in names.fields), None)
