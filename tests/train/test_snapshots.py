"""Snapshots and their files: out of training's way, in memory that stays, in the library's own format, without a copy."""

import errno
import hashlib
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import safetensors
import safetensors.torch
import torch

from ttrain.train import checkpoint_format
from ttrain.train.checkpoint_format import tensor_parts

TYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
)


def samples() -> dict[str, torch.Tensor]:
    """Every type, and the shapes that break writers; odd lengths, so that a type's place depends on those before it."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.rand(3, 5, generator=generator) * 100
    found = {name: numbers.to(getattr(torch, name)) for name in TYPES}
    return {
        **found,
        "scalar": torch.tensor(3.5),
        "step": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "one byte": torch.tensor([True]),
        "transposed": numbers.T,
        "every other": numbers[:, ::2],
        "grad": numbers.clone().requires_grad_(),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        'Größe "|\\ 重量': torch.ones(1),
    }


def bits(tensor: torch.Tensor) -> tuple[Any, Any, bytes]:
    flat = tensor.detach().contiguous().reshape(-1)
    return tensor.dtype, tensor.shape, flat.view(torch.uint8).numpy().tobytes()


def test_the_library_reads_what_is_written_to_the_last_bit(tmp_path: Path) -> None:
    wanted, path = samples(), tmp_path / "t.safetensors"
    entry = checkpoint_format.write(path, tensor_parts(wanted, {"format": "pt"}))
    for found in (safetensors.torch.load_file(path), safetensors.torch.load(path.read_bytes())):
        assert {name: bits(tensor) for name, tensor in found.items()} == {
            name: bits(tensor) for name, tensor in wanted.items()
        }
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert entry == {
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    of_one_type = {"b.weight": torch.rand(3, 5), "a": torch.rand(7), "b.bias": torch.rand(1)}
    for tensors, metadata in ((of_one_type, {"format": "pt"}), ({}, None)):
        assert b"".join(tensor_parts(tensors, metadata)) == safetensors.torch.save(
            tensors, metadata
        ), "byte by byte"


def test_a_write_that_is_cut_short_goes_on_and_an_error_of_the_disk_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, real = {"w": torch.rand(64)}, os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:7]))
    entry = checkpoint_format.write(tmp_path / "t", tensor_parts(wanted))
    assert torch.equal(safetensors.torch.load_file(tmp_path / "t")["w"], wanted["w"])
    assert entry["sha256"] == hashlib.sha256((tmp_path / "t").read_bytes()).hexdigest()
    monkeypatch.setattr(os, "write", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match=f"'{tmp_path / 'u'}'"):
        checkpoint_format.write(tmp_path / "u", [b"1"])
