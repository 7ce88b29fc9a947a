"""Checkpoints whose tensors hold the number of their step."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from support.comparing import same

from ttrain.train.checkpoint import Checkpoints, Snapshot

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "config.json")


def snapshot(step: int, rows: int = 3) -> Snapshot:
    """A state that is all `step`: `rows` x 4 weights, a moment, a count."""
    weights = {"w": torch.full((rows, 4), float(step))}
    moment = torch.full((rows, 4), -float(step), dtype=torch.bfloat16)
    optimizer = {"m|w": moment, "step|w": torch.tensor(step)}
    return Snapshot(step, weights, optimizer, {"last_loss": 0.5})


def checkpoints(directory: Path, **options: Any) -> Checkpoints:
    texts = (b'{"a": %d}' % number for number in itertools.count(1))
    return Checkpoints(directory, files=lambda: {"config.json": next(texts)}, **options)


def write(
    directory: Path, *steps: int, metrics: Mapping[int, float] | None = None, **options: Any
) -> None:
    ours = checkpoints(directory, **options)
    for step in steps:
        ours.save(snapshot(step), metric=(metrics or {}).get(step))
    ours.close()


def is_snapshot(found: Snapshot | None, step: int) -> bool:
    assert found is not None
    expected = snapshot(step, len(found.weights["w"]))
    is_equal = same(found.weights, expected.weights) and same(found.optimizer, expected.optimizer)
    return found.step == step and is_equal


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def steps(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in directory.glob("step-*"))
