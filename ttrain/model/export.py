"""The weights of an export: loaded strictly, merged, in the type asked for, in shards. What it cannot hold is an error."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ttrain.errors import ArtifactError, UsageError
from ttrain.model import adapters, factory
from ttrain.store.weights import weights_digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def load(model: Path, adapter: Path | None) -> PreTrainedModel:
    """The model of a directory in fp32, with the adapter merged into its weights where there is one.

    Raises ArtifactError for keys that are missing, unexpected or mis-shaped, and for another adapter's base.
    """
    base = factory.load(model)
    if adapter is None:
        return base
    return adapters.merge(adapters.load(base, adapter, weights_digest(model)))


def write(model: PreTrainedModel, target: Path, *, dtype: str, shard_bytes: int) -> int:
    """Write config, generation config and shards of at most so many bytes, as `save_pretrained` does; the model is spent.

    Parameters are cast, but for those that transformers itself would hold in fp32, such as the bias of a router; buffers
    stay. Experts get the names that other programs expect of them. Returns the number of parameters. Raises ArtifactError
    where a weight is no number, UsageError where the type cannot hold it.
    """
    parameters = dict(model.named_parameters())  # a tied one once
    for name, parameter in parameters.items():
        is_kept = any(f".{kept}." in f".{name}." for kept in model._keep_in_fp32_modules_strict or ())
        parameter.data = cast(name, parameter.data, "fp32" if is_kept else dtype)
    # Otherwise names go back to those of the file that was read; without it, to those that the architecture is known by:
    # three matrices an expert, where transformers holds all experts of a layer in two tensors.
    model._weight_conversions = None
    model.save_pretrained(target, max_shard_size=shard_bytes)
    return sum(parameter.numel() for parameter in parameters.values())


def write_tensors(source: Path, target: Path, *, dtype: str) -> int:
    """Write a file of tensors, such as an adapter's, in another type; returns how many numbers it holds."""
    tensors = {name: cast(name, tensor, dtype).contiguous() for name, tensor in load_file(source).items()}
    save_file(tensors, target, metadata={"format": "pt"})
    return _numbers(tensors.values())


def cast(name: str, tensor: Tensor, dtype: str) -> Tensor:
    """The tensor in another type; integers stay. Raises where a value is no number, or is too large for the type."""
    if not tensor.is_floating_point():
        return tensor
    found = tensor.to(DTYPES[dtype])
    if not bool(torch.isfinite(found).all()):
        if not bool(torch.isfinite(tensor).all()):
            raise ArtifactError(f"the tensor {name} holds a value that is no number; such a model cannot be used")
        limit = torch.finfo(DTYPES[dtype]).max
        raise UsageError(
            f"--dtype is {dtype}, which holds numbers up to {limit:g}, but the tensor {name} reaches "
            f"{float(tensor.abs().max()):g}; use --dtype {'fp32' if dtype == 'bf16' else 'bf16'}"
        )
    return found


def _numbers(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
