"""Write a LoRA adapter as a GGUF file, for `--lora` of llama.cpp, and read it back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
from safetensors.numpy import load_file

from ttrain.core.files import JsonDict, read_object
from ttrain.errors import UsageError
from ttrain.export.gguf_file import (
    WHOLE,
    Array,
    Tensors,
    add_tensor,
    check_config,
    entries,
    save,
)
from ttrain.store.model_files import ADAPTER, ADAPTER_CONFIG

FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
# Settings of PEFT with which an adapter is more than a product of two matrices for each layer.
FURTHER = (
    "use_dora",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "target_parameters",
    "lora_bias",
    "fan_in_fan_out",
)


def check(directory: Path, types: tuple[str, ...]) -> JsonDict:
    """The adapter's settings. Raises UsageError for one that llama.cpp cannot apply."""
    settings = read_object(directory / ADAPTER_CONFIG)
    further = [name for name in FURTHER if settings.get(name)]
    if settings.get("peft_type") != "LORA" or further:
        what = f"has {further[0]}" if further else f"is of the kind {settings.get('peft_type')}"
        raise UsageError(
            f"--gguf is given, but the adapter {what}, which llama.cpp cannot apply; make it part "
            "of its base with --merge"
        )
    if quantized := [name for name in types if name not in WHOLE]:
        raise UsageError(
            f"--gguf is {quantized[0]}, but an adapter is written as {', '.join(WHOLE)}; use one "
            "of them, or make it part of its base with --merge"
        )
    return settings


def write(path: Path, config: Any, directory: Path) -> None:
    """Write the adapter of a directory, its matrices as the type in the name, NAME-TYPE.gguf."""
    name, _, kind = path.stem.rpartition("-")
    settings = check(directory, (kind,))
    factors: dict[str, dict[str, Array]] = {}
    for full_name, tensor in load_file(directory / ADAPTER).items():
        if (match := FACTOR.fullmatch(full_name)) is None:
            raise UsageError(
                f"--gguf is given, but the adapter's tensor {full_name} is no factor of a matrix; "
                "make the adapter part of its base with --merge"
            )
        factors.setdefault(f"{match[1]}.weight", {})[match[2]] = tensor
    writer = gguf.GGUFWriter(path, check_config(config))
    writer.add_type("adapter")
    writer.add_name(name)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(settings["lora_alpha"]))
    for entry in entries(config, list(factors)):
        pair = factors[entry.names[0]]
        add_tensor(writer, f"{entry.name}.lora_a", pair["A"], kind)
        add_tensor(writer, f"{entry.name}.lora_b", entry.ordered(pair["B"]), kind)
    save(writer)


def add(path: Path, config: Any, tensors: Tensors) -> Tensors:
    """The base's tensors with what a written file adds to them."""
    reader = gguf.GGUFReader(path)
    alpha = reader.fields[gguf.Keys.Adapter.LORA_ALPHA].contents()
    stored = {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors
    }
    added = dict(tensors)
    for entry in entries(config, list(tensors)):
        if (right := stored.get(f"{entry.name}.lora_a")) is None:
            continue
        product = stored[f"{entry.name}.lora_b"] @ right * (alpha / len(right))
        [name] = entry.names
        added[name] = tensors[name] + entry.ordered(product, inverse=True)
    return added
