"""The graph of a pipeline: what each stage reads."""

from textwrap import dedent

from ttrain.config.loading import load
from ttrain.engine.graph import Graph
from ttrain.flows.full import full

PREFERENCES = """
    source
    tokenizer <- source
    shards-pretrain <- tokenizer, source
    shards-sft <- tokenizer, source
    shards-dpo <- tokenizer, source
    shards-lora <- tokenizer, source
    pretrain <- tokenizer, shards-pretrain
    sft <- pretrain, shards-sft
    reference <- sft, shards-dpo
    dpo <- sft, shards-dpo, reference
    lora <- dpo, shards-lora
    evaluate <- pretrain, shards-pretrain, sft, shards-sft, dpo, shards-dpo, lora, shards-lora
"""
ONLY_CHATS = """
    tokenizer
    shards-sft <- tokenizer
    new-model <- tokenizer
    sft <- new-model, shards-sft
    evaluate <- new-model, sft, shards-sft
"""


def lines_of(graph: Graph) -> list[str]:
    nodes = {name: ", ".join(map(str, node.sources.values())) for name, node in graph.items()}
    return [f"{name} <- {sources}".removesuffix(" <- ") for name, sources in nodes.items()]


def expected(text: str) -> list[str]:
    return dedent(text).split("\n")[1:-1]


def test_the_graph_of_a_profile() -> None:
    graph = full(load([], profiles=("preferences",), environment={}).settings)
    assert lines_of(graph) == expected(PREFERENCES)


def test_a_stage_that_starts_from_no_model_gets_a_new_one() -> None:
    settings = load(["sft.start_from=none", "data.sft=a.jsonl"], environment={}).settings
    assert lines_of(full(settings)) == expected(ONLY_CHATS)
