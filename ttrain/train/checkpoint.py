"""Checkpoints: Hugging Face directories that also hold all that a run needs to continue bit for bit.

`checkpoints/step-00000100/` = weights (safetensors, fp32) with the files that make it open with `from_pretrained`,
`optimizer.safetensors`, and `state.json`, written last, with position, counters, its own digest and that of every other
file. It is written under a temporary name, fsynced and renamed, in a background thread, from a snapshot in memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ttrain.digests import sha256_file
from ttrain.errors import ArtifactError
from ttrain.store import remove_tree, write_json

STATE = "state.json"
OPTIMIZER = "optimizer.safetensors"
WEIGHTS = "model.safetensors"
log = logging.getLogger("ttrain")


@dataclass(frozen=True)
class Snapshot:
    """A run at the end of a step, copied out of the trainer's way."""

    step: int
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    state: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of one run. `keep` newest remain, and those of the steps in `permanent`."""

    def __init__(
        self,
        directory: Path,
        *,
        files: Callable[[], Mapping[str, bytes]],
        weights_file: str = WEIGHTS,
        keep: int = 2,
        permanent: frozenset[int] = frozenset(),
    ) -> None:
        self.directory = directory
        self._files, self._weights_file = files, weights_file
        self._keep, self._permanent = keep, permanent
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(self, snapshot: Snapshot) -> None:
        """Write in the background; waits for the one before, and raises what that one raised."""
        self.wait()
        self._pending = self._pool.submit(self._write, snapshot)

    def wait(self) -> None:
        """Until nothing is being written. Raises OSError where the write failed."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """End the writer thread, after its last write."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def newest(self) -> Snapshot | None:
        """The newest checkpoint whose every byte verifies; a damaged one is named and passed over. None where there is none.

        Raises ArtifactError where there are some and all are damaged: training must not begin anew in silence.
        """
        damaged = []
        for path in sorted(self.directory.glob("step-*"), reverse=True):
            try:
                return read(path, self._weights_file)
            except ArtifactError as error:
                log.warning("%s; the one before it is tried", error)
                damaged.append(str(error))
        if damaged:
            raise ArtifactError(
                f"no checkpoint in {self.directory} is whole: {'; '.join(damaged)}; "
                f"put one back, or delete the directory to train from the start"
            )
        return None

    def _write(self, snapshot: Snapshot) -> None:
        final = self.directory / f"step-{snapshot.step:08d}"
        temporary = self.directory / f".writing-{snapshot.step:08d}"
        self._sweep()
        temporary.mkdir(parents=True)
        contents = {
            **self._files(),
            self._weights_file: save(dict(snapshot.weights), metadata={"format": "pt"}),
            OPTIMIZER: save(dict(snapshot.optimizer)),
        }
        digests = {}
        for name, data in contents.items():
            path = temporary / name
            with path.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            digests[name] = {"bytes": len(data), "sha256": sha256_file(path)}
        state = {**snapshot.state, "step": snapshot.step, "files": digests}
        write_json(temporary / STATE, {**state, "sha256": _digest(state)})
        remove_tree(final)
        temporary.rename(final)
        descriptor = os.open(self.directory, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        self._prune()

    def _sweep(self) -> None:
        """What a process that was killed while it wrote or pruned left behind."""
        for pattern in (".writing-*", ".trash-*"):
            for path in self.directory.glob(pattern):
                remove_tree(path)

    def _prune(self) -> None:
        steps = sorted(self.directory.glob("step-*"))
        for path in steps[: -self._keep]:
            if int(path.name.removeprefix("step-")) not in self._permanent:
                remove_tree(path)


def read(path: Path, weights_file: str = WEIGHTS) -> Snapshot:
    """A checkpoint, verified against its own `state.json`. Raises ArtifactError that names the damaged file."""
    try:
        state = json.loads((path / STATE).read_bytes())
        if state.pop("sha256") != _digest(state) or path.name != f"step-{state['step']:08d}":
            raise ArtifactError(f"the checkpoint file {path / STATE} is damaged")
        for name, entry in state["files"].items():
            file = path / name
            if file.stat().st_size != entry["bytes"] or sha256_file(file) != entry["sha256"]:
                raise ArtifactError(f"the checkpoint file {file} is damaged")
        weights = load((path / weights_file).read_bytes())
        optimizer = load((path / OPTIMIZER).read_bytes())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ArtifactError(f"the checkpoint {path} is damaged: {type(error).__name__}: {error}") from None
    return Snapshot(int(state["step"]), weights, optimizer, state)


def _digest(state: Mapping[str, Any]) -> str:
    """Of the state's own JSON, which unlike a key may hold an infinite figure."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def copy_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A snapshot in CPU memory: contiguous copies that training no longer touches."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
