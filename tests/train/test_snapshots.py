"""Files of tensors: in the library's own format to the last bit, and what a failing disk does to
them."""

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

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
NUMBERS = torch.rand(3, 5, generator=torch.Generator().manual_seed(1)) * 100
# Every type, and the shapes that break writers; odd lengths, so that offsets matter.
TENSORS = {str(dtype): NUMBERS.to(dtype) for dtype in (*FLOATS, *INTEGERS)} | {
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "one byte": torch.tensor([True]),
    "transposed": NUMBERS.T,
    "every other": NUMBERS[:, ::2],
    "grad": NUMBERS.clone().requires_grad_(),
    "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    'Größe "|\\ 重量': torch.ones(1),
}


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    flat = {name: t.detach().contiguous().view(-1).view(torch.uint8) for name, t in tensors.items()}
    return {name: (t.dtype, t.shape, flat[name].numpy().tobytes()) for name, t in tensors.items()}


def test_the_library_reads_what_is_written_to_the_last_bit(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    entry = checkpoint_format.write(path, tensor_parts(TENSORS, {"format": "pt"}))
    data = path.read_bytes()
    assert bits(safetensors.torch.load_file(path)) == bits(TENSORS)
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert entry == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    of_one_type = {"b.weight": torch.rand(3, 5), "a": torch.rand(7), "b.bias": torch.rand(1)}
    for few, metadata in ((of_one_type, {"format": "pt"}), ({}, None)):
        assert b"".join(tensor_parts(few, metadata)) == safetensors.torch.save(few, metadata)


def test_a_short_write_is_continued_and_an_error_of_the_disk_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, write = {"w": torch.rand(64)}, os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    entry = checkpoint_format.write(tmp_path / "t", tensor_parts(tensors))
    assert torch.equal(safetensors.torch.load_file(tmp_path / "t")["w"], tensors["w"])
    assert entry["sha256"] == hashlib.sha256((tmp_path / "t").read_bytes()).hexdigest()
    monkeypatch.setattr(os, "write", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match=f"'{tmp_path / 'u'}'"):
        checkpoint_format.write(tmp_path / "u", [b"1"])
