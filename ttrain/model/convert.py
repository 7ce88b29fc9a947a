"""Models from elsewhere, as the files that their own code writes, to Hugging Face directories with the same logits."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ttrain.core.files import parse_json
from ttrain.core.hashing import sha256_file
from ttrain.errors import ArtifactError, UsageError
from ttrain.model import import_words, own_architectures
from ttrain.model.import_words import VOCABULARY
from ttrain.store.weights import SECOND_HEAD

if TYPE_CHECKING:
    pass
from ttrain.model.import_common import Converted

PICKLED, PLAIN = (".pt", ".pth", ".pkl", ".bin"), (".safetensors",)
CONFIGS = ("model_config.json", "shared_model_config.json", "config.json")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *("vocab.json", "merges.txt"),
)
WRAPPERS = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile
SHOWN = 12  # names in an error


@dataclass(frozen=True)
class Imported:
    """What `import_model` did."""

    layout: str
    kind: str
    parameters: int
    second_head: bool
    tokenizer: bool
    assumed: dict[str, Any]
    directory: Path


def import_model(
    source: Path, target: Path, *, config: Path | None = None, tokenizer: Path | None = None, shard_size: str = "5GB"
) -> Imported:
    """Convert a state dict, or a directory with one, to a Hugging Face directory, in fp32.

    `config`: its settings, where they do not lie beside it; `tokenizer`: a directory whose tokenizer comes along.
    Nothing of the target exists before everything of it does. Raises UsageError where a file is not there, or the target is
    in use, ArtifactError where the weights are no model of a known layout, naming every tensor that is missing, left over or
    mis-shaped.
    """
    from transformers.utils import logging

    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} exists and is not empty; name another --to, or remove it")
    file = weights_file(source)
    found = convert(read_weights(file), _settings(file, config), str(file))
    logging.disable_progress_bar()
    place = target.absolute()  # "." has no name, and cannot be replaced
    made = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    made.mkdir(parents=True)
    try:
        parameters = _write(found, made, shard_size)
        words = _bring_tokenizer(tokenizer or file.parent, made, found.layout, asked_for=tokenizer is not None)
        origin = {"layout": found.layout, "file": file.name, "sha256": sha256_file(file), "assumed": found.assumed}
        (made / "import.json").write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
        if place.exists():
            place.rmdir()
        made.rename(place)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    kind = found.config.model_type
    return Imported(found.layout, kind, parameters, bool(found.second_head), words, found.assumed, target)


def convert(weights: dict[str, Tensor], settings: Mapping[str, Any], where: str) -> Converted:
    """A state dict in transformers' names, by the layout that its names show. `where`: for errors."""
    from ttrain.model import import_minimind, import_tinyseek

    layouts = (import_tinyseek, import_minimind)
    layout = next((each for each in layouts if each.MARKS & {*weights}), None)
    if layout is None:
        raise ArtifactError(
            f"{where} is of no layout that is known (TinySeek, MiniMind): it holds {_some(weights)}; a directory that "
            f"transformers opens needs no import: name it where a model is asked for"
        )
    try:
        found: Converted = layout.convert(dict(weights), settings, where)
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise ArtifactError(f"the config of {where} does not make a model: {' '.join(str(error).split())}") from None
    return found


def weights_file(source: Path) -> Path:
    """The file itself, or the only one with weights in a directory. Raises UsageError where there is none, or several."""
    if source.is_file():
        return source
    if not source.is_dir():
        raise UsageError(f"{source} does not exist; name a state dict ({', '.join(PICKLED + PLAIN)}) or its directory")
    files = sorted(path for path in source.iterdir() if path.suffix in PICKLED + PLAIN and path.is_file())
    if len(files) != 1:
        names = ", ".join(path.name for path in files[:SHOWN]) or "none"
        raise UsageError(f"{source} holds {len(files)} files with weights ({names}); name the one to import")
    return files[0]


def read_weights(file: Path) -> dict[str, Tensor]:
    """A state dict: nothing in the file is executed. Raises ArtifactError for a file that holds anything but tensors."""
    try:
        found: Any = load_file(file) if file.suffix in PLAIN else torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        refused = re.search(r"(?:GLOBAL|global:?) ([\w.]+)", str(error))  # without torch's advice to open it all the same
        raise ArtifactError(
            f"{file} holds more than tensors{f', {refused[1]}' if refused else ''}, and opening it could run its code; it "
            f"was not opened; where it comes from, save model.state_dict() alone"
        ) from None
    except (OSError, ValueError, RuntimeError, EOFError, SafetensorError) as error:
        raise ArtifactError(f"cannot read {file}: {type(error).__name__}: {str(error).splitlines()[0]}") from None
    for wrapped in ("model", "state_dict"):
        if isinstance(found, dict) and isinstance(found.get(wrapped), dict):
            found = found[wrapped]
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise ArtifactError(f"{file} is no state dict: it must hold tensors by their names, as model.state_dict() does")
    for prefix in WRAPPERS:
        if found and all(name.startswith(prefix) for name in found):
            found = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    return {**found}


def _settings(file: Path, config: Path | None) -> dict[str, Any]:
    beside = [file.parent / name for name in CONFIGS]
    path = config or next((each for each in beside if each.is_file()), None)
    if path is None:
        return {}
    try:
        found = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"--config {path} does not exist") from None
    except ValueError as error:
        raise ArtifactError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ArtifactError(f"{path} must hold one JSON object with the model's sizes")
    return found


def _write(found: Converted, directory: Path, shard_size: str) -> int:
    from transformers import AutoModelForCausalLM

    own_architectures.register()
    model = AutoModelForCausalLM.from_config(found.config, dtype=torch.float32)
    tied = {*(getattr(model, "all_tied_weights_keys", None) or ())}
    wanted = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    wrong = sorted(
        {*wanted} ^ {*found.weights} or {name for name in wanted if wanted[name].shape != found.weights[name].shape}
    )
    assert not wrong, f"the conversion does not fit {found.config.model_type}: {wrong[:SHOWN]}"
    model.load_state_dict(found.weights, strict=False)
    eos = found.config.eos_token_id
    model.generation_config.eos_token_id = eos if isinstance(eos, list) or eos is None else [eos]
    model.save_pretrained(directory, max_shard_size=shard_size)
    for name, data in own_architectures.files(found.config).items():
        (directory / name).write_bytes(data)
    if found.second_head:
        save_file(found.second_head, directory / SECOND_HEAD, metadata={"format": "pt"})
    return int(model.num_parameters())


def _bring_tokenizer(source: Path, target: Path, layout: str, *, asked_for: bool) -> bool:
    if not (source / "tokenizer.json").is_file():
        if layout == "TinySeek" and (source / VOCABULARY).is_file():
            for name, data in import_words.tokenizer_files(source / VOCABULARY).items():
                (target / name).write_bytes(data)
            return True
        if asked_for:
            raise UsageError(f"--tokenizer {source} holds no tokenizer.json; name a Hugging Face tokenizer's directory")
        return False
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    return True


def _some(names: Iterable[str]) -> str:
    every = sorted(names)
    return ", ".join(every[:SHOWN]) + (f" and {len(every) - SHOWN} more" if len(every) > SHOWN else "")
