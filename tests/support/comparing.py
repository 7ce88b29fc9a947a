"""Compares tensors and curves, counts the bytes of a forward pass, damages a file."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Metrics that differ between two runs of the same training.
PERFORMANCE = (
    "tokens_per_second",
    "step_seconds",
    "data_wait_fraction",
    "memory_bytes",
    "mfu",
    "eta_seconds",
    "epoch_time",
)


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return {*first} == {*second} and all(torch.equal(first[name], second[name]) for name in first)


def with_gradients(
    out: Tensor, upstream: Tensor, leaves: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """What was computed, and the gradient of each leaf that it depends on."""
    found = torch.autograd.grad(out, [*leaves.values()], upstream.to(out.dtype), allow_unused=True)
    slopes = {name: slope for name, slope in zip(leaves, found, strict=True) if slope is not None}
    return {"out": out.detach(), **slopes}


def digest(tensors: Mapping[str, Tensor]) -> str:
    return hashlib.sha256(
        b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))
    ).hexdigest()


def distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    assert {*first} == {*second}
    difference = sum(
        float((first[name].double() - second[name].double()).square().sum()) for name in first
    )
    return (
        difference / sum(float(tensor.double().square().sum()) for tensor in first.values())
    ) ** 0.5


def curve(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    timed = {*PERFORMANCE}
    return [
        {
            "step": line["step"],
            "metrics": {k: v for k, v in line["metrics"].items() if k not in timed},
        }
        for line in lines
    ]


def logged_steps(lines: list[dict[str, Any]], figure: str) -> list[int]:
    return [line["step"] for line in lines if figure in line["metrics"]]


def bytes_kept(run: Callable[[], object]) -> int:
    """Bytes of the tensors that a forward pass keeps for its backward pass, each storage once."""
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def flip_bit(path: Path) -> None:
    """As a disk may do: one bit is another, and no time tells."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(times.st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
