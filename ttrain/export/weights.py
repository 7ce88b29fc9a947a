"""Write the weights of a model or an adapter in a type. Loads torch if called."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ttrain.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # names in torch


def write(model: PreTrainedModel, target: Path, *, dtype: str, shard_size: str) -> int:
    """Write config, generation config and shards of at most `shard_size`; returns the parameters.

    Raises UsageError if a weight is too large for the type.
    """
    # transformers casts the parameters, except those that it keeps in fp32, such as the bias of a
    # router, and buffers.
    import torch
    from transformers import AutoModelForCausalLM

    parameters = dict(model.named_parameters())  # tied ones once
    for name, parameter in parameters.items():
        cast(name, parameter.data, dtype)
    config = model.config
    generation_config = model.generation_config
    kind = getattr(torch, DTYPES[dtype])
    model = type(model).from_pretrained(
        None, config=config, state_dict=model.state_dict(), dtype=kind
    )
    # save_pretrained gives a loaded model the tensor names of the file it was loaded from, and a
    # model built from its config the architecture's standard names (three matrices per expert,
    # where transformers holds all experts of a layer in two tensors). The latter are wanted here.
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config, dtype=kind)
    made.load_state_dict(model.state_dict(), assign=True)
    made.tie_weights()
    made.generation_config = generation_config
    made.save_pretrained(target, max_shard_size=shard_size.upper())
    return sum(parameter.numel() for parameter in parameters.values())


def write_tensors(source: Path, target: Path, *, dtype: str) -> int:
    """Write a file of tensors in another type; returns its number of elements."""
    from safetensors.torch import load_file, save_file

    tensors = {
        name: cast(name, tensor, dtype).contiguous() for name, tensor in load_file(source).items()
    }
    save_file(tensors, target, metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in tensors.values())


def cast(name: str, tensor: Tensor, dtype: str) -> Tensor:
    """Cast a tensor to another type; integers stay.

    Raises ArtifactError if a value is not finite, UsageError if it is too large for the type.
    """
    import torch

    if not tensor.is_floating_point():
        return tensor
    kind = getattr(torch, DTYPES[dtype])
    cast_tensor = tensor.to(kind)
    if not cast_tensor.isfinite().all():
        if not tensor.isfinite().all():
            raise ArtifactError(
                f"the tensor {name} holds a value that is NaN or infinite; "
                "such a model cannot be used"
            )
        raise UsageError(
            f"--dtype is {dtype}, which holds numbers up to {torch.finfo(kind).max:g}, "
            f"but the tensor {name} reaches "
            f"{float(tensor.abs().max()):g}; use --dtype {'fp32' if dtype == 'bf16' else 'bf16'}"
        )
    return cast_tensor
