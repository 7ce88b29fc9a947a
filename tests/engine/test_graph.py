"""The graph of a pipeline: what each stage reads, in words."""

from textwrap import dedent

import pytest

from ttrain.config.loading import load, profile_names
from ttrain.engine.graph import Graph
from ttrain.flows.full import full

USUAL = """
    source
    tokenizer <- source
    shards-pretrain <- tokenizer, source
    shards-sft <- tokenizer, source
    shards-lora <- tokenizer, source
    pretrain <- tokenizer, shards-pretrain
    sft <- pretrain, shards-sft
    lora <- sft, shards-lora
    evaluate <- pretrain, shards-pretrain, sft, shards-sft, lora, shards-lora
"""
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
CHATS_ALONE = """
    tokenizer
    shards-sft <- tokenizer
    new-model <- tokenizer
    sft <- new-model, shards-sft
    evaluate <- new-model, sft, shards-sft
"""


def in_words(graph: Graph) -> str:
    """A line for each stage: its name, and what it reads."""
    lines = (
        f"{name} <- {', '.join(map(str, node.sources.values()))}" for name, node in graph.items()
    )
    return "\n".join(line.removesuffix(" <- ") for line in lines)


@pytest.mark.parametrize("profile", profile_names())
def test_the_graph_of_a_profile_is_this(profile: str) -> None:
    graph = full(load([], profiles=(profile,), environment={}).settings)
    assert in_words(graph) == dedent(PREFERENCES if profile == "preferences" else USUAL).strip()


def test_a_stage_that_starts_from_no_model_gets_a_new_one_and_nothing_that_no_stage_needs_is_there() -> (
    None
):
    settings = load(["sft.start_from=none", "data.sft=a.jsonl"], environment={}).settings
    assert in_words(full(settings)) == dedent(CHATS_ALONE).strip()


def test_what_reads_a_replaced_stage_reads_what_replaces_it() -> None:
    graph = full(load([], environment={}).settings)
    replaced = graph.replacing({"source": None, "sft": "pretrain", "shards-sft": None})
    assert replaced["lora"].sources == {"base": "pretrain", "shards": "shards-lora"}
    assert replaced["tokenizer"].sources == {} and {"source", "sft", "shards-sft"}.isdisjoint(
        replaced
    )
    needed = {"source", "tokenizer", "shards-pretrain", "pretrain", "shards-sft", "sft"}
    assert graph.needed_by("sft") == needed, "a graph is a value"
