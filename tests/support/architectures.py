"""Tiny models of all architectures that can be chosen."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from support.tiny_data import VOCAB
from support.tiny_trainers import tiny_model

from ttrain.config import Model
from ttrain.model import registry, shape_check
from ttrain.model.architecture import build_config

IDS = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}


WINDOW = {"sliding_window": 5}


# What differs in how transformers makes it: names of sizes, learnt positions, eager attention only, windows in some or all
# layers, chunks, sinks, a soft cap, several norms, experts, an architecture of our own.
ARCHITECTURES: tuple[dict[str, Any], ...] = (
    {"kind": "llama"}, {"kind": "gpt2"}, {"kind": "gpt_neox"}, {"kind": "opt"}, {"kind": "phi3", "fields": WINDOW},
    {"kind": "mistral", "fields": WINDOW}, {"kind": "gemma2", "fields": WINDOW},
    {"kind": "gemma3_text", "layers": 6, "fields": WINDOW},
    {"kind": "gpt_oss", "fields": {**WINDOW, "num_local_experts": 4}},
    {"kind": "llama4_text", "fields": {"attention_chunk_size": 5}},
    {"kind": "olmo2"}, {"kind": "mixtral"}, {"kind": "moyun"},
)  # fmt: skip


def model_of(options: dict[str, Any], **more: Any) -> Any:
    return tiny_model(**{"hidden_size": 32, **options, **more}).eval()


# --- settings to configs ------------------------------------------------------------------------------------------------


def config_of(**settings: Any) -> dict[str, Any]:
    found: dict[str, Any] = build_config(Model(**settings), vocab_size=VOCAB, ids=IDS).to_dict()
    return found


def verdict(settings: dict[str, Any]) -> str:
    """Why there is no such model: what the settings say, which is all that the plan asks where it has all rules."""
    try:
        model = Model.model_validate(settings)
    except ValidationError as error:
        return str(error.errors()[0]["msg"])
    assert registry.has_all_rules(model)
    return ""


def builds(settings: dict[str, Any]) -> bool:
    """Whether the model can be built and reads a row, whatever our own rules say of it."""
    return shape_check.problem_of(Model.model_construct(**{**Model().model_dump(), "moe": None, **settings})) == ""


def advised(message: str) -> list[str]:
    """The settings that a refusal says to try."""
    return message.splitlines()[0].rpartition("; try ")[2].split()
