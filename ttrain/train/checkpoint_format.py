"""Checkpoint directories as they lie there: found, read, verified to the byte. Nothing in them can run code."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from ttrain.core.files import parse_json
from ttrain.core.hashing import sha256_file
from ttrain.errors import ArtifactError
from ttrain.train.snapshots import Snapshot

STATE = "state.json"
OPTIMIZER = "optimizer.safetensors"
WEIGHTS = "model.safetensors"
SAFETENSORS = ".safetensors"


def read(path: Path, weights_file: str = WEIGHTS) -> Snapshot:
    """A checkpoint, verified against its own `state.json`. Raises ArtifactError that names the damaged file."""
    state = _read_state(path)
    for name in {*state["files"], weights_file, OPTIMIZER}:
        _verify(path / name, state["files"].get(name))
    weights = dict(_tensors(path / weights_file))
    for name in state["files"]:
        if name.endswith(SAFETENSORS) and name not in (weights_file, OPTIMIZER):  # as `tensor_files.by_file` laid them out
            weights |= {f"{name}/{own}": tensor for own, tensor in _tensors(path / name).items()}
    return Snapshot(int(state["step"]), weights, _tensors(path / OPTIMIZER), state)


def found(directory: Path) -> list[Path]:
    """The checkpoints in the order of their steps.

    Among them are directories whose writer was killed when only their name was missing: `state.json` is written last.
    """
    paths = [path for path in directory.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
    paths += [path for path in directory.glob(".writing-*") if (path / STATE).exists()]
    return sorted(paths, key=lambda path: (step_of(path), is_unnamed(path)))


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.rpartition("-")[2])


def is_unnamed(path: Path) -> bool:
    """Whether it still has the name under which it was written."""
    return path.name.startswith(".writing-")


def logged_metric(path: Path) -> float | None:
    """The validation loss that a checkpoint was saved with; None where there is none, or its `state.json` is damaged."""
    try:
        metric = _read_state(path).get("metric")
    except ArtifactError:
        return None
    return None if metric is None else float(metric)


def signed(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with its own digest, as `state.json` holds it."""
    return {**state, "sha256": _digest(state)}


def _read_state(path: Path) -> dict[str, Any]:
    file = path / STATE
    try:
        state: dict[str, Any] = parse_json(file.read_bytes())
        named = path.name in (f"step-{state['step']:08d}", f".writing-{state['step']:08d}")
        whole = state.pop("sha256") == _digest(state) and named and isinstance(state["files"], dict)
    except OSError as error:
        raise ArtifactError(f"the checkpoint file {file} is damaged: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"the checkpoint file {file} is damaged: {type(error).__name__}: {error}") from None
    if not whole:
        raise ArtifactError(f"the checkpoint file {file} is damaged: it is not what was written for this step")
    return state


def _verify(file: Path, entry: Any) -> None:
    try:
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise ArtifactError(f"the checkpoint file {file} is damaged: {size} bytes where {entry['bytes']} were written")
        if sha256_file(file) != entry["sha256"]:
            raise ArtifactError(f"the checkpoint file {file} is damaged: its bytes are not those that were written")
    except OSError as error:
        raise ArtifactError(f"the checkpoint file {file} is damaged: {error.strerror}") from None
    except (KeyError, TypeError):
        raise ArtifactError(f"the checkpoint file {file} is damaged: {STATE} does not list it") from None


def _tensors(file: Path) -> dict[str, Any]:
    """Into memory of their own: pages mapped from the file would be read, or gone, long after they were verified."""
    try:
        tensors: dict[str, Any] = load_file(file, backend="pread")
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ArtifactError(f"the checkpoint file {file} is damaged: {type(error).__name__}: {error}") from None
    return tensors


def _digest(state: Mapping[str, Any]) -> str:
    """Of the state's own JSON, which unlike a key may hold an infinite figure."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
