"""Adapters through PEFT: LoRA (arXiv:2106.09685), DoRA (arXiv:2402.09353) and prefixes; the base stays as it is.

Only the adapter's weights are trained and saved, with the digest of the base's weights beside them.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ttrain.config import Lora
from ttrain.core.files import parse_json
from ttrain.errors import ArtifactError, UsageError
from ttrain.model import adapter_targets
from ttrain.model.factory import overwrite
from ttrain.store.weights import ADAPTER

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel

WEIGHTS = ADAPTER
CONFIG, BASE = "adapter_config.json", "base.json"
NAME = "default"
log = logging.getLogger("ttrain")


def attach(model: PreTrainedModel, config: Lora) -> PeftModel:
    """The model with a fresh adapter on it; all else is frozen.

    LoRA and DoRA begin with A random under the seed and B zero, so that nothing changes yet; a prefix begins with random
    keys and values. Raises UsageError for targets that the model has not, or that cannot be adapted so.
    """
    torch.manual_seed(config.seed)
    if config.kind == "prefix":
        from ttrain.model import prefix

        return prefix.attach(model, config)
    return _attach_low_rank(model, config)


def _attach_low_rank(model: PreTrainedModel, config: Lora) -> PeftModel:
    from peft import LoraConfig, TaskType, get_peft_model

    from ttrain.model.lora_linear import FusedLinear

    found = adapter_targets.find(model, config.targets)
    _check_parameters(found, config)
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        use_dora=config.kind == "dora",
        target_modules=list(found.layer_suffixes),
        target_parameters=list(found.parameter_suffixes) or None,
        fan_in_fan_out=found.transposed,
        task_type=TaskType.CAUSAL_LM,
        bias="none",
    )
    if config.kind == "lora" and not getattr(model, "is_quantized", False):
        settings._register_custom_module({torch.nn.Linear: FusedLinear})  # not written to adapter_config.json
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # where a model has both kinds of layers
        adapted = get_peft_model(model, settings)
    _check_adapted(adapted, found)
    return adapted


def _check_parameters(found: adapter_targets.Targets, config: Lora) -> None:
    """Weights that are adapted as they stand, stacks of experts above all, are adapted by plain LoRA only."""
    named = ", ".join(sorted({name.removesuffix(".weight").rpartition(".")[2] for name in found.parameters}))
    for key, value in (("kind", config.kind), ("dropout", config.dropout)):
        if found.parameters and value not in ("lora", 0):
            raise UsageError(
                f"lora.{key} is {value}, which PEFT does not offer for the layers of a mixture of experts ({named}); "
                f"set lora.{key}={'lora' if key == 'kind' else 0}, or lora.targets=attention"
            )


def _check_adapted(model: PeftModel, found: adapter_targets.Targets) -> None:
    """That PEFT put adapters where it was told to, and nowhere else."""
    adapted = {
        name.removeprefix("base_model.model.").rpartition(".lora_A")[0].replace(".base_layer", "")
        for name, _ in model.named_parameters() if ".lora_A." in name
    }  # fmt: skip
    expected = found.layers | {name.rpartition(".")[0] for name in found.parameters}
    assert adapted == expected, f"PEFT adapted {sorted(adapted ^ expected)} otherwise than asked for"


def state(model: PeftModel, name: str = NAME) -> dict[str, torch.Tensor]:
    """The weights of the adapter called `name`, under the names that PEFT saves."""
    from peft import get_peft_model_state_dict

    if model.peft_config[name].is_prompt_learning:
        from ttrain.model import prefix

        return {"prompt_embeddings": prefix.weight(model, name)}  # PEFT would give a copy
    weights: dict[str, torch.Tensor] = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    return weights


def load_state(model: PeftModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Put an adapter's weights into the model. Raises ArtifactError where names or shapes differ."""
    overwrite(state(model), weights)


def files(model: PeftModel, *, base: str, base_digest: str, held_in: str | None = None) -> dict[str, bytes]:
    """`adapter_config.json`: rank, alpha, targets, the base's name; `base.json`: the digest of the base's weights.

    `held_in`: how the base was quantized meanwhile; None: it was not.
    """
    settings: dict[str, Any] = model.peft_config[NAME].to_dict()
    settings = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
    settings["base_model_name_or_path"] = base
    settings["inference_mode"] = True
    ours = {"base_weights_sha256": base_digest, **({"base_held_in": held_in} if held_in else {})}
    return {
        CONFIG: json.dumps(settings, indent=2, sort_keys=True, default=str).encode(),
        BASE: json.dumps(ours, indent=2).encode(),
    }


# --- adapters that are there ------------------------------------------------------------------------------------------


def load(base: PreTrainedModel, directory: Path, base_digest: str, name: str = NAME) -> PeftModel:
    """The base with the adapter of `directory`, frozen. `base_digest`: `ttrain.store.weights.weights_digest` of the base.

    Raises ArtifactError where it was trained on another base, or where its weights do not fit.
    """
    from peft import PeftModelForCausalLM

    check_base(directory, base_digest)
    settings = _settings(directory)
    kind: Any = PeftModelForCausalLM
    if settings.is_prompt_learning:
        from ttrain.model.prefix import PrefixModel

        kind = PrefixModel
    try:
        model: PeftModel = kind(base, settings, adapter_name=name)
    except (ValueError, RuntimeError) as error:
        raise ArtifactError(f"the adapter {directory} does not fit the model: {error}") from None
    _fill(model, directory, name)
    return model


def add(model: PeftModel, directory: Path, base_digest: str, name: str) -> None:
    """Load another adapter of the same base under a name of its own; `switch` makes it the one that counts.

    Raises ArtifactError as `load`, UsageError where it is of another kind than those that are there.
    """
    check_base(directory, base_digest)
    if name in model.peft_config:
        raise UsageError(f"there is an adapter '{name}' already; give the adapter {directory} another name")
    try:
        model.add_adapter(name, _settings(directory))
    except ValueError as error:
        raise UsageError(f"the adapter {directory} cannot stand beside {', '.join(model.peft_config)}: {error}") from None
    _fill(model, directory, name)


def switch(model: PeftModel, name: str) -> None:
    """Let the adapter called `name` count, and no other; `with model.disable_adapter():` lets none."""
    if name not in model.peft_config:
        raise UsageError(f"there is no adapter '{name}'; there are {', '.join(model.peft_config)}")
    model.set_adapter(name, inference_mode=True)


def merge(model: PeftModel) -> PreTrainedModel:
    """The base with the adapter added to its weights, once and for all; the logits stay, up to rounding.

    Raises UsageError for a prefix, which is no change of weights, ArtifactError where a weight becomes no number.
    """
    if model.active_peft_config.is_prompt_learning:
        raise UsageError(
            "a prefix cannot be merged: it is no change of the base's weights but keys and values before every text; "
            "keep it as an adapter, or train one with lora.kind=lora"
        )
    try:
        merged: PreTrainedModel = model.merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise ArtifactError(f"the adapter cannot be merged: {error}") from None
    return merged


def check_base(directory: Path, base_digest: str) -> None:
    """Raise ArtifactError where the adapter was trained on other weights. One that does not say on which is taken."""
    path = directory / BASE
    if not path.is_file():
        log.warning("the adapter %s does not say on which base it was trained; its names and shapes must do", directory)
        return
    try:
        wanted = str(parse_json(path.read_bytes())["base_weights_sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path}, which names the adapter's base, is damaged: {error}") from None
    if wanted != base_digest:
        raise ArtifactError(f"the adapter {directory} was trained on the base {wanted[:12]}, not on {base_digest[:12]}")


def _settings(directory: Path) -> PeftConfig:
    from peft import PeftConfig

    try:
        settings = PeftConfig.from_pretrained(str(directory))
    except (OSError, ValueError, TypeError) as error:
        raise ArtifactError(f"cannot read {directory / CONFIG}: {error}") from None
    settings.inference_mode = True
    return settings


def _fill(model: PeftModel, directory: Path, name: str) -> None:
    try:
        weights = load_file(directory / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"cannot read {directory / WEIGHTS}: {error}") from None
    overwrite(state(model, name), weights)
    model.requires_grad_(False)
