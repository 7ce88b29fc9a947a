"""Checkpoint directories on disk: listed, read and verified. Nothing in them can run code."""

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ttrain.core.files import JsonDict
from ttrain.core.hashing import sha256_file
from ttrain.errors import ArtifactError
from ttrain.train.distributed import Tensors
from ttrain.train.snapshots import Snapshot, copy_tensors

STATE = "state.json"

OPTIMIZER = "optimizer.safetensors"

WEIGHTS = "model.safetensors"

SAFETENSORS = ".safetensors"


# Digest and copy to the page cache read the same bytes one after the other. 300 MB on two EPYC
# cores: 0.84 s by 256 KiB, 0.52 s by 1 MiB, 0.41 s by 4 MiB.
CHUNK_BYTES = 4 << 20
ALIGNMENT = 8


def read(path: Path, weights_file: str = WEIGHTS) -> Snapshot:
    """Read a verified checkpoint. Raises ArtifactError naming a damaged file."""
    state = _read_state(path)
    for name in {*state["files"], weights_file, OPTIMIZER}:
        _verify(path / name, state["files"].get(name))
    return Snapshot(int(state["step"]), *read_tensors(path, state["files"], weights_file), state)


def read_tensors(
    path: Path, names: Iterable[str], weights_file: str = WEIGHTS
) -> tuple[Tensors, Tensors]:
    """Read weights and optimizer state from the named files of a checkpoint that hold tensors."""
    weights = dict(load_tensors(path / weights_file))
    for name in names:
        # As `by_file` laid them out.
        if name.endswith(SAFETENSORS) and name not in (
            weights_file,
            OPTIMIZER,
        ):
            weights |= {
                f"{name}/{tensor_name}": tensor
                for tensor_name, tensor in load_tensors(path / name).items()
            }
    return weights, load_tensors(path / OPTIMIZER)


def list_checkpoints(directory: Path) -> list[Path]:
    """Paths of the checkpoints in the order of their steps.

    Includes complete ones whose writer was killed before the final rename.
    """
    paths = [path for path in directory.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
    paths += [path for path in directory.glob(".writing-*") if (path / STATE).exists()]
    return sorted(paths, key=lambda path: (step_of(path), is_unnamed(path)))


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.rpartition("-")[2])


def is_unnamed(path: Path) -> bool:
    """Whether the checkpoint still has its temporary name."""
    return path.name.startswith(".writing-")


def logged_metric(path: Path) -> float | None:
    """The validation loss that a checkpoint was saved with; None without one or if damaged."""
    try:
        metric = _read_state(path).get("metric")
    except ArtifactError:
        return None
    return None if metric is None else float(metric)


def with_digest(state: Mapping[str, Any]) -> JsonDict:
    """A state with its own digest, as `state.json` holds it."""
    return {**state, "sha256": _digest(state)}


def _read_state(path: Path) -> JsonDict:
    file = path / STATE
    try:
        state: JsonDict = json.loads(file.read_bytes())
        name_matches = path.name in (f"step-{state['step']:08d}", f".writing-{state['step']:08d}")
        whole = (
            state.pop("sha256") == _digest(state)
            and name_matches
            and isinstance(state["files"], dict)
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"the checkpoint file {file} is damaged: {type(error).__name__}: {error}"
        ) from None
    if not whole:
        raise ArtifactError(
            f"the checkpoint file {file} is damaged: it is not what was written for this step"
        )
    return state


def _verify(file: Path, entry: Any) -> None:
    try:
        if sha256_file(file) != entry["sha256"]:
            raise ArtifactError(
                f"the checkpoint file {file} is damaged: its bytes are not those that were written"
            )
    except OSError as error:
        raise ArtifactError(f"the checkpoint file {file} is damaged: {error.strerror}") from None
    except (KeyError, TypeError):
        raise ArtifactError(
            f"the checkpoint file {file} is damaged: {STATE} does not list it"
        ) from None


def load_tensors(file: Path) -> JsonDict:
    """Load tensors into memory of their own: mapped pages could change after they were verified."""
    try:
        tensors: JsonDict = load_file(file, backend="pread")
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ArtifactError(
            f"the checkpoint file {file} is damaged: {type(error).__name__}: {error}"
        ) from None
    return tensors


def _digest(state: Mapping[str, Any]) -> str:
    # Unlike a stage's key the state may hold an infinite number.
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def tensor_parts(
    tensors: Tensors, metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file in pieces. The tensors are on the CPU and must not change."""
    # So that all are aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: JsonDict = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        tensor = tensors[name]
        assert tensor.device.type == "cpu", f"{name} is on {tensor.device}"
        begin = end
        end = end + tensor.nbytes
        # As safetensors names types: F32, BF16, I64, U8, BOOL.
        kind = str(tensor.dtype).removeprefix("torch.").removesuffix("fn").upper()
        header[name] = {
            "dtype": kind.replace("FLOAT", "F").replace("UINT", "U").replace("INT", "I"),
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield tensors[name].detach().reshape(-1).view(torch.uint8).numpy().data


def by_file(tensors: Tensors, default: str) -> dict[str, dict[str, Tensor]]:
    """Group tensors by file: those named FILE.safetensors/NAME there, others in `default`."""
    grouped: dict[str, dict[str, Tensor]] = {default: {}}
    for name, tensor in tensors.items():
        file, _, tensor_name = name.rpartition("/")
        has_own_file = file.endswith(SAFETENSORS)
        grouped.setdefault(file if has_own_file else default, {})[
            tensor_name if has_own_file else name
        ] = tensor
    return grouped


def write(path: Path, parts: Iterable[bytes | memoryview]) -> JsonDict:
    """Write a new file and fsync it; returns {"bytes", "sha256"}. An OSError carries the path."""
    digest = hashlib.sha256()
    try:
        with path.open("xb", buffering=0) as file:
            for piece in parts:
                view = memoryview(piece)
                for begin in range(0, len(view), CHUNK_BYTES):
                    chunk = view[begin : begin + CHUNK_BYTES]
                    digest.update(chunk)  # this, `write` and `fsync` let other threads run
                    while chunk:
                        chunk = chunk[os.write(file.fileno(), chunk) :]
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)
        raise
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def write_model(
    directory: Path,
    files: Mapping[str, bytes],
    weights: Tensors,
    weights_file: str = WEIGHTS,
    left_out: Collection[str] = (),
) -> None:
    """Write a model's files and weights; tensors named FILE.safetensors/NAME go into that file.

    A file of weights that is `left_out` is removed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    for file, tensors in by_file(copy_tensors(weights), weights_file).items():
        if file in left_out:
            (directory / file).unlink(missing_ok=True)
        else:
            write_weights(directory / file, tensors)


def write_weights(path: Path, tensors: Tensors) -> None:
    """Write a file of weights atomically."""
    temporary = path.with_name(f".{path.name}.writing")
    temporary.unlink(missing_ok=True)
    write(temporary, tensor_parts(tensors, {"format": "pt"}))
    temporary.replace(path)
