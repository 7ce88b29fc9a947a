"""Adapters through PEFT: LoRA (arXiv:2106.09685), DoRA (arXiv:2402.09353) and prefixes.

Only the adapter's weights are trained and saved, with the digest of the base's weights.
"""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from peft import (
    LoraConfig,
    PeftConfig,
    PeftModel,
    PeftModelForCausalLM,
    TaskType,
    get_peft_model,
    get_peft_model_state_dict,
)
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ttrain.config import Lora
from ttrain.errors import ArtifactError, UsageError
from ttrain.model import adapter_layers, factory
from ttrain.model.kinds import PRESETS
from ttrain.store.model_files import ADAPTER, ADAPTER_CONFIG, BASE, base_digest_of

NAME = "default"  # PEFT's, of the only adapter

COMPUTED_IN = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16}  # else bf16

log = logging.getLogger("ttrain")


def attach(model: PreTrainedModel, config: Lora) -> PeftModel:
    """Add a new adapter to a model and freeze everything else.

    Raises UsageError for unknown targets, or some that cannot be adapted so.
    """
    # LoRA and DoRA begin with A random under the seed and B zero, a prefix with random keys and
    # values.
    torch.manual_seed(config.seed)
    if config.kind == "prefix":
        with without_warnings_of_peft():
            return adapter_layers.attach(model, config)
    targets = find_targets(model, config.targets)
    weight_names = ", ".join(
        sorted({name.removesuffix(".weight").rpartition(".")[2] for name in targets.parameters})
    )
    for key, value in (("kind", config.kind), ("dropout", config.dropout)):
        if targets.parameters and value not in ("lora", 0):
            raise UsageError(
                f"lora.{key} is {value}, which PEFT does not offer for the layers of a mixture of "
                f"experts ({weight_names}); set lora.{key}={'lora' if key == 'kind' else 0}, or "
                "lora.targets=attention"
            )
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        use_dora=config.kind == "dora",
        target_modules=list(targets.layer_suffixes),
        target_parameters=list(targets.parameter_suffixes) or None,
        fan_in_fan_out=targets.transposed,
        task_type=TaskType.CAUSAL_LM,
        bias="none",
    )
    if config.kind == "lora" and not getattr(model, "is_quantized", False):
        # Not written to adapter_config.json.
        settings._register_custom_module({torch.nn.Linear: adapter_layers.FusedLinear})
    with without_warnings_of_peft():
        return get_peft_model(model, settings)


@contextlib.contextmanager
def without_warnings_of_peft() -> Iterator[None]:
    """Hide PEFT's warnings that no user can change."""
    with warnings.catch_warnings():
        # Where a model has both kinds of layers.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        # PEFT 0.21.2, its newest version, asks transformers 5.23 by a name that is to go.
        warnings.filterwarnings(
            "ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning
        )
        yield


def state(model: PeftModel) -> dict[str, torch.Tensor]:
    """The weights of the adapter, under the names that PEFT saves."""
    if model.peft_config[NAME].is_prompt_learning:  # PEFT would return a copy
        return {"prompt_embeddings": model.prompt_encoder[NAME].embedding.weight}
    return dict(get_peft_model_state_dict(model, save_embedding_layers=False))


def files(
    model: PeftModel, *, base: str, base_digest: str, held_in: str | None = None
) -> dict[str, bytes]:
    """`adapter_config.json`, PEFT's, and `base.json`, with the digest of the base's weights.

    `held_in`: the base's quantization during training; None: not quantized.
    """
    settings = {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in model.peft_config[NAME].to_dict().items()
    }
    settings |= {"base_model_name_or_path": base, "inference_mode": True}
    ours = {"base_weights_sha256": base_digest, **({"base_held_in": held_in} if held_in else {})}
    return {
        ADAPTER_CONFIG: json.dumps(settings, indent=2, sort_keys=True, default=str).encode(),
        BASE: json.dumps(ours, indent=2).encode(),
    }


# --- existing adapters ---
def load(base: PreTrainedModel, directory: Path, base_digest: str) -> PeftModel:
    """The base with the adapter of `directory`, frozen. `base_digest`: of the base's weights.

    Raises ArtifactError if it was trained on another base, or its weights do not fit.
    """
    if (expected_digest := base_digest_of(directory)) is None:
        log.warning(
            "the adapter %s does not say on which base it was trained; only names and shapes are "
            "checked",
            directory,
        )
    elif expected_digest != base_digest:
        raise ArtifactError(
            f"the adapter {directory} was trained on the base {expected_digest[:12]}, not on "
            f"{base_digest[:12]}"
        )
    try:
        settings = PeftConfig.from_pretrained(str(directory))
        weights = load_file(directory / ADAPTER)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ArtifactError(
            f"cannot read {ADAPTER_CONFIG} and {ADAPTER} of {directory}: {error}"
        ) from None
    settings.inference_mode = True
    kind: Any = adapter_layers.PrefixModel if settings.is_prompt_learning else PeftModelForCausalLM
    try:
        with without_warnings_of_peft():
            model: PeftModel = kind(base, settings)
    except (ValueError, RuntimeError) as error:
        raise ArtifactError(f"the adapter {directory} does not fit the model: {error}") from None
    factory.need_finite(weights, str(directory / ADAPTER))
    factory.overwrite(state(model), weights)
    model.requires_grad_(False)
    return model


def merge(model: PeftModel) -> PreTrainedModel:
    """Merge the adapter into the base's weights; logits stay the same up to rounding.

    Raises UsageError for a prefix, which does not change weights.
    """
    if model.active_peft_config.is_prompt_learning:
        raise UsageError(
            "a prefix cannot be merged: it does not change the base's weights but adds keys and "
            "values before every text; keep it as an adapter, or train one with lora.kind=lora"
        )
    return model.merge_and_unload(safe_merge=True)


ALL_LINEAR, ATTENTION = PRESETS


@dataclass(frozen=True)
class AdapterTargets:
    """Suffixes for PEFT that match exactly the weights in `layers` and `parameters`.

    `parameters` are adapted directly, without a layer: mostly stacked experts.
    """

    layers: frozenset[str]
    parameters: frozenset[str]
    layer_suffixes: tuple[str, ...]
    parameter_suffixes: tuple[str, ...]
    transposed: bool  # whether any is GPT-2's Conv1D, whose weight is [in, out]


def find_targets(model: PreTrainedModel, names: Sequence[str]) -> AdapterTargets:
    """The targets that `lora.targets` names. Raises UsageError for an unknown one.

    `all-linear`: every linear layer and stack of experts but the output head (arXiv:2305.14314,
    section 4); `attention`: the linear layers within attention; else the last parts of a name, such
    as q_proj or mlp.down_proj.
    """
    linear = linear_layers(model)
    stacked = expert_stacks(model)
    head_layer = model.get_output_embeddings()
    head = next((name for name, layer in linear.items() if layer is head_layer), None)
    body = [name for name in linear if name != head]
    # Every architecture of transformers has "attention" in the names of such classes.
    modules = model.named_modules()
    blocks = [f"{n}." for n, module in modules if "attention" in type(module).__name__.lower()]
    attention = [name for name in body if name.startswith(tuple(blocks))]
    presets = {ALL_LINEAR: [*body, *stacked], ATTENTION: attention}
    matches = {
        name: presets[name] if name in presets else _matching([*linear, *stacked], name)
        for name in names
    }
    targets = set().union(*matches.values())
    if unknown := [name for name in names if not matches[name]]:
        choices = sorted({full.rpartition(".")[2] for full in (*linear, *stacked)})
        raise UsageError(
            f"lora.targets names {', '.join(unknown)}, but the model's linear layers are "
            f"{', '.join(choices)}; name some of them, or write {' or '.join(PRESETS)}"
        )
    if head in targets and model.config.get_text_config().tie_word_embeddings:
        raise UsageError(
            f"lora.targets names the output head {head}, but model.tie_embeddings makes it the "
            "embedding too, which an adapter must not change; remove it from lora.targets"
        )
    # PEFT takes some names for the experts' names of transformers 4, and would adapt the stacked
    # experts at twice the rank, so that shared experts and dense layers would get no adapter. Given
    # the parameter instead of the layer, it adapts them.
    names_of_layers = {name.rpartition(".")[2] for name in linear}
    probe = LoraConfig(target_modules=sorted(names_of_layers))
    convert_peft_config_for_transformers(probe, model, None)
    renamed = names_of_layers - {*(probe.target_modules or ())}
    layers = {name for name in targets - {*stacked} if name.rpartition(".")[2] not in renamed}
    parameters = {f"{name}.weight" if name in linear else name for name in targets - layers}
    return AdapterTargets(
        frozenset(layers),
        frozenset(parameters),
        _shortest_suffixes(layers, [name for name, _ in model.named_modules()]),
        _shortest_suffixes(parameters, [name for name, _ in model.named_parameters()]),
        not all(isinstance(linear[name], nn.Linear) for name in layers),
    )


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every linear layer by its full name, with the output head."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | Conv1D)
    }


def expert_stacks(model: nn.Module) -> list[str]:
    """Full names of weights [experts, out, in] that belong to no layer of torch."""
    return [
        f"{name}.{parameter}"
        for name, module in model.named_modules()
        if not type(module).__module__.startswith("torch.nn")
        for parameter, weight in module.named_parameters(recurse=False)
        if weight.ndim == 3
    ]


def _shortest_suffixes(targets: set[str], everything: Iterable[str]) -> tuple[str, ...]:
    others = {*everything} - targets
    suffixes = set()
    for name in targets:
        parts = name.split(".")
        ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        suffixes.add(next(end for end in ends if not _matching(others, end)))
    return tuple(sorted(suffixes))


def _matching(names: Iterable[str], suffix: str) -> list[str]:
    return [name for name in names if name == suffix or name.endswith(f".{suffix}")]


def load_quantized(directory: Path, config: Lora) -> PreTrainedModel:
    """Load the base model as `lora.quantize` says: fp32, or linear layers in NF4 or int8.

    Embeddings, norms, output head and stacked experts stay in fp32. Raises UsageError without
    bitsandbytes.
    """
    if config.quantize == "none":
        return factory.load(directory)
    if find_spec("bitsandbytes") is None:
        raise UsageError(
            f"lora.quantize is {config.quantize}, which needs bitsandbytes; install it with: pip "
            "install bitsandbytes, or set lora.quantize=none"
        )
    # A line per layer and pass on a CPU.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    settings = BitsAndBytesConfig(
        load_in_8bit=config.quantize == "int8",
        load_in_4bit=config.quantize == "nf4",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=COMPUTED_IN.get(config.precision, torch.bfloat16),
    )
    model = factory.load(directory, quantization_config=settings)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # Otherwise the first validation packs the weights for inference, and later steps get no
            # gradient through them.
            module.support_avx512bf16_for_cpu = False
    if all(p.is_floating_point() for p in model.parameters()):
        raise UsageError(
            f"lora.quantize is {config.quantize}, but the model {model.config.model_type} has no "
            "linear layer that bitsandbytes can quantize so; set lora.quantize=none"
        )
    return model
