"""The pipeline `full`: raw JSONL to tokenizer, shards, base model, SFT model, LoRA adapter and evaluation.

The same function is walked by the planner (`ttrain/pipeline/plan.py`), run by Prefect (`flows/prefect_run.py`), or run
without it: `stage` says what happens to a stage, and each result feeds the next by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ttrain import config
from ttrain.config import DATASETS, Settings
from ttrain.stages import EVALUATE, EXISTING_MODEL, NEW_MODEL, REFERENCE, SHARDS, SOURCE, TOKENIZER, TRAINING_STAGES


def full(stage: Callable[..., Any], settings: Settings) -> None:
    """Nine stages, and with pairs of answers three more; the sets of shards are built side by side.

    Where a stage starts from another model than the one before it, the stages that nothing needs are not run, and that
    model comes from a stage of its own: one that exists is taken in, one of random weights is made.
    """
    from_python = [name for name in DATASETS if settings.reads_python_docs(name)]
    source = stage(SOURCE) if from_python else None

    def from_source(dataset: str) -> Any:
        return source if dataset in from_python else None

    tokenizer = stage(TOKENIZER, source=from_source("tokenizer"))
    shards = {
        dataset: stage(of, tokenizer=tokenizer, source=from_source(dataset))
        for dataset, of in SHARDS.items()
        if settings.reads(dataset)
    }
    base = None
    if settings.existing_model:
        base = stage(EXISTING_MODEL, tokenizer=tokenizer)
    elif "pretrain" not in settings.trainings:
        base = stage(NEW_MODEL, tokenizer=tokenizer)
    evaluated, models = {"base": base}, dict[str, Any]()
    for name in settings.trainings:
        training, row = TRAINING_STAGES[name], config.TRAINING_STAGES[name]
        inputs = {"tokenizer": tokenizer} if "tokenizer" in training.inputs else {}
        inputs |= {"base": models.get(settings.starts[name], base), "shards": shards[row.dataset]}
        if getattr(settings, name).has_reference:
            inputs[REFERENCE.name] = stage(REFERENCE, base=inputs["base"], shards=inputs["shards"])
        models[name] = stage(training, **inputs)
        evaluated |= {row.model: models[name], **({row.part: shards[row.dataset]} if row.part else {})}
    stage(EVALUATE, **evaluated)
