"""Write a model as a GGUF file, and read its tensors back, with the package `gguf`.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Loads torch if called.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ttrain.core.text import first_of
from ttrain.errors import UsageError
from ttrain.export.gguf_tokenizer import Vocabulary

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]  # fp32, by their Hugging Face names

# Types of `--gguf`, and by how much bits per byte may be above the model's (see judge.py).
BOUNDS = {
    "f32": 0.0001,
    "f16": 0.001,
    "bf16": 0.005,
    "q8_0": 0.005,
    "q5_1": 0.03,
    "q5_0": 0.03,
    "q4_1": 0.06,
    "q4_0": 0.06,
}
# transformers' model types, and llama.cpp's names of these architectures.
ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
ROPE_TYPES = ("default", "linear")
BLOCK = 32  # weights that share a scale; a row is a whole number of blocks
# Embedding and head stay at eight bits: at four, they cost most of the loss of a small model.
EDGES = ("token_embd.weight", "output.weight")
WHOLE = ("f32", "f16", "bf16")
ROUTER = "ffn_gate_inp"
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Entry:
    """A tensor of a GGUF file: the tensors of the model that it holds.

    names    by their Hugging Face names; more than one: experts, stacked
    heads    of a matrix whose rows llama.cpp orders for its rotary positions; 0: as it is
    """

    name: str
    names: tuple[str, ...]
    heads: int = 0

    def pack(self, tensors: Tensors) -> Array:
        stacked = np.stack([self.ordered(tensors[name]) for name in self.names])
        return np.ascontiguousarray(stacked if self.is_stacked else stacked[0])

    def unpack(self, values: Array) -> Iterator[tuple[str, Array]]:
        each = values if self.is_stacked else values[None]
        for name, tensor in zip(self.names, each, strict=True):
            yield name, self.ordered(tensor, inverse=True)

    @property
    def is_stacked(self) -> bool:
        return EXPERT.fullmatch(self.names[0]) is not None

    def ordered(self, tensor: Array, *, inverse: bool = False) -> Array:
        """The rows in the order of llama.cpp, or back in that of transformers."""
        # llama.cpp rotates neighbouring dimensions of a head, transformers those of its halves.
        if not self.heads:
            return tensor
        half = tensor.shape[0] // self.heads // 2
        shape = (self.heads, half, 2) if inverse else (self.heads, 2, half)
        split = tensor.reshape(*shape, *tensor.shape[1:])
        return split.swapaxes(1, 2).reshape(tensor.shape)


def check_types(text: str) -> tuple[str, ...]:
    """The types that `--gguf` names, such as "f16,q8_0". Raises UsageError with those there are."""
    types = tuple(dict.fromkeys(part.strip().lower() for part in text.split(",")))
    unknown = [name for name in types if name not in BOUNDS]
    if unknown:
        hint = ""
        if re.fullmatch(r"q\d_k(_[sml])?", unknown[0]):
            hint = (
                "; K-quants need rows of 256, which llama.cpp's llama-quantize makes of f16 "
                "where the widths allow it"
            )
        raise UsageError(
            f"--gguf is '{text}' but {first_of(unknown, 3)} is none of {', '.join(BOUNDS)}{hint}"
        )
    return types


def check_kind(kind: object) -> None:
    """Raise UsageError for an architecture of which no GGUF file is written."""
    if kind not in ARCHITECTURES:
        raise UsageError(
            f"--gguf is given, but the architecture is {kind}; GGUF files are written of "
            f"{', '.join(ARCHITECTURES)}; leave --gguf out"
        )


def check_config(config: PretrainedConfig) -> str:
    """llama.cpp's name of the architecture. Raises UsageError if it computes it otherwise."""
    kind = config.model_type
    check_kind(kind)
    rope = _rope(config)
    differences = {
        "hidden_act": (config.hidden_act, config.hidden_act == "silu"),
        "rope_type": (rope["rope_type"], rope["rope_type"] in ROPE_TYPES),
        "sliding_window": (
            getattr(config, "sliding_window", None),
            not getattr(config, "sliding_window", None),
        ),
        "norm_topk_prob": (False, getattr(config, "norm_topk_prob", True)),
        "mlp_only_layers": (
            getattr(config, "mlp_only_layers", None),
            not getattr(config, "mlp_only_layers", None),
        ),
    }
    for name, (value, is_known) in differences.items():
        if not is_known:
            raise UsageError(
                f"--gguf is given, but the model's {name} is {value}, which llama.cpp computes in "
                f"another way for {kind}; leave --gguf out"
            )
    return ARCHITECTURES[kind]


def entries(config: PretrainedConfig, names: Sequence[str]) -> list[Entry]:
    """The tensors of a GGUF file for those of a model. Raises UsageError for an unknown name."""
    import gguf

    arch = check_config(config)
    known = {label: number for number, label in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(known[arch], config.num_hidden_layers)
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        expert = EXPERT.fullmatch(name)
        merged = f"{expert[1]}.{expert[3]}" if expert else name
        if (target := table.get_name(merged, try_suffixes=(".weight", ".bias"))) is None:
            raise UsageError(
                f"--gguf is given, but llama.cpp has no place for the tensor {name}; "
                "leave --gguf out"
            )
        groups[target].append(name)
    heads = {}
    if arch == "llama":
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    return [
        Entry(target, tuple(sorted(group, key=_expert)), heads.get(target.split(".")[-2], 0))
        for target, group in groups.items()
    ]


def write(path: Path, config: PretrainedConfig, tensors: Tensors, vocabulary: Vocabulary) -> None:
    """Write a model's tensors as the type in the file's name, NAME-TYPE.gguf."""
    import gguf

    name, _, kind = path.stem.rpartition("-")
    writer = gguf.GGUFWriter(path, check_config(config))
    writer.add_type("model")
    writer.add_name(name)
    _describe(writer, config)
    marks = {"f32": "ALL_F32"}
    writer.add_file_type(gguf.LlamaFileType[marks.get(kind, f"MOSTLY_{kind.upper()}")])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    vocabulary.write(writer)
    for entry in entries(config, list(tensors)):
        values = entry.pack(tensors)
        stored = gguf.GGMLQuantizationType[stored_type(entry.name, values.shape, kind).upper()]
        writer.add_tensor(entry.name, gguf.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored_type(name: str, shape: Sequence[int], kind: str) -> str:
    """The type of one tensor: as llama.cpp's, vectors and routers stay f32.

    A row that is not a whole number of blocks stays f16.
    """
    if len(shape) == 1 or ROUTER in name:
        return "f32"
    if kind not in WHOLE and shape[-1] % BLOCK:
        return "f16"
    return "q8_0" if name in EDGES and kind not in WHOLE else kind


def read(path: Path, config: PretrainedConfig, names: Sequence[str]) -> dict[str, Array]:
    """The tensors of a written file in fp32, by their Hugging Face names."""
    import gguf

    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    tensors: dict[str, Array] = {}
    for entry in entries(config, names):
        tensor = stored[entry.name]
        tensors |= entry.unpack(gguf.dequantize(tensor.data, tensor.tensor_type))
    return tensors


def _expert(name: str) -> int:
    match = EXPERT.fullmatch(name)
    return int(match[2]) if match else 0


def _rope(config: PretrainedConfig) -> dict[str, Any]:
    return dict(config.rope_parameters)


def _describe(writer: Any, config: PretrainedConfig) -> None:
    # The sizes of the architecture, as llama.cpp names them.
    import gguf

    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = _rope(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_vocab_size(config.vocab_size)
    if experts := getattr(config, "num_local_experts", getattr(config, "num_experts", None)):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if width := getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(width)
