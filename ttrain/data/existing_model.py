"""A model that exists, from which a pipeline starts: a folder, or a name on the Hugging Face Hub. Loads no torch.

Only JSON and safetensors are read, never code and never a pickle.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ttrain.config.training import NONE, TRAININGS
from ttrain.core.files import parse_json
from ttrain.data import existing_tokenizer
from ttrain.errors import ArtifactError, UsageError
from ttrain.store.weights import INDEX_SUFFIX, MODEL, SECOND_HEAD, weight_files

CONFIG, GENERATION = "config.json", "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"
MODEL_DIRECTORY, ADAPTER_DIRECTORY = "model", "adapter"  # of an artifact
ON_HUB = (CONFIG, GENERATION, "model*.safetensors", MODEL + INDEX_SUFFIX, SECOND_HEAD, *existing_tokenizer.FILES)
# What architectures call the positions that they accept.
LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_length")


def files(start_from: str, setting: str) -> dict[str, list[Path]]:
    """The files that count, on this machine, by role: "config", "weights", and "tokenizer" and "second_head" if there.

    Fetched from the Hub where its cache lacks them. Raises UsageError, naming `setting`, where there is no such model.
    """
    directory = _directory(start_from, setting)
    if not (directory / CONFIG).is_file():
        if any((place / ADAPTER_CONFIG).is_file() for place in (directory, directory / ADAPTER_DIRECTORY)):
            raise UsageError(
                f"{setting} is '{start_from}', which is an adapter; make a model of it first: "
                f"`ttrain export {start_from} --merge --to FOLDER`"
            )
        raise UsageError(f"{setting} is '{start_from}', which has no {CONFIG}; name a folder that save_pretrained wrote")
    try:
        weights = weight_files(directory)
    except ArtifactError as error:
        pickles = next(directory.glob("pytorch_model*.bin"), None)
        cure = f"; {pickles.name} is a pickle, which may run code: load and save_pretrained it elsewhere" if pickles else ""
        raise UsageError(f"{setting} is '{start_from}': {error}{cure}") from None
    config = [directory / name for name in (CONFIG, GENERATION, MODEL + INDEX_SUFFIX)]
    if weights == [directory / MODEL]:
        del config[2]  # what else lies there is not read
    found = {
        "config": [path for path in config if path.is_file()],
        "weights": weights,
        "tokenizer": [directory / existing_tokenizer.JSON],
        "second_head": [directory / SECOND_HEAD],
    }
    return {role: paths for role, paths in found.items() if paths[0].is_file()}


def max_length(found: Mapping[str, Sequence[Path]]) -> int | None:
    """Positions that the model accepts, in tokens, as its config says; None where it does not.

    Raises UsageError where the config is no JSON object.
    """
    config = _config(found["config"][0])
    for name in LENGTHS:
        if isinstance(config.get(name), int) and config[name] > 0:
            return int(config[name])
    return None


def _directory(start_from: str, setting: str) -> Path:
    directory = Path(start_from).expanduser().absolute()
    if directory.is_dir():
        is_artifact = not (directory / CONFIG).is_file() and (directory / MODEL_DIRECTORY / CONFIG).is_file()
        return directory / MODEL_DIRECTORY if is_artifact else directory
    if existing_tokenizer.ON_HUB.fullmatch(start_from) is None or directory.exists():
        near = difflib.get_close_matches(start_from, (NONE, *TRAININGS), n=1)
        raise UsageError(
            f"{setting} is '{start_from}' but no such folder is there; "
            + (f"did you mean '{near[0]}'?" if near else "name a folder that holds config.json, or owner/name[@revision]")
        )
    return existing_tokenizer.from_hub(start_from, setting, ON_HUB, _is_whole)


def _is_whole(directory: Path) -> bool:
    try:
        return (directory / CONFIG).is_file() and bool(weight_files(directory))
    except ArtifactError:
        return False


def _config(path: Path) -> dict[str, Any]:
    try:
        config = parse_json(path.read_bytes())
    except ValueError as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"cannot read {path}: it is no JSON object")
    return config
