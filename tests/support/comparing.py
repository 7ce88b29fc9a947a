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
    *("tokens_per_second", "step_seconds", "data_wait_fraction", "memory_bytes", "mfu"),
    *("eta_seconds", "epoch_time"),
)


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return {*first} == {*second} and all(torch.equal(first[name], second[name]) for name in first)


def with_gradients(
    out: Tensor, upstream: Tensor, leaves: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """`out`, and the gradient of each leaf that it depends on."""
    tensors = [*leaves.values()]
    slopes = torch.autograd.grad(out, tensors, upstream.to(out.dtype), allow_unused=True)
    named = {"out": out.detach(), **dict(zip(leaves, slopes, strict=True))}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def digest(tensors: Mapping[str, Tensor]) -> str:
    data = (tensors[name].numpy().tobytes() for name in sorted(tensors))
    return hashlib.sha256(b"".join(data)).hexdigest()


def distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """The norm of the difference, relative to that of `first`."""

    assert {*first} == {*second}
    ours, theirs = (
        torch.cat([tensors[name].double().flatten() for name in first])
        for tensors in (first, second)
    )
    return float((ours - theirs).norm() / ours.norm())


def worst(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """The largest distance of two tensors of the same name."""
    assert {*first} == {*second}
    return max(distance({name: first[name]}, {name: second[name]}) for name in first)


def curve(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl without what differs between two runs."""
    lines = []
    for line in map(json.loads, path.read_text().splitlines()):
        metrics = {name: line["metrics"][name] for name in line["metrics"].keys() - {*PERFORMANCE}}
        lines.append({"step": line["step"], "metrics": metrics})
    return lines


def logged_steps(lines: list[dict[str, Any]], metric: str) -> list[int]:
    return [line["step"] for line in lines if metric in line["metrics"]]


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
    """Flip a bit as a failing disk may, without a change of the file's times."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
