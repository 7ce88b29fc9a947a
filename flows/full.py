"""The pipeline `full`: raw JSONL to tokenizer, shards, base model, SFT model, LoRA adapter and evaluation.

The same function is walked by the planner (`ttrain/plan.py`), run by Prefect (`flows/orchestrate.py`), or run without it:
`stage` says what happens to a stage, and each result feeds the next by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ttrain.config import Settings
from ttrain.stages import (
    EVALUATE,
    LORA,
    PRETRAIN,
    SFT,
    SHARDS_LORA,
    SHARDS_PRETRAIN,
    SHARDS_SFT,
    SOURCE,
    TOKENIZER,
)


def full(stage: Callable[..., Any], settings: Settings) -> None:
    """Nine stages; the three sets of shards are built side by side."""
    uses_source = settings.data.uses_python_docs
    source = stage(SOURCE) if any(map(uses_source, ("pretrain", "sft", "lora", "tokenizer"))) else None

    def from_source(dataset: str) -> Any:
        return source if uses_source(dataset) else None

    tokenizer = stage(TOKENIZER, source=from_source("tokenizer"))
    documents = stage(SHARDS_PRETRAIN, tokenizer=tokenizer, source=from_source("pretrain"))
    chats = stage(SHARDS_SFT, tokenizer=tokenizer, source=from_source("sft"))
    domain = stage(SHARDS_LORA, tokenizer=tokenizer, source=from_source("lora"))
    base = stage(PRETRAIN, tokenizer=tokenizer, shards=documents)
    sft = stage(SFT, base=base, shards=chats)
    lora = stage(LORA, base=sft, shards=domain)
    stage(EVALUATE, base=base, sft=sft, lora=lora, documents=documents, chats=chats, domain=domain)
