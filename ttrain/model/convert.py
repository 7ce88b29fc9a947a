"""Imports models of other code bases, from their own files, into Hugging Face directories with the same logits."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ttrain.core.files import parse_json, temporary_path
from ttrain.core.hashing import sha256_file
from ttrain.core.text import first_of
from ttrain.errors import ArtifactError, UsageError
from ttrain.model import factory, import_weights, registry
from ttrain.model.import_weights import VOCABULARY, ConvertedModel, Settings, Weights
from ttrain.store.model_files import SECOND_HEAD
from ttrain.store.runs import remove_interrupted_writes

PICKLED, PLAIN = (".pt", ".pth", ".pkl", ".bin"), (".safetensors",)
CONFIGS = ("model_config.json", "shared_model_config.json", "config.json")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *("vocab.json", "merges.txt"),
)
WRAPPERS = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile
SHOWN = 12  # names in an error
SHARD_SIZE = "5GB"  # of the largest file of weights, as transformers had it before version 5


@dataclass(frozen=True)
class ImportResult:
    """Result of `import_model`."""

    layout: str
    kind: str
    parameters: int
    second_head: bool
    tokenizer: bool
    assumed: dict[str, Any]
    directory: Path


def import_model(source: Path, target: Path, *, config: Path | None = None, tokenizer: Path | None = None) -> ImportResult:
    """Convert a state dict, or a directory with one, to a Hugging Face directory, in fp32.

    `config`: its settings, if they are not beside it; `tokenizer`: a directory whose tokenizer is copied.
    The target appears only when it is complete. Raises UsageError if a file does not exist, or the target is in use,
    ArtifactError if the weights are not a model of a known layout, naming every missing, unexpected or mis-shaped
    tensor.
    """
    from transformers.utils import logging

    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} exists and is not empty; name another --out, or remove it")
    file = weights_file(source)
    converted = convert(read_weights(file), _settings(file, config), str(file))
    logging.disable_progress_bar()
    destination = target.absolute()  # "." has no name, and cannot be replaced
    remove_interrupted_writes(destination)
    temporary = temporary_path(destination)
    temporary.mkdir(parents=True)
    try:
        parameters = _write(converted, temporary)
        has_tokenizer = _bring_tokenizer(
            tokenizer or file.parent, temporary, converted.layout, asked_for=tokenizer is not None
        )
        origin = {"layout": converted.layout, "file": file.name, "sha256": sha256_file(file), "assumed": converted.assumed}
        (temporary / "import.json").write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
        if destination.exists():
            destination.rmdir()
        temporary.rename(destination)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    kind = converted.config.model_type
    return ImportResult(
        converted.layout, kind, parameters, bool(converted.second_head), has_tokenizer, converted.assumed, target
    )


def convert(weights: Weights, settings: Settings, origin: str) -> ConvertedModel:
    """Convert a state dict to transformers' names; its layout is detected by its names. `origin`: for errors."""
    layouts = (
        (import_weights.TINYSEEK_KEYS, import_weights.convert_tinyseek),
        (import_weights.MINIMIND_KEYS, import_weights.convert_minimind),
    )
    convert_layout = next((convert_layout for keys, convert_layout in layouts if keys & {*weights}), None)
    if convert_layout is None:
        raise ArtifactError(
            f"{origin} has no known layout (TinySeek, MiniMind): it holds {first_of(sorted(weights), SHOWN)}; a directory "
            f"that transformers opens needs no import: use it directly as the model"
        )
    try:
        converted: ConvertedModel = convert_layout(dict(weights), settings, origin)
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise ArtifactError(f"the config of {origin} does not make a model: {' '.join(str(error).split())}") from None
    return converted


def weights_file(source: Path) -> Path:
    """The file itself, or the only one with weights in a directory. Raises UsageError if there is none, or several."""
    if source.is_file():
        return source
    if not source.is_dir():
        raise UsageError(f"{source} does not exist; name a state dict ({', '.join(PICKLED + PLAIN)}) or its directory")
    files = sorted(path for path in source.iterdir() if path.suffix in PICKLED + PLAIN and path.is_file())
    if len(files) != 1:
        names = ", ".join(path.name for path in files[:SHOWN]) or "none"
        raise UsageError(f"{source} holds {len(files)} files with weights ({names}); name the one to import")
    return files[0]


def read_weights(file: Path) -> Weights:
    """Read a state dict without executing code from it. Raises ArtifactError if the file holds anything but tensors."""
    try:
        weights: Any = load_file(file) if file.suffix in PLAIN else torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        refused = re.search(r"(?:GLOBAL|global:?) ([\w.]+)", str(error))  # without torch's advice to open it anyway
        raise ArtifactError(
            f"{file} holds more than tensors{f', {refused[1]}' if refused else ''}, and opening it could run its code; it "
            f"was not opened; save only model.state_dict() in the program that made it"
        ) from None
    except (OSError, ValueError, RuntimeError, EOFError, SafetensorError) as error:
        raise ArtifactError(f"cannot read {file}: {type(error).__name__}: {str(error).splitlines()[0]}") from None
    for wrapped in ("model", "state_dict"):
        if isinstance(weights, dict) and isinstance(weights.get(wrapped), dict):
            weights = weights[wrapped]
    if not isinstance(weights, dict) or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise ArtifactError(f"{file} is not a state dict: it must hold tensors by their names, as model.state_dict() does")
    for prefix in WRAPPERS:
        if weights and all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return {**weights}


def _settings(file: Path, config: Path | None) -> dict[str, Any]:
    candidates = [file.parent / name for name in CONFIGS]
    path = config or next((each for each in candidates if each.is_file()), None)
    if path is None:
        return {}
    try:
        settings = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"--config {path} does not exist") from None
    except ValueError as error:
        raise ArtifactError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ArtifactError(f"{path} must hold one JSON object with the model's sizes")
    return settings


def _write(converted: ConvertedModel, directory: Path) -> int:
    from transformers import AutoModelForCausalLM

    registry.register_own()
    model = AutoModelForCausalLM.from_config(converted.config, dtype=torch.float32)
    expected = factory.state(model)
    wrong = sorted(
        {*expected} ^ {*converted.weights}
        or {name for name in expected if expected[name].shape != converted.weights[name].shape}
    )
    assert not wrong, f"the conversion does not fit {converted.config.model_type}: {wrong[:SHOWN]}"
    model.load_state_dict(converted.weights, strict=False)
    eos = converted.config.eos_token_id
    model.generation_config.eos_token_id = eos if isinstance(eos, list) or eos is None else [eos]
    model.save_pretrained(directory, max_shard_size=SHARD_SIZE)
    for name, data in registry.own_files(converted.config).items():
        (directory / name).write_bytes(data)
    if converted.second_head:
        save_file(converted.second_head, directory / SECOND_HEAD, metadata={"format": "pt"})
    return int(model.num_parameters())


def _bring_tokenizer(source: Path, target: Path, layout: str, *, asked_for: bool) -> bool:
    if not (source / "tokenizer.json").is_file():
        if layout == "TinySeek" and (source / VOCABULARY).is_file():
            for name, data in import_weights.tokenizer_files(source / VOCABULARY).items():
                (target / name).write_bytes(data)
            return True
        if asked_for:
            raise UsageError(f"--tokenizer {source} holds no tokenizer.json; name a Hugging Face tokenizer's directory")
        return False
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    return True
