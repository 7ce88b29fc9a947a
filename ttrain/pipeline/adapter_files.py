"""An adapter's files, read without torch: what kind it is, how large, and which base it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ttrain.core.files import parse_json
from ttrain.errors import ArtifactError
from ttrain.pipeline.names import ADAPTER_CONFIG, BASE
from ttrain.store.weights import ADAPTER, MODEL, weight_files


@dataclass(frozen=True)
class Description:
    """What an adapter is. `settings` are those that count for its kind; `bytes` is the size of its weights file."""

    kind: str
    settings: dict[str, Any]
    parameters: int
    bytes: int
    base_name: str
    base_digest: str | None  # None: it does not say
    base_held_in: str | None  # how the base was quantized while it was trained; None: not


def describe(directory: Path) -> Description:
    """Read an adapter's directory. Raises ArtifactError where a file is missing or damaged."""
    told = _read(directory / ADAPTER_CONFIG)
    base = _read(directory / BASE) if (directory / BASE).is_file() else {}
    kind = "dora" if told.get("use_dora") else str(told.get("peft_type", "unknown")).lower()
    settings: dict[str, Any] = {}
    try:
        if kind in ("lora", "dora"):
            settings = {"rank": told["r"], "alpha": told["lora_alpha"], "dropout": told.get("lora_dropout", 0.0)}
            settings["targets"] = sorted([*(told.get("target_modules") or ()), *(told.get("target_parameters") or ())])
        elif kind == "prefix_tuning":
            kind = "prefix"
            settings = {"virtual_tokens": told["num_virtual_tokens"], "layers": told["num_layers"]}
    except KeyError as error:
        raise ArtifactError(f"{directory / ADAPTER_CONFIG} does not say {error}") from None
    return Description(
        kind=kind,
        settings=settings,
        parameters=numbers_in(directory / ADAPTER),
        bytes=(directory / ADAPTER).stat().st_size,
        base_name=str(told.get("base_model_name_or_path") or ""),
        base_digest=base.get("base_weights_sha256"),
        base_held_in=base.get("base_held_in"),
    )


def parameters_of(model: Path) -> int:
    """How many numbers a model's weights files hold; a tied tensor once."""
    return sum(numbers_in(file) for file in weight_files(model, MODEL))


def numbers_in(path: Path) -> int:
    """How many numbers a safetensors file holds, from its header alone."""
    try:
        with safe_open(path, framework="numpy") as file:
            return sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118  # it is no mapping
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"cannot read {path}: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ArtifactError(f"cannot read {path}: {error}") from None
    if not isinstance(found, dict):
        raise ArtifactError(f"{path} must hold a JSON object")
    return found
