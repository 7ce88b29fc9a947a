"""Low-rank adapters (LoRA, arXiv:2106.09685) through PEFT; only the adapter's weights are trained and saved."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ttrain.config import Lora
from ttrain.errors import ArtifactError, UsageError
from ttrain.model.factory import overwrite

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

WEIGHTS = "adapter_model.safetensors"


def attach(model: PreTrainedModel, config: Lora) -> PeftModel:
    """The model with a fresh adapter: A random under the seed, B zero, so that nothing changes yet; the base is frozen."""
    from peft import LoraConfig, TaskType, get_peft_model

    from ttrain.model.lora_linear import FusedLinear

    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    unknown = sorted(set(config.targets) - linear)
    if unknown:
        raise UsageError(
            f"lora.targets names {', '.join(unknown)}, but the model's linear layers are {', '.join(sorted(linear))}"
        )
    torch.manual_seed(config.seed)
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=list(config.targets),
        task_type=TaskType.CAUSAL_LM,
        bias="none",
    )
    settings._register_custom_module({torch.nn.Linear: FusedLinear})  # not written to adapter_config.json
    return get_peft_model(model, settings)


def state(model: PeftModel) -> dict[str, torch.Tensor]:
    """The adapter's weights under the names that PEFT saves."""
    from peft import get_peft_model_state_dict

    weights: dict[str, torch.Tensor] = get_peft_model_state_dict(model)
    return weights


def load_state(model: PeftModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Put an adapter's weights into the model. Raises ArtifactError where names or shapes differ."""
    overwrite(state(model), weights)


def files(model: PeftModel, *, base: str, base_digest: str) -> dict[str, bytes]:
    """`adapter_config.json`: rank, alpha, targets, the base's name, and the digest of the base's weights."""
    settings: dict[str, Any] = model.peft_config["default"].to_dict()
    settings = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
    settings["base_model_name_or_path"] = base
    settings["inference_mode"] = True
    ours = {"base_weights_sha256": base_digest}
    return {
        "adapter_config.json": json.dumps(settings, indent=2, sort_keys=True, default=str).encode(),
        "base.json": json.dumps(ours, indent=2).encode(),
    }


def load(base: PreTrainedModel, directory: Path, base_digest: str) -> PeftModel:
    """The base with the adapter of `directory`. Raises ArtifactError where it was trained on another base."""
    from peft import PeftModel

    wanted = json.loads((directory / "base.json").read_bytes())["base_weights_sha256"]
    if wanted != base_digest:
        raise ArtifactError(f"the adapter {directory} was trained on the base {wanted[:12]}, not on {base_digest[:12]}")
    return PeftModel.from_pretrained(base, directory)
