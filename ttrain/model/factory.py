"""Models from settings: architectures of transformers and our own, initialised under a seed, loaded strictly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from ttrain.config import Model
from ttrain.core.files import read_object
from ttrain.errors import ArtifactError, UsageError
from ttrain.model import initialization, own_architectures
from ttrain.model.architecture import build_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build(config: Model, *, vocab_size: int, ids: dict[str, int], stop_ids: list[int], seed: int) -> PreTrainedModel:
    """A freshly initialised causal language model in fp32. `ids`: bos_token_id, eos_token_id, pad_token_id.

    Raises UsageError, naming the setting, where the architecture cannot be had in these sizes.
    """
    torch.manual_seed(seed)
    model = construct(config, vocab_size=vocab_size, ids=ids)
    initialization.scale_residuals(model, config)
    model.generation_config.eos_token_id = stop_ids
    return model


def construct(config: Model, *, vocab_size: int, ids: dict[str, int]) -> PreTrainedModel:
    """The architecture with its own initialisation; on torch's meta device, within a `torch.device`, it takes no memory."""
    from transformers import AutoModelForCausalLM

    hf = build_config(config, vocab_size=vocab_size, ids=ids)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(hf, dtype=torch.float32)
    except (ValueError, TypeError, RuntimeError, AssertionError, ArithmeticError, AttributeError, LookupError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(
            f"model.kind is {hf.model_type}, which cannot be built in these sizes: {message}; other sizes of it are set "
            f"with model.fields.NAME=value"
        ) from error
    return model


def load(directory: Path, **options: Any) -> PreTrainedModel:
    """A model from its Hugging Face directory, in fp32; one file of weights or several with an index.

    `options` go to `from_pretrained`. Raises ArtifactError that lists every missing, unexpected and mis-shaped tensor.
    """
    from transformers import AutoModelForCausalLM

    try:
        _register(directory)
        model, report = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, output_loading_info=True, local_files_only=True,
            ignore_mismatched_sizes=True,  # they are in the report, which names them
            trust_remote_code=False,  # unset, transformers asks, and takes the first line of a pipe for the answer
            **options,
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        needs_code = "trust_remote_code" in str(error)
        reason = "it needs the code that lies beside its weights, and such code is never run" if needs_code else error
        raise ArtifactError(f"cannot load a model from {directory}: {reason}") from None
    wrong = [
        *(f"missing: {name} {_shape(model, name)}" for name in sorted(report["missing_keys"])),
        *(f"unexpected: {name}" for name in sorted(report["unexpected_keys"])),
        *(
            f"mis-shaped: {name} is {[*has]} but must be {[*wants]}"
            for name, has, wants in sorted(report["mismatched_keys"])
        ),
        *map(str, report["error_msgs"]),
    ]
    if wrong:
        raise ArtifactError(f"the weights in {directory} do not fit their config:\n  " + "\n  ".join(wrong))
    return model


def _register(directory: Path) -> None:
    """Let transformers know our own shapes, where the directory holds one."""
    if read_object(directory / "config.json").get("model_type") in own_architectures.KINDS:
        own_architectures.register()


def _shape(model: PreTrainedModel, name: str) -> list[int]:
    found = model.state_dict().get(name)
    return [] if found is None else [*found.shape]


def files(model: PreTrainedModel) -> dict[str, bytes]:
    """The JSON files beside the weights that make a directory open with `from_pretrained`."""
    config = model.config.to_dict()
    config["architectures"] = [type(model).__name__]
    config.pop("_name_or_path", None)  # where the base lay: a path, and so neither content nor anybody's business
    generation = model.generation_config.to_dict()
    return {
        "config.json": json.dumps(config, indent=2, sort_keys=True).encode(),
        "generation_config.json": json.dumps(generation, indent=2, sort_keys=True).encode(),
        **own_architectures.files(model.config),
    }


def state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Weights by their Hugging Face names; a tied tensor once, under the name of the embedding."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def load_state(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Put weights into the model. Raises ArtifactError where names or shapes differ."""
    overwrite(state(model), weights)


def overwrite(own: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> None:
    """Give a model's own tensors other values, name by name. Raises ArtifactError where names or shapes differ."""
    both = [name for name in own if name in weights]
    wrong = [
        *(f"missing: {name} {[*own[name].shape]}" for name in sorted({*own} - {*weights})),
        *(f"unexpected: {name} {[*weights[name].shape]}" for name in sorted({*weights} - {*own})),
        *(
            f"mis-shaped: {name} is {[*weights[name].shape]} but must be {[*own[name].shape]}"
            for name in both
            if own[name].shape != weights[name].shape
        ),
    ]
    if wrong:
        raise ArtifactError("the checkpoint's weights do not fit the model:\n  " + "\n  ".join(wrong))
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])
