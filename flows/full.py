"""The pipeline `full`: raw JSONL to tokenizer, shards, base, SFT model, adapter and evaluation."""

from ttrain import config
from ttrain.config import DATASETS, Settings
from ttrain.engine.graph import Graph, Source
from ttrain.tasks import (
    EVALUATE,
    EXISTING_MODEL,
    NEW_MODEL,
    REFERENCE,
    SHARDS,
    SOURCE,
    TEACHER,
    TOKENIZER,
    TRAINING_STAGES,
)


def full(settings: Settings) -> Graph:
    """The graph: nine stages, and three more with pairs of answers.

    A stage that starts from another model reads it from a stage of its own: an existing model, or a
    new one with random weights. Stages that nothing needs are left out.
    """
    graph = Graph()
    from_python = [name for name in DATASETS if settings.reads_python_docs(name)]
    source = graph.add(SOURCE) if from_python else None

    def from_source(dataset: str) -> Source | None:
        return source if dataset in from_python else None

    tokenizer = graph.add(TOKENIZER, source=from_source("tokenizer"))
    shards = {
        dataset: graph.add(of, tokenizer=tokenizer, source=from_source(dataset))
        for dataset, of in SHARDS.items()
        if settings.reads(dataset)
    }
    base = None
    if settings.existing_model:
        base = graph.add(EXISTING_MODEL, tokenizer=tokenizer)
    elif "pretrain" not in settings.trainings:
        base = graph.add(NEW_MODEL, tokenizer=tokenizer)
    models: dict[str, str] = {}
    evaluated: dict[str, str | None] = {"base": base}
    for name in settings.trainings:
        training = TRAINING_STAGES[name]
        inputs: dict[str, str | None] = {
            **({"tokenizer": tokenizer} if "tokenizer" in training.inputs else {}),
            "base": models.get(settings.starts[name], base),
            "shards": shards[name],
        }
        if name == "dpo" and settings.dpo.has_reference:
            inputs[REFERENCE.name] = graph.add(
                REFERENCE, base=inputs["base"], shards=inputs["shards"]
            )
        if name == "pretrain" and settings.pretrain.teacher:
            inputs[TEACHER.name] = graph.add(TEACHER, tokenizer=tokenizer, shards=shards[name])
        models[name] = graph.add(training, **inputs)
        row = config.TRAINING_STAGES[name]
        evaluated |= {row.model: models[name], row.part: shards[name]}
    graph.add(EVALUATE, **evaluated)
    return graph
