"""What `--only`, `--from` and `--until` build, take and leave out; artifacts as inputs."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support.planned_homes import House, running
from support.tiny_stages import Home, stage_settings

from ttrain import api
from ttrain.config import Tracking
from ttrain.engine.graph import Graph, Plan, Planned, Selection
from ttrain.errors import TooFewRows, UsageError
from ttrain.flows.engine import RunOptions, run_pipeline
from ttrain.flows.full import full
from ttrain.store import runs
from ttrain.tasks import PRETRAIN, SHARDS_PRETRAIN, TOKENIZER

SHARDS = {"shards-pretrain", "shards-sft", "shards-lora"}
BASE = {"tokenizer", "shards-pretrain", "pretrain"}


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


@pytest.mark.parametrize(
    ("selection", "force", "words"),
    [
        (only("sftt"), set(), "'sftt'; .*sft.*tokenizer"),
        (Selection(until="base-model"), set(), "base-model is"),
        (only("heldout"), set(), "heldout .*`ttrain pipeline run nightly`"),
        (Selection(since="sft", until="pretrain"), set(), "--from sft --until pretrain leaves"),
        (only("sft"), {"lora"}, "--force lora .*--only sft"),
    ],
)
def test_an_impossible_selection_is_refused(
    built: House, selection: Selection, force: set[str], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        built.plan(selection=selection, force=frozenset(force))


def test_force_leaves_taken_stages_as_they_are(built: House) -> None:
    stages = built.plan(force=frozenset({"tokenizer"}), selection=only("tokenizer", "sft"))
    forced = {name for name, planned in stages.items() if planned.forced}
    assert forced == running(stages) == {"tokenizer"}
    assert stages["pretrain"].state == stages["sft"].state == "cached"
    part = built.plan("sft.seed=2", selection=Selection(since="sft", until="lora"))
    inputs = {name: part[stage].artifact for name, stage in part["sft"].sources.items()}
    assert part["sft"].inputs == inputs and {*inputs} == {"base", "shards"}
    assert part["lora"].sources == {"base": "sft", "shards": "shards-lora"}
    assert not part["lora"].inputs


def test_a_training_with_too_few_rows_is_refused_before_it_begins(tmp_path: Path) -> None:
    home = Home.make(tmp_path)
    settings = stage_settings(pretrain={"tokens_per_step": 256_000, "tokens": 512_000})
    settings = settings.model_copy(update={"tracking": Tracking(enabled=False)})
    why = "taken from the store: left out by --only"
    tokenizer = Planned(TOKENIZER, "cached", (why,), home.tokenizer.key, home.tokenizer)
    inputs = {"tokenizer": home.tokenizer}
    counts = {"rows": 60, "tokens": 900}
    result = {"train": counts, "heldout": counts, "rows": {}, "blocks": 1, "encoded_blocks": 1}
    documents = replace(home.documents, manifest={**home.documents.manifest, "result": result})
    of_shards = (SHARDS_PRETRAIN, "cached", (), documents.key, documents)
    shards = Planned(*of_shards, inputs=inputs, sources=inputs)
    sources = {"tokenizer": "tokenizer", "shards": "shards-pretrain"}
    stages = [tokenizer, shards, Planned(PRETRAIN, "run", (), sources=sources)]
    planned = Plan("full", settings, home.store, Graph(), stages)
    with pytest.raises(TooFewRows, match=r"pretrain\.tokens_per_step.*256000"):
        run_pipeline(planned, Console(quiet=True), RunOptions("none"))
    assert not list(home.store.root.glob("work/pretrain/*")), "no process was started for it"
    [record] = runs.history(home.store.root)
    recorded = {stage["name"]: stage for stage in record["stages"]}
    assert recorded["pretrain"]["outcome"] == "failed" and recorded["tokenizer"]["why"] == [why]


def test_models_that_are_left_out_and_missing_are_not_evaluated(built: House) -> None:
    def evaluation() -> tuple[object, str]:
        names = "pretrain,sft,evaluate"
        planned = api.plan("full", built.settings(), only=names, home=built.store.root)
        return planned.graph["evaluate"].reads, planned["evaluate"].state

    assert evaluation() == ({"pretrain", "sft", "lora", *SHARDS}, "cached")
    shutil.rmtree(built.store.latest("lora").path)
    assert evaluation() == ({"pretrain", "sft", "shards-pretrain", "shards-sft"}, "run")
