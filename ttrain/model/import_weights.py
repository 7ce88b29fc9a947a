"""Importers of foreign state dicts. MiniMind (github.com/jingyaogong/minimind) becomes an equivalent architecture of
transformers, TinySeek the architecture `tinyseek`.

    MiniMind                                   architecture
    2025, without norms on queries and keys    llama, with experts granitemoeshared
    2026, with them                            qwen3, with experts qwen3_moe

MiniMind's state dicts come without a config. What shapes do not show is taken from a `config.json`, else from the defaults
of its code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ttrain.core.files import parse_json
from ttrain.errors import ArtifactError
from ttrain.model.modeling_tinyseek import TinySeekConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Weights = dict[str, Tensor]
Settings = Mapping[str, Any]  # of the config beside foreign weights


@dataclass(frozen=True)
class ConvertedModel:
    """A model in transformers' names.

    assumed       values found neither in the weights nor in a config beside them
    second_head   the head that predicts the token after the next one, never among the weights
    """

    layout: str
    config: PretrainedConfig
    weights: Weights
    assumed: dict[str, Any]
    second_head: Weights = field(default_factory=dict)


class StateDictReader:
    """The tensors of a state dict, each taken once, so that left-over ones are reported."""

    def __init__(self, weights: Weights, origin: str) -> None:
        self._remaining, self._origin = dict(weights), origin
        self._missing, self._wrong = list[str](), list[str]()

    def take(self, name: str, *shape: int) -> Tensor:
        """Take a tensor in fp32; zeros, and an entry for `finish`, if it is missing, has another shape, or is not a weight:
        an integer type, as quantized ones are, or a non-finite value."""
        tensor = self._remaining.pop(name, None)
        if tensor is None:
            self._missing.append(f"missing: {name} {[*shape]}")
        elif tensor.shape != shape:
            self._wrong.append(f"mis-shaped: {name} is {[*tensor.shape]} but must be {[*shape]}")
        elif not tensor.is_floating_point():
            self._wrong.append(f"no weights: {name} holds {str(tensor.dtype).removeprefix('torch.')}")
        elif not torch.isfinite(tensor).all():
            self._wrong.append(f"no weights: {name} holds numbers that are not finite")
        else:
            return tensor.to(torch.float32)
        return torch.zeros(shape)

    def linear(self, name: str, to: str, out: int, into: int) -> Weights:
        """Take a linear layer's weight and bias under another name."""
        return {f"{to}.weight": self.take(f"{name}.weight", out, into), f"{to}.bias": self.take(f"{name}.bias", out)}

    def stacked(self, names: Iterable[str], *shape: int) -> Tensor:
        """Take tensors of one shape, stacked in a new first dimension."""
        return torch.stack([self.take(name, *shape) for name in names])

    def finish(self) -> None:
        """Raise ArtifactError, with every name and shape, unless exactly the taken tensors existed."""
        unexpected = [f"unexpected: {name} {[*tensor.shape]}" for name, tensor in sorted(self._remaining.items())]
        if problems := [*self._missing, *self._wrong, *unexpected]:
            raise ArtifactError(f"the weights in {self._origin} do not fit their layout:\n  " + "\n  ".join(problems))


class SettingsOrDefaults:
    """Settings of a config; the defaults of those that it lacks are recorded in `assumed`."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self.assumed = settings, dict[str, Any]()

    def get(self, name: str, default: Any) -> Any:
        """A setting, else the default."""
        if self._settings.get(name) is not None:
            return self._settings[name]
        self.assumed[name] = default
        return default


def check_sizes(settings: Settings, shapes: Mapping[str, int], origin: str) -> None:
    """Raise ArtifactError if a size in the config differs from that of the weights."""
    wrong = [
        f"{name} is {settings[name]!r}, but the weights have {size}"
        for name, size in shapes.items() if settings.get(name) is not None and settings[name] != size
    ]  # fmt: skip
    if wrong:
        raise ArtifactError(f"the config of {origin} does not fit its weights: {'; '.join(wrong)}; give the right --config")


MINIMIND_EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"

OLD_MARK = "tok_embeddings.weight"  # of 2024

MINIMIND_KEYS = frozenset({MINIMIND_EMBEDDING, OLD_MARK})

RECOMPUTED = ("model.freqs_cos", "model.freqs_sin")  # tables of the rotary positions, in some files

# Defaults of its code; the ids are those of its tokenizer.
HEADS, THETA, MINIMIND_LENGTH, TOP_K = 8, 1e6, 32_768, {False: 2, True: 1}

EPS = {False: 1e-5, True: 1e-6}  # without and with norms on queries and keys

IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def convert_minimind(weights: Weights, settings: Settings, origin: str) -> ConvertedModel:
    """Convert MiniMind's weights. Raises ArtifactError if they do not fit, or transformers has no equivalent."""
    if OLD_MARK in weights:
        raise ArtifactError(f"{origin} has MiniMind's layout of 2024 (wq, wk, ...), which is not supported")
    for name in RECOMPUTED:
        weights.pop(name, None)
    if settings.get("inference_rope_scaling"):
        raise ArtifactError(
            f"the config of {origin} sets inference_rope_scaling, whose frequencies transformers computes differently; set "
            f"it to false: positions up to 2048 need none"
        )
    try:
        lookup = SettingsOrDefaults(settings)
        sizes = _Sizes(weights, lookup)
    except (KeyError, ValueError, IndexError) as error:
        raise ArtifactError(f"{origin} has MiniMind's embedding, but {error} is missing or mis-shaped") from None
    if sizes.K * sizes.heads != sizes.query or sizes.key % sizes.K:
        raise ArtifactError(
            f"{origin} has {sizes.query} rows of queries and {sizes.key} of keys, which {sizes.heads} heads do not divide; "
            f"set num_attention_heads in a --config"
        )
    check_sizes(settings, sizes.from_shapes, origin)
    tied = HEAD not in weights or torch.equal(weights[HEAD], weights[MINIMIND_EMBEDDING])
    source = StateDictReader(weights, origin)
    tensors = {MINIMIND_EMBEDDING: source.take(MINIMIND_EMBEDDING, sizes.V, sizes.D), NORM: source.take(NORM, sizes.D)}
    if HEAD in weights:
        head = source.take(HEAD, sizes.V, sizes.D)
        tensors |= {} if tied else {HEAD: head}
    for number in range(sizes.layers):
        tensors |= _minimind_layer(source, f"model.layers.{number}", sizes)
    source.finish()
    return ConvertedModel("MiniMind", _config(sizes, lookup, tied, origin), tensors, lookup.assumed)


class _Sizes:
    """Sizes of the model, from shapes or else settings. D width, F inner width, E experts, S shared ones, K of a head."""

    def __init__(self, weights: Weights, lookup: SettingsOrDefaults) -> None:
        first = "model.layers.0"
        self.V, self.D = weights[MINIMIND_EMBEDDING].shape
        self.layers = len({name.split(".")[2] for name in weights if name.startswith("model.layers.")})
        self.query, self.key = (weights[f"{first}.self_attn.{name}.weight"].shape[0] for name in ("q_proj", "k_proj"))
        self.normed = f"{first}.self_attn.q_norm.weight" in weights
        if self.normed:
            self.K = weights[f"{first}.self_attn.q_norm.weight"].shape[0]
            self.heads = self.query // self.K
        else:
            self.heads = max(1, int(lookup.get("num_attention_heads", HEADS)))
            self.K = max(1, self.query // self.heads)
        mlp = f"{first}.mlp"
        self.E, self.S = (
            sum(name.startswith(f"{mlp}.{kind}.") and name.endswith("gate_proj.weight") for name in weights)
            for kind in ("experts", "shared_experts")
        )
        self.F = weights[f"{mlp}.experts.0.gate_proj.weight" if self.E else f"{mlp}.gate_proj.weight"].shape[0]
        kv_heads = self.key // self.K
        self.from_shapes = {
            "vocab_size": self.V, "hidden_size": self.D, "num_hidden_layers": self.layers, "num_key_value_heads": kv_heads,
            "num_attention_heads": self.heads,
        }  # fmt: skip
        if self.E:
            experts = "num_experts" if self.normed else "n_routed_experts"
            width = "moe_intermediate_size" if self.normed else "intermediate_size"
            self.from_shapes |= {experts: self.E, width: self.F}
        else:
            self.from_shapes["intermediate_size"] = self.F


def _minimind_layer(source: StateDictReader, name: str, sizes: _Sizes) -> Weights:
    D, F = sizes.D, sizes.F
    mlp = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (sizes.query, D), "self_attn.k_proj": (sizes.key, D), "self_attn.v_proj": (sizes.key, D),
        "self_attn.o_proj": (D, sizes.query), "input_layernorm": (D,), "post_attention_layernorm": (D,),
    }  # fmt: skip
    if sizes.normed:
        shapes |= {"self_attn.q_norm": (sizes.K,), "self_attn.k_norm": (sizes.K,)}
    if not sizes.E:
        shapes |= {f"mlp.{projection}": shape for projection, shape in mlp.items()}
    tensors = {f"{name}.{part}.weight": source.take(f"{name}.{part}.weight", *shape) for part, shape in shapes.items()}
    if not sizes.E:
        return tensors

    def stacked(kind: str, count: int) -> list[Tensor]:
        experts = [f"{name}.mlp.{kind}.{expert}" for expert in range(count)]
        return [source.stacked((f"{each}.{projection}.weight" for each in experts), *mlp[projection]) for projection in mlp]

    block, router = ("mlp", "gate") if sizes.normed else ("block_sparse_moe", "router")
    tensors[f"{name}.{block}.{router}.weight"] = source.take(f"{name}.mlp.gate.weight", sizes.E, D)
    gate, up, down = stacked("experts", sizes.E)
    tensors[f"{name}.{block}.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
    tensors[f"{name}.{block}.experts.down_proj"] = down
    if sizes.S:
        gate, up, down = stacked("shared_experts", sizes.S)
        tensors[f"{name}.shared_mlp.input_linear.weight"] = torch.cat((gate.flatten(0, 1), up.flatten(0, 1)))
        tensors[f"{name}.shared_mlp.output_linear.weight"] = torch.cat([*down], dim=1)
    return tensors


def _config(sizes: _Sizes, lookup: SettingsOrDefaults, tied: bool, origin: str) -> PretrainedConfig:
    from transformers import GraniteMoeSharedConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig

    theta = float(lookup.get("rope_theta", THETA))
    common: dict[str, Any] = {
        **{name: lookup.get(name, value) for name, value in IDS.items()},
        "vocab_size": sizes.V,
        "hidden_size": sizes.D,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.key // sizes.K,
        "hidden_act": lookup.get("hidden_act", "silu"),
        "max_position_embeddings": lookup.get("max_position_embeddings", MINIMIND_LENGTH),
        "rms_norm_eps": lookup.get("rms_norm_eps", EPS[sizes.normed]),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": tied,
    }
    kind = Qwen3Config if sizes.normed else LlamaConfig
    if not sizes.E:
        return kind(**common, intermediate_size=sizes.F, head_dim=sizes.K)
    top_k = lookup.get("num_experts_per_tok", TOP_K[sizes.normed])
    normalised = lookup.get("norm_topk_prob", True)
    if sizes.normed:
        experts = {"num_experts": sizes.E, "moe_intermediate_size": sizes.F, "norm_topk_prob": normalised}
        if sizes.S:
            raise ArtifactError(f"{origin} has both norms on queries and keys and shared experts, which MiniMind never has")
        return Qwen3MoeConfig(
            **common, **experts, num_experts_per_tok=top_k, intermediate_size=sizes.F, head_dim=sizes.K,
        )  # fmt: skip
    if not normalised or top_k == 1:
        raise ArtifactError(
            f"{origin} weights experts with probabilities that do not sum to 1 (num_experts_per_tok {top_k}, norm_topk_prob "
            f"{normalised}), which no architecture of transformers does with such layers"
        )
    return GraniteMoeSharedConfig(
        **common, num_local_experts=sizes.E, num_experts_per_tok=top_k, intermediate_size=sizes.F,
        shared_intermediate_size=sizes.S * sizes.F, attention_multiplier=sizes.K**-0.5,
    )  # fmt: skip


TINYSEEK_EMBEDDING = "tokenEmbedding.tokenEmbedding.weight"

TINYSEEK_KEYS = frozenset({TINYSEEK_EMBEDDING, f"model.0.{TINYSEEK_EMBEDDING}", f"gate_model.{TINYSEEK_EMBEDDING}"})

SHARED, LAYERS = "synonymous_layer", "layers"

NORM_EPS = 1e-13

SECOND_WEIGHT = 1.0  # of the second head's loss in the sum
# What TinySeek's ConfigManager fills in, and the length and ids of its training scripts and vocabulary.
ROPE_THETA, DROPOUT, ALPHA, TINYSEEK_PAD, TINYSEEK_END, TINYSEEK_LENGTH = 10_000.0, 0.1, 0.01, 0, 1, 512


def convert_tinyseek(weights: Weights, settings: Settings, origin: str) -> ConvertedModel:
    """Convert TinySeek's weights; its second head goes to a separate file. Raises ArtifactError if they do not fit."""
    if TINYSEEK_EMBEDDING not in weights:
        raise ArtifactError(
            f"{origin} holds several TinySeek models with their gate; save one of its experts' state_dict() and import that"
        )
    if adapted := sorted(name for name in weights if "lora" in name.lower() or "prefix" in name.lower()):
        raise ArtifactError(
            f"{origin} holds an adapter ({adapted[0]}, ...); merge it into the weights it was made for first"
        )
    shared = any(name.startswith(f"{SHARED}.") for name in weights)
    for name in ("n_head", "keep", "n_layer") if shared else ("n_head", "keep"):
        if not isinstance(settings.get(name), int):
            raise ArtifactError(
                f"{name} of {origin} is unknown, and its weights do not show it; put TinySeek's model_config.json beside "
                f"it, or name it with --config"
            )
    sizes = _sizes(weights, SHARED if shared else f"{LAYERS}.0", origin)
    check_sizes(settings, sizes, origin)
    lookup = SettingsOrDefaults(settings)
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
        rope_parameters={
            "rope_type": "default",
            "rope_theta": lookup.get("ro_theta", ROPE_THETA),
        },
        dropout=lookup.get("dropout", DROPOUT),
        router_aux_loss_coef=lookup.get("alpha", ALPHA),
        layer_norm_eps=NORM_EPS,
        max_position_embeddings=lookup.get("max_len", TINYSEEK_LENGTH),
        pad_token_id=lookup.get("pad_idx", TINYSEEK_PAD),
        eos_token_id=lookup.get("eos_token_id", TINYSEEK_END),
        tie_word_embeddings=False,
    )
    if not shared:
        config.multi_token_loss_weight = SECOND_WEIGHT
    source = StateDictReader(weights, origin)
    V, D = sizes["vocab_size"], sizes["d_model"]
    tensors = {"model.embed_tokens.weight": source.take(TINYSEEK_EMBEDDING, V, D)}
    for number in range(1 if shared else config.num_hidden_layers):
        tensors |= _tinyseek_layer(source, SHARED if shared else f"{LAYERS}.{number}", f"model.layers.{number}", config)
    head = source.linear("fc" if shared else "fc1", "lm_head", V, D)
    second = {} if shared else source.linear("fc2", "second", V, D)
    source.finish()
    second_head = {name.removeprefix("second."): tensor for name, tensor in second.items()}
    return ConvertedModel("TinySeek", config, tensors | head, lookup.assumed, second_head)


def _sizes(weights: Weights, layer: str, origin: str) -> dict[str, int]:
    """Sizes by TinySeek's names, from the shapes of the first layer."""
    try:
        V, D = weights[TINYSEEK_EMBEDDING].shape
        F, _ = weights[f"{layer}.moe_ffn.experts.0.fc1.weight"].shape
        shared = f"{layer}.moe_ffn.shared_experts."
        sizes = {
            "vocab_size": V,
            "d_model": D,
            "d_c": weights[f"{layer}.mla.w_dkv.weight"].shape[0],
            "d_r": weights[f"{layer}.mla.w_kr.weight"].shape[0],
            "hidden": F,
            "other_experts": weights[f"{layer}.moe_ffn.w_g"].shape[1],
            "shared_experts": sum(name.startswith(shared) and name.endswith(".fc1.weight") for name in weights),
        }
    except (KeyError, ValueError, IndexError) as error:
        raise ArtifactError(f"{origin} has TinySeek's embedding, but {error} is missing or mis-shaped") from None
    if not layer.startswith(SHARED):
        sizes["n_layer"] = len({name.split(".")[1] for name in weights if name.startswith(f"{LAYERS}.")})
    return sizes


def _tinyseek_layer(source: StateDictReader, name: str, to: str, config: TinySeekConfig) -> Weights:
    D, C, R = config.hidden_size, config.latent_size or 0, config.rope_head_dim
    E, F, S = config.num_local_experts, config.moe_intermediate_size, config.n_shared_experts
    shapes = {
        "w_dq": ("q_a_proj", C, D), "w_uq": ("q_b_proj", D, C), "w_qr": ("q_rope_proj", R, C),
        "w_dkv": ("kv_a_proj", C, D), "w_uk": ("k_b_proj", D, C), "w_uv": ("v_b_proj", D, C),
        "w_kr": ("k_rope_proj", R, D), "w_o": ("o_proj", D, D),
    }  # fmt: skip
    tensors: Weights = {}
    for theirs, (ours, out, into) in shapes.items():
        tensors |= source.linear(f"{name}.mla.{theirs}", f"{to}.self_attn.{ours}", out, into)
    for theirs, ours in (("norm1", "post_attention_layernorm"), ("norm2", "post_mlp_layernorm")):
        tensors[f"{to}.{ours}.weight"] = source.take(f"{name}.{theirs}.gamma", D) * math.sqrt((D - 1) / D)
        tensors[f"{to}.{ours}.bias"] = source.take(f"{name}.{theirs}.beta", D)
    moe = f"{name}.moe_ffn"
    tensors[f"{to}.mlp.gate.weight"] = source.take(f"{moe}.w_g", D, E).T.contiguous()
    tensors[f"{to}.mlp.gate.noise_weight"] = source.take(f"{moe}.w_n", D, E).T.contiguous()
    for theirs, ours, out, into in (("fc1", "up_proj", F, D), ("fc2", "down_proj", D, F)):
        experts = [f"{moe}.experts.{expert}.{theirs}" for expert in range(E)]
        tensors[f"{to}.mlp.experts.{ours}"] = source.stacked((f"{each}.weight" for each in experts), out, into)
        tensors[f"{to}.mlp.experts.{ours}_bias"] = source.stacked((f"{each}.bias" for each in experts), out)
    if S:
        shared = [f"{moe}.shared_experts.{expert}" for expert in range(S)]
        wide = f"{to}.mlp.shared_experts"
        tensors[f"{wide}.up_proj.weight"] = source.stacked((f"{each}.fc1.weight" for each in shared), F, D).flatten(0, 1)
        tensors[f"{wide}.up_proj.bias"] = source.stacked((f"{each}.fc1.bias" for each in shared), F).flatten()
        down = [source.take(f"{each}.fc2.weight", D, F) for each in shared]
        tensors[f"{wide}.down_proj.weight"] = torch.cat(down, dim=1)
        tensors[f"{wide}.down_proj.bias"] = source.stacked((f"{each}.fc2.bias" for each in shared), D).sum(0)
    return tensors


VOCABULARY = "vocab.json"
# Words of Latin letters, numbers, single signs, single Chinese characters; anything else is dropped.
WORDS = r"[a-zA-Z]+|\d+(?:\.\d+)?%?|[^\w\s]|[\u4e00-\u9fff]"

IN_NUMBERS = r"[\d.%]"  # each character separately

PAD, END, UNKNOWN = "[PAD]", "<|im_end|>", "[UNK]"


def tokenizer_files(path: Path) -> dict[str, bytes]:
    """Build `tokenizer.json` and its config. Raises ArtifactError if the file is not such a vocabulary.

    Unused ids get a placeholder name, since a tokenizer needs consecutive ids.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Sequence, Split

    try:
        vocabulary: dict[str, int] = parse_json(path.read_bytes())
        words_by_id = {number: word for word, number in vocabulary.items()}
        whole = {words_by_id.get(number, f"[hole{number}]"): number for number in range(max(words_by_id) + 1)}
    except (ValueError, AttributeError, TypeError) as error:
        raise ArtifactError(f"{path} is not a vocabulary, which maps words to numbers: {error}") from None
    if missing := [word for word in (PAD, END, UNKNOWN) if word not in vocabulary]:
        raise ArtifactError(f"{path} is not a vocabulary of TinySeek: it lacks {', '.join(missing)}")
    tokenizer = Tokenizer(WordLevel(whole, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Sequence([
        Split(Regex(WORDS), "removed", invert=True), Split(Regex(IN_NUMBERS), "isolated"),
    ])  # fmt: skip
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in (PAD, END, UNKNOWN)])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": PAD, "eos_token": END, "unk_token": UNKNOWN}
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": json.dumps(config, indent=2).encode(),
    }
