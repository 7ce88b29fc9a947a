"""Checkpoints whose tensors hold the number of their step, for tests and for the processes that tests kill."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ttrain.train.checkpoint import Checkpoints, Snapshot

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "config.json")


def snapshot(step: int, rows: int = 3) -> Snapshot:
    """A state that is all `step`: `rows` x 4 weights, a moment, a count."""
    weights = {"w": torch.full((rows, 4), float(step))}
    optimizer = {
        "m|w": torch.full((rows, 4), -float(step), dtype=torch.bfloat16),
        "step|w": torch.tensor(step),
    }
    return Snapshot(step, weights, optimizer, {"last_loss": 0.5})


def checkpoints(directory: Path, **options: Any) -> Checkpoints:
    number = itertools.count(1)
    return Checkpoints(
        directory, files=lambda: {"config.json": b'{"a": %d}' % next(number)}, **options
    )


def write(
    directory: Path, *steps: int, metrics: Mapping[int, float] | None = None, **options: Any
) -> None:
    ours = checkpoints(directory, **options)
    for step in steps:
        ours.save(snapshot(step), metric=(metrics or {}).get(step))
    ours.close()


def is_snapshot(found: Snapshot | None, step: int) -> bool:
    assert found is not None
    wanted = snapshot(step, len(found.weights["w"]))
    return found.step == step and all(
        [*ours] == [*theirs] and all(torch.equal(ours[name], theirs[name]) for name in theirs)
        for ours, theirs in (
            (dict(sorted(found.weights.items())), wanted.weights),
            (dict(sorted(found.optimizer.items())), wanted.optimizer),
        )
    )


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def steps(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in directory.glob("step-*"))
