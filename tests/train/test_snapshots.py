"""Files of tensors in the library's own format, to the last bit, also after short writes."""

import hashlib
import os
from pathlib import Path

import pytest
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
    "transposed": NUMBERS.T,
    "every other": NUMBERS[:, ::2],
    "grad": NUMBERS.clone().requires_grad_(),
    "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    'Größe "|\\ 重量': torch.tensor([True]),
}


def test_the_library_reads_what_is_written_to_the_last_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "t.safetensors", os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:99]))
    entry = checkpoint_format.write(path, tensor_parts(TENSORS, {"format": "pt"}))
    data, loaded = path.read_bytes(), safetensors.torch.load_file(path)
    assert entry == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert {*loaded} == {*TENSORS}
    for name, tensor in TENSORS.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        bits = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (tensor, loaded[name])]
        assert torch.equal(*bits), name
    of_one_type = {"b.weight": torch.rand(3, 5), "a": torch.rand(7), "b.bias": torch.rand(1)}
    for few, metadata in ((of_one_type, {"format": "pt"}), ({}, None)):
        assert b"".join(tensor_parts(few, metadata)) == safetensors.torch.save(few, metadata)
