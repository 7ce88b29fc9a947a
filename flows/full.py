"""The pipeline `full`: raw JSONL to tokenizer, shards, base model, SFT model, LoRA adapter and evaluation.

The same function is walked by the planner (`ttrain/pipeline/plan.py`), run by Prefect (`flows/prefect_run.py`), or run
without it: `stage` says what happens to a stage, and each result feeds the next by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ttrain.config import Settings
from ttrain.stages import (
    EVALUATE,
    EXISTING_MODEL,
    LORA,
    NEW_MODEL,
    PRETRAIN,
    SFT,
    SHARDS_LORA,
    SHARDS_PRETRAIN,
    SHARDS_SFT,
    SOURCE,
    TOKENIZER,
    Stage,
)


def full(stage: Callable[..., Any], settings: Settings) -> None:
    """Nine stages; the three sets of shards are built side by side.

    Where a stage starts from another model than the one before it, the stages that nothing needs are not run, and that
    model comes from a stage of its own: one that exists is taken in, one of random weights is made.
    """
    from_python = [name for name in ("pretrain", "sft", "lora", "tokenizer") if settings.reads_python_docs(name)]
    source = stage(SOURCE) if from_python else None

    def from_source(dataset: str) -> Any:
        return source if dataset in from_python else None

    tokenizer = stage(TOKENIZER, source=from_source("tokenizer"))

    def shards(of: Stage, dataset: str) -> Any:
        return stage(of, tokenizer=tokenizer, source=from_source(dataset)) if settings.reads(dataset) else None

    documents = shards(SHARDS_PRETRAIN, "pretrain")
    chats = shards(SHARDS_SFT, "sft")
    domain = shards(SHARDS_LORA, "lora")
    base = None
    if settings.existing_model:
        base = stage(EXISTING_MODEL, tokenizer=tokenizer)
    elif documents is None:
        base = stage(NEW_MODEL, tokenizer=tokenizer)
    if documents is not None:
        base = stage(PRETRAIN, tokenizer=tokenizer, base=base, shards=documents)
    sft = None if chats is None else stage(SFT, base=base, shards=chats)
    lora = stage(LORA, base=base if sft is None else sft, shards=domain)
    stage(EVALUATE, base=base, sft=sft, lora=lora, documents=documents, chats=chats, domain=domain)
