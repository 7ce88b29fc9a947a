"""Models from settings: Hugging Face architectures, initialised under a seed, loaded strictly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from ttrain.config import Model
from ttrain.errors import ArtifactError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

INTERMEDIATE_MULTIPLE = 32


def build(config: Model, *, vocab_size: int, ids: dict[str, int], stop_ids: list[int], seed: int) -> PreTrainedModel:
    """A freshly initialised causal language model in fp32. `ids`: bos_token_id, eos_token_id, pad_token_id."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_hf_config(config, vocab_size, ids), attn_implementation="sdpa")
    model = model.to(torch.float32)
    model.generation_config.eos_token_id = stop_ids
    return model


def load(directory: Path) -> PreTrainedModel:
    """A model from its Hugging Face directory, in fp32. Raises ArtifactError for missing, unexpected or mis-shaped keys."""
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True, local_files_only=True,
            ignore_mismatched_sizes=True,  # they are in the report, which names them
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ArtifactError(f"cannot load a model from {directory}: {error}") from None
    wrong = {name: sorted(map(str, keys)) for name, keys in report.items() if keys}
    if wrong:
        raise ArtifactError(f"the weights in {directory} do not fit their config: {wrong}")
    return model


def files(model: PreTrainedModel) -> dict[str, bytes]:
    """The JSON files beside the weights that make a directory open with `from_pretrained`."""
    config = model.config.to_dict()
    config["architectures"] = [type(model).__name__]
    config.pop("_name_or_path", None)  # where the base lay: a path, and so neither content nor anybody's business
    generation = model.generation_config.to_dict()
    return {
        "config.json": json.dumps(config, indent=2, sort_keys=True).encode(),
        "generation_config.json": json.dumps(generation, indent=2, sort_keys=True).encode(),
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
    wrong = sorted({*own} ^ {*weights}) or [name for name in own if own[name].shape != weights[name].shape]
    if wrong:
        raise ArtifactError(f"the checkpoint's weights do not fit the model: {', '.join(wrong[:8])}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])


def _hf_config(config: Model, vocab_size: int, ids: dict[str, int]) -> PretrainedConfig:
    from transformers import LlamaConfig, Qwen3Config

    kinds: dict[str, Any] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
    intermediate = config.intermediate_size or _round_up(config.hidden_size * 8 // 3, INTERMEDIATE_MULTIPLE)
    hf: PretrainedConfig = kinds[config.kind](
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads or config.heads,
        head_dim=config.hidden_size // config.heads,
        max_position_embeddings=config.max_length,
        tie_word_embeddings=config.tie_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        initializer_range=config.init_std,
        attention_dropout=config.dropout,
        use_cache=True,
        **ids,
    )
    return hf


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
