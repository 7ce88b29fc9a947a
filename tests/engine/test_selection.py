"""The graph of a pipeline, and what `--only`, `--from` and `--until` build, take and leave out."""

import shutil

import pytest
from support.planned_homes import SHARDS, House, running

from ttrain.config.loading import load
from ttrain.engine.graph import Selection
from ttrain.errors import UsageError
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
BASE = {"tokenizer", "shards-pretrain", "pretrain"}


@pytest.mark.parametrize(
    ("overrides", "profiles", "expected"),
    [
        ([], ("preferences",), PREFERENCES),
        (["sft.start_from=none", "data.sft=a.jsonl"], (), ONLY_CHATS),
    ],
)
def test_each_stage_reads_its_sources(overrides: list[str], profiles: str, expected: str) -> None:
    graph = full(load(overrides, profiles=profiles, environment={}).settings)
    nodes = {name: ", ".join(map(str, node.sources.values())) for name, node in graph.items()}
    lines = [f"{name} <- {sources}".removesuffix(" <- ") for name, sources in nodes.items()]
    assert lines == expected.split("\n")[1:-1]


def only(*names: str) -> Selection:
    return Selection(only=frozenset(names))


@pytest.mark.parametrize(
    ("selection", "building", "taken"),
    [
        (only("shards-sft"), {"shards-sft"}, {"tokenizer"}),
        (Selection(), {*BASE, *SHARDS, "sft", "lora", "evaluate"}, set()),
        (only("sft"), {"sft"}, {*BASE, "shards-sft"}),
        (Selection(since="sft"), {"sft", "lora", "evaluate"}, {*BASE, *SHARDS}),
        (Selection(until="shards-lora"), {"tokenizer", "shards-lora"}, set()),
        (
            Selection(since="pretrain", until="sft"),
            {"pretrain", "sft"},
            {"tokenizer", "shards-pretrain", "shards-sft"},
        ),
    ],
)
def test_a_selection_builds_its_stages(
    built: House, selection: Selection, building: set[str], taken: set[str]
) -> None:
    assert selection.of(full(built.settings())) == (building, taken)
    stages = built.plan("pretrain.seed=1", selection=selection)
    why = {name: planned.why[0] for name, planned in stages.items()}
    assert {name for name in why if why[name].startswith("taken from the store")} == taken
    assert {*stages} == building | taken and running(stages) == set()


def test_inputs_that_are_missing_are_named_with_their_command(built: House) -> None:
    shutil.rmtree(built.store.root / "store")
    with pytest.raises(UsageError, match="run full --only ") as refused:
        built.plan(selection=only("lora"))
    names = str(refused.value).split("--only ")[-1].removesuffix("`").split(",")
    built.build(built.settings(), stages=names)
    assert running(built.plan(selection=only("lora"))) == {"lora"}


def test_an_impossible_selection_is_refused(built: House) -> None:
    for selection, force, words in (
        (only("sftt"), set(), "'sftt'; .*sft.*tokenizer"),
        (Selection(until="base-model"), set(), "base-model is"),
        (only("heldout"), set(), "heldout .*`ttrain pipeline run nightly`"),
        (Selection(since="sft", until="pretrain"), set(), "--from sft --until pretrain leaves"),
        (only("sft"), {"lora"}, "--force lora .*--only sft"),
    ):
        with pytest.raises(UsageError, match=words):
            built.plan(selection=selection, force=frozenset(force))


def test_force_leaves_taken_stages_as_they_are(built: House) -> None:
    stages = built.plan(force=frozenset({"tokenizer"}), selection=only("tokenizer", "sft"))
    forced = {name for name, planned in stages.items() if planned.forced}
    assert forced == running(stages) == {"tokenizer"}
    assert stages["pretrain"].state == stages["sft"].state == "cached"
