"""Write a model as a GGUF file, and read its tensors back, with the package `gguf`.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Loads torch if called.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from ttrain.core.files import JsonDict
from ttrain.core.text import first_of
from ttrain.errors import UsageError

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]  # fp32, by their Hugging Face names

# Types of `--gguf`, and by how much bits per byte may be above the model's.
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
        """The tensor of the file, from those of the model."""
        stacked = np.stack([self.ordered(tensors[name]) for name in self.names])
        return stacked if self.is_stacked else stacked[0]

    def unpack(self, values: Array) -> Iterator[tuple[str, Array]]:
        """The model's tensors with their names, from the tensor of the file."""
        each = values if self.is_stacked else values[None]
        for name, tensor in zip(self.names, each, strict=True):
            yield name, self.ordered(tensor, inverse=True)

    @property
    def is_stacked(self) -> bool:
        """Whether it holds the experts of a layer, [E, ...]."""
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


def check_config(config: Any) -> str:
    """llama.cpp's name of the architecture. Raises UsageError if it computes it otherwise."""
    kind = config.model_type
    check_kind(kind)
    fields = config.to_dict()
    known = {
        "hidden_act": fields["hidden_act"] == "silu",
        "rope_parameters": fields["rope_parameters"]["rope_type"] in ROPE_TYPES,
        "sliding_window": not fields.get("sliding_window"),
        "mlp_only_layers": not fields.get("mlp_only_layers"),
        "norm_topk_prob": fields.get("norm_topk_prob", True),
    }
    if unknown := [name for name, is_known in known.items() if not is_known]:
        raise UsageError(
            f"--gguf is given, but the model's {unknown[0]} is {fields.get(unknown[0])}, which "
            f"llama.cpp computes in another way for {kind}; leave --gguf out"
        )
    return ARCHITECTURES[kind]


def entries(config: Any, names: Sequence[str]) -> list[Entry]:
    """The tensors of a GGUF file for those of a model. Raises UsageError for an unknown name."""
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
        Entry(
            target,
            tuple(sorted(group, key=lambda name: [*map(int, re.findall(r"\d+", name))])),
            heads.get(target.split(".")[-2], 0),
        )
        for target, group in groups.items()
    ]


def write(path: Path, config: Any, tensors: Tensors, tokenizer: JsonDict) -> None:
    """Write a model's tensors as the type in the file's name, NAME-TYPE.gguf.

    `tokenizer`: the fields of `gguf_tokenizer.fields`.
    """
    name, _, kind = path.stem.rpartition("-")
    file_type = "ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"
    fields = {
        "type": "model",
        "name": name,
        **_sizes(config),
        "file_type": gguf.LlamaFileType[file_type],
        "quantization_version": gguf.GGML_QUANT_VERSION,
        **tokenizer,
    }
    writer = gguf.GGUFWriter(path, check_config(config))
    for field, value in fields.items():
        getattr(writer, f"add_{field}")(value)
    for entry in entries(config, list(tensors)):
        values = entry.pack(tensors)
        add_tensor(writer, entry.name, values, stored_type(entry.name, values.shape, kind))
    save(writer)


def add_tensor(writer: Any, name: str, values: Array, kind: str) -> None:
    """Add a tensor in one of the types of BOUNDS."""
    stored = gguf.GGMLQuantizationType[kind.upper()]
    writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(values), stored), raw_dtype=stored)


def save(writer: Any) -> None:
    """Write what was added."""
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


def read(path: Path, config: Any, names: Sequence[str]) -> dict[str, Array]:
    """The tensors of a written file in fp32, by their Hugging Face names."""
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    tensors: dict[str, Array] = {}
    for entry in entries(config, names):
        tensor = stored[entry.name]
        tensors |= entry.unpack(gguf.dequantize(tensor.data, tensor.tensor_type))
    return tensors


def _sizes(config: Any) -> JsonDict:
    # By the writer's methods `add_*`.
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    rope = config.rope_parameters
    is_linear = rope["rope_type"] == "linear"
    sizes = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "key_length": head,
        "value_length": head,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_dimension_count": head,
        "rope_freq_base": rope["rope_theta"],
        "rope_scaling_type": gguf.RopeScalingType.LINEAR if is_linear else None,
        "rope_scaling_factor": rope["factor"] if is_linear else None,
        "vocab_size": config.vocab_size,
        "expert_count": experts,
        "expert_used_count": config.num_experts_per_tok if experts else None,
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
    }
    return {name: size for name, size in sizes.items() if size is not None}
