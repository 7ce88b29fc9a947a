"""Settings of a model to the config of an architecture that transformers has, every name and type checked.

transformers names most sizes alike in all its configs (`attribute_map`); what it names otherwise is listed here. A setting
that somebody changed and that the architecture does not have is refused, never ignored.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, get_args

from ttrain.config import Model
from ttrain.errors import UsageError
from ttrain.model import own_architectures, registry

if TYPE_CHECKING:
    from transformers import PretrainedConfig

INTERMEDIATE_MULTIPLE = 32
# Our setting, transformers' name for it, and other names that configs have where `attribute_map` does not say so.
NAMES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size",),
    "layers": ("num_hidden_layers", "num_layers"),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "inner_dim"),
    "max_length": ("max_position_embeddings", "max_seq_len", "n_positions", "max_sequence_length", "context_length"),
    "tie_embeddings": ("tie_word_embeddings",),
    "init_std": ("initializer_range", "init_std"),
    "dropout": ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout"),
}
ROPE = ("rope_theta", "rope_type", "rope_factor")
OWN_ROPE = ("partial_rotary_factor",)  # what the architecture says of rotary positions, and no setting of ours
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # those of Llama 3.1 (arXiv:2407.21783)
# Alone in a row they gave other logits than in a packed one, by 0.2 to 0.3 at logits of 0.5.
OFFSET = frozenset(
    {"camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "trocr", "xlm-roberta", "xlm-roberta-xl", "xmod"}
)
OURS = frozenset({"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"})  # come from the tokenizer


def build_config(config: Model, *, vocab_size: int, ids: Mapping[str, int]) -> PretrainedConfig:
    """The architecture's config. `ids`: bos_token_id, eos_token_id, pad_token_id. Raises UsageError that names a setting."""
    from huggingface_hub.errors import StrictDataclassError

    names, more = Names(config.kind), dict[str, Any]()
    if config.moe is not None:
        from ttrain.model import moe

        kind, more = moe.config(config, _standard(config))
        names = Names(kind)
    values = {**_sizes(config, names), **more, **_fields(config, names), "vocab_size": vocab_size, **ids}
    values = {**names.decoder(), **values}
    try:
        found = names.make(**values)
        _set_rope(config, found, names)
    except (StrictDataclassError, ValueError, TypeError, ArithmeticError, KeyError, AttributeError) as error:
        raise UsageError(f"model.kind is {names.kind}, whose config refuses these settings: {_one_line(error)}") from None
    return found


def suitable_kinds() -> list[str]:
    """Every `model.kind` that is a decoder of text alone. Their configs are imported, which takes a second."""
    from transformers import CONFIG_MAPPING

    own_architectures.register()
    return sorted(kind for kind in registry.names() if not _unsuitable(CONFIG_MAPPING[kind], kind))


class Names:
    """What an architecture's config calls the settings. Raises UsageError for a kind that is none, or no plain decoder."""

    def __init__(self, kind: str) -> None:
        from transformers import CONFIG_MAPPING

        registry.check(kind)
        if kind in own_architectures.KINDS:
            own_architectures.register()
        self.kind = kind
        self.make: Callable[..., PretrainedConfig] = CONFIG_MAPPING[kind]
        own: Any = self.make
        inherited = {field.name for field in dataclasses.fields(own.__mro__[_base(own)])}
        self.fields = {field.name: field for field in dataclasses.fields(own) if field.name not in inherited}
        self.aliases: dict[str, str] = dict(own.attribute_map)
        why = _unsuitable(own, kind)
        if why:
            decoder = f"{kind}_text"
            hint = (
                f"set model.kind={decoder}" if decoder in registry.names() else "choose a decoder: llama, qwen3, gpt2, ..."
            )
            raise UsageError(f"model.kind is '{kind}', which {why}; {hint}")

    def of(self, setting: str) -> str | None:
        """The field that holds one of our settings; None where there is none."""
        candidates = (self.aliases.get(name, name) for name in NAMES[setting])
        return next((name for name in candidates if name in self.fields), None)

    def decoder(self) -> dict[str, Any]:
        """What makes a decoder that trains as the settings say: causal, with a cache, without any dropout of its own."""
        fixed = {"is_decoder": True, "causal": True, "use_cache": True}
        found: dict[str, Any] = {name: value for name, value in fixed.items() if name in self.fields}
        for name, field in self.fields.items():
            if "drop" in name and isinstance(field.default, int | float) and not isinstance(field.default, bool):
                found[name] = type(field.default)(0)
        return found


def _unsuitable(own: Any, kind: str) -> str:
    """Why an architecture with a causal head is none to train here; "" where it is."""
    if own.sub_configs:
        return "is made of several models"
    if own.is_encoder_decoder:
        return "has an encoder"
    return "counts positions from pad_token_id on, not from 0 in each record" if kind in OFFSET else ""


def _base(own: Any) -> int:
    return next(n for n, kind in enumerate(own.__mro__) if kind.__module__ == "transformers.configuration_utils")


def _standard(config: Model) -> dict[str, Any]:
    """The sizes under the names that transformers gives them in most configs."""
    kv_heads = config.kv_heads or config.heads
    return {
        **{names[0]: getattr(config, setting) for setting, names in NAMES.items()},
        "num_key_value_heads": kv_heads,
        "intermediate_size": config.intermediate_size or _round_up(config.hidden_size * 8 // 3, INTERMEDIATE_MULTIPLE),
        "head_dim": config.hidden_size // config.heads,
    }


def _sizes(config: Model, names: Names) -> dict[str, Any]:
    """The sizes under the architecture's own names."""
    standard, found = _standard(config), dict[str, Any]()
    for setting in NAMES:
        name = names.of(setting)
        if name is None:
            _refuse_if_set(config, setting, names)
        elif setting == "intermediate_size" and config.intermediate_size is None and names.fields[name].default is None:
            continue  # the architecture derives it in its own way
        else:
            found[name] = standard[NAMES[setting][0]]
    if "head_dim" in names.fields:
        found["head_dim"] = standard["head_dim"]
    return found


def _refuse_if_set(config: Model, setting: str, names: Names) -> None:
    value, default = getattr(config, setting), Model.model_fields[setting].default
    if value == default or setting == "max_length":  # without such a field any length does
        return
    near = difflib.get_close_matches(NAMES.get(setting, (setting,))[0], names.fields, n=2, cutoff=0.5)
    hint = f", or say with model.fields what it has ({', '.join(near)})" if near else ""
    raise UsageError(
        f"model.{setting} is {value} but the architecture {names.kind} has no such setting; "
        f"leave it {'empty' if default is None else f'at {default}'}{hint}"
    )


def _fields(config: Model, names: Names) -> dict[str, Any]:
    """`model.fields`, checked against the config's own fields."""
    taken = {names.of(setting): f"model.{setting}" for setting in NAMES} | dict.fromkeys(OURS, "tokenizer")
    found = {}
    for given, value in config.fields.items():
        name = names.aliases.get(given, given)
        if name not in names.fields:
            near = difflib.get_close_matches(given, [*names.fields, *names.aliases], n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(names.fields))}"
            raise UsageError(f"model.fields.{given} is no field of the config of {names.kind}; {hint}")
        if name in taken:
            raise UsageError(f"model.fields.{given} is what {taken[name]} says; leave it out")
        found[name] = _typed(copy.deepcopy(value), names.fields[name].type)  # transformers completes mappings in place
    return found


def _typed(value: Any, kind: Any) -> Any:
    """A number as the field wants it: 1 for a float, and 1e-6, which YAML reads as a word."""
    wanted = get_args(kind) or (kind,)
    if float not in wanted or isinstance(value, bool) or str in wanted:
        return value
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return float(value) if isinstance(value, int) and int not in wanted else value


def _set_rope(config: Model, found: PretrainedConfig, names: Names) -> None:
    """Put base, type and factor of the rotary positions beside what the architecture says of them (arXiv:2104.09864)."""
    present = getattr(found, "rope_parameters", None)
    if not isinstance(present, dict) or "rope_type" not in present:
        for setting in ROPE:
            _refuse_if_set(config, setting, names)
        return
    if "rope_parameters" in config.fields:
        for setting in ROPE:
            if getattr(config, setting) != Model.model_fields[setting].default:
                raise UsageError(f"model.{setting} is set, and so is model.fields.rope_parameters; leave one out")
        return
    rope = {name: present[name] for name in OWN_ROPE if name in present}
    rope |= {"rope_theta": config.rope_theta, "rope_type": config.rope_type}
    if config.rope_type != "default":
        rope["factor"] = config.rope_factor
    if config.rope_type in ("yarn", "llama3"):
        rope["original_max_position_embeddings"] = int(config.max_length / config.rope_factor)
    if config.rope_type == "llama3":
        rope |= LLAMA3
    found.rope_parameters = rope
    found.validate()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
