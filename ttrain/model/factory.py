"""Models from settings: initialised under a seed, or loaded strictly."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from ttrain.config import Model
from ttrain.core.files import read_object
from ttrain.core.text import first_of
from ttrain.errors import ArtifactError, UsageError
from ttrain.model import kinds
from ttrain.model.architecture import build_config
from ttrain.store.model_files import INDEX_SUFFIX, MODEL, shard_names

Tensors = Mapping[str, torch.Tensor]
Shape = Sequence[int]
# What architectures raise where their config contradicts itself; transformers checks it by such
# dataclasses.
BUILD_ERRORS = (
    *(ValueError, TypeError, RuntimeError, AssertionError, ArithmeticError, AttributeError),
    *(LookupError, StrictDataclassError),
)


# Last name parts of weights that write into the residual stream: outputs of attention and of the
# feed-forward layer.
RESIDUAL = frozenset(
    {
        "o_proj",
        "down_proj",
        "c_proj",
        "out_proj",
        "dense",
        "dense_4h_to_h",
        "fc2",
        "fc_out",
        "w2",
        "wo",
        "Wo",
        "linear_out",
        "proj_down",
    }
)
# Name parts of weights that are named alike but write elsewhere: a first matrix, a head, a router,
# a norm.
NOT_RESIDUAL = frozenset(
    {
        "intermediate",
        "transform",
        "lm_head",
        "predictions",
        "generator_predictions",
        "gate",
        "router_mlp",
        "input_layernorm",
    }
)


def build(
    config: Model, *, vocab_size: int, ids: dict[str, int], stop_ids: list[int], seed: int
) -> PreTrainedModel:
    """Build a new causal language model in fp32. `ids`: bos_token_id, eos_token_id, pad_token_id.

    Raises UsageError if the architecture cannot have these sizes.
    """
    hf = build_config(config, vocab_size=vocab_size, ids=ids)
    torch.manual_seed(seed)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(hf, dtype=torch.float32)
    except BUILD_ERRORS as error:
        raise UsageError(
            f"model.kind is {hf.model_type}, which cannot be built in these sizes: "
            f"{_reason(error)}; set other sizes of it with model.fields.NAME=value"
        ) from error
    scale_residuals(model, config)
    model.generation_config.eos_token_id = stop_ids
    return model


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"there is no {text}" if isinstance(error, KeyError) else text or type(error).__name__


def load(directory: Path, **options: Any) -> PreTrainedModel:
    """Load a model from its Hugging Face directory, in fp32.

    `options` go to `from_pretrained`. Raises ArtifactError that lists every missing, unexpected and
    mis-shaped tensor.
    """
    if (
        not (directory / MODEL).is_file()
        and (index := directory / (MODEL + INDEX_SUFFIX)).is_file()
    ):
        shard_names(index)  # which transformers opens wherever they lead
    # transformers would load this adapter too, even from a pickle.
    if (directory / "adapter_config.json").exists():
        raise ArtifactError(
            f"{directory} holds a model and an adapter; move the adapter_config.json to another "
            "directory"
        )
    try:
        if read_object(directory / "config.json").get("model_type") in kinds.OWN_KINDS:
            kinds.register_own()
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            output_loading_info=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # they are in the report, which names them
            use_safetensors=True,  # never a pickle
            # If unset, transformers prompts, and reads a line of standard input as the answer.
            trust_remote_code=False,
            **options,
        )
    except (OSError, SafetensorError, *BUILD_ERRORS) as error:
        never = "it needs the code beside its weights, which ttrain never runs"
        reason = never if "trust_remote_code" in str(error) else _reason(error)
        raise ArtifactError(f"cannot load a model from {directory}: {reason}") from None
    shapes = _shapes(model.state_dict())
    missing = {name: shapes.get(name, []) for name in report["missing_keys"]}
    wrong = [
        *_misfits(missing, report["unexpected_keys"], report["mismatched_keys"]),
        *map(str, report["error_msgs"]),
    ]
    if wrong:
        raise ArtifactError(
            f"the weights in {directory} do not fit their config:\n  " + "\n  ".join(wrong)
        )
    need_finite(dict(model.named_parameters()), str(directory))
    return model


def need_finite(weights: Tensors, place: str) -> None:
    """Raise ArtifactError if weights hold NaN or infinite numbers, which spoil every result."""
    wrong = [
        name
        for name, tensor in weights.items()
        if tensor.is_floating_point()
        and tensor.numel()
        # aminmax makes no copy; if the tensor has a NaN, minimum and maximum are NaN.
        and not torch.stack(torch.aminmax(tensor.detach())).isfinite().all()
    ]
    if wrong:
        raise ArtifactError(
            f"{len(wrong)} of the {len(weights)} weights in {place} hold numbers that are not "
            f"finite ({first_of(wrong, 3)}), so that the model can answer nothing; train it "
            "again, or use another one"
        )


def files(model: PreTrainedModel) -> dict[str, bytes]:
    """The JSON files, apart from the weights, with which `from_pretrained` opens a directory."""
    config = model.config.to_dict()
    config["architectures"] = [type(model).__name__]
    config.pop("_name_or_path", None)  # the base's local path: not content, and private
    return {
        "config.json": json.dumps(config, indent=2, sort_keys=True).encode(),
        "generation_config.json": json.dumps(
            model.generation_config.to_dict(), indent=2, sort_keys=True
        ).encode(),
        **kinds.own_files(model.config),
    }


def state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Weights by their Hugging Face names; tied tensors once, as the embedding."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def overwrite(own_tensors: Tensors, weights: Tensors) -> None:
    """Overwrite a model's own tensors by name. Raises ArtifactError if names or shapes differ."""
    own = _shapes(own_tensors)
    given = _shapes(weights)
    missing = {name: own[name] for name in own.keys() - given}
    reshaped = [
        (name, given[name], own[name]) for name in own.keys() & given if own[name] != given[name]
    ]
    if wrong := _misfits(missing, given.keys() - own, reshaped):
        raise ArtifactError(
            "the checkpoint's weights do not fit the model:\n  " + "\n  ".join(wrong)
        )
    with torch.no_grad():
        for name, tensor in own_tensors.items():
            tensor.copy_(weights[name])


def _shapes(tensors: Tensors) -> dict[str, Shape]:
    return {name: [*tensor.shape] for name, tensor in tensors.items()}


def _misfits(
    missing: Mapping[str, Shape],
    unexpected: Iterable[str],
    reshaped: Iterable[tuple[str, Shape, Shape]],
) -> list[str]:
    """A line per weight that does not fit. `reshaped`: (name, its shape, the model's)."""
    return [
        *(f"missing: {name} {missing[name]}" for name in sorted(missing)),
        *(f"unexpected: {name}" for name in sorted(unexpected)),
        *(
            f"mis-shaped: {name} is {[*shape]} but must be {[*wanted]}"
            for name, shape, wanted in sorted(reshaped)
        ),
    ]


def count_parameters(model: torch.nn.Module, *, trained: bool = False) -> int:
    """The number of parameters, or only of trained ones."""
    return sum(
        parameter.numel()
        for parameter in model.parameters()
        if parameter.requires_grad or not trained
    )


def scale_residuals(model: PreTrainedModel, config: Model) -> None:
    """If set, redraw weights that write into the residual stream: init_std / sqrt(2 layers).

    Raises UsageError if the architecture has no weight with a known name of this kind.
    """
    # So its variance does not grow with depth (GPT-2, Radford et al. 2019, section 2.3).
    if not config.scaled_residuals:
        return
    weights = residual_weights(model)
    if not weights:
        raise UsageError(
            "model.scaled_residuals is set, but it is not known which weights of "
            f"{model.config.model_type} write into the residual stream; remove the setting"
        )
    for weight in weights.values():
        torch.nn.init.normal_(weight, std=config.init_std / (2 * config.layers) ** 0.5)


def residual_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Weights that write into the residual stream, by name; experts' are stacked."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2
        and (parts := name.removesuffix(".weight").split("."))[-1] in RESIDUAL
        and NOT_RESIDUAL.isdisjoint(parts)
    }
