"""Parts of a pipeline: what `--only`, `--from` and `--until` build, take and leave out; artifacts as given inputs."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support.planned_homes import House, running
from support.tiny_stages import Home, stage_settings
from typer.testing import CliRunner

from ttrain import api
from ttrain.cli.main import app
from ttrain.config import Tracking
from ttrain.engine.graph import Graph, Plan, Planned, Rerun, Selection
from ttrain.engine.planner import plan
from ttrain.errors import TooFewRows, UsageError
from ttrain.flows.engine import RunOptions, run_pipeline
from ttrain.flows.full import full
from ttrain.store import runs
from ttrain.tasks import EVALUATE, PRETRAIN, SFT, SHARDS_PRETRAIN, TOKENIZER

SHARDS = {"shards-pretrain", "shards-sft", "shards-lora"}
BASE = {"tokenizer", "shards-pretrain", "pretrain"}


def only(*names: str) -> Selection:
    return Selection(only=frozenset(names))


# selection, built, taken; all others are left out. Without documents the pipeline makes a model of random weights; a
# selection without them must not look like that.
CASES: list[tuple[Selection, set[str], set[str]]] = [
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
]


def test_a_selection_builds_its_stages_takes_what_they_need_and_leaves_out_the_rest(
    built: House,
) -> None:
    graph = full(built.settings())
    for selection, built_, taken in CASES:
        assert selection.of(graph) == (built_, taken)
        stages = built.plan("pretrain.seed=1", selection=selection)
        assert {
            name
            for name, planned in stages.items()
            if planned.why[0].startswith("taken from the store")
        } == taken
        assert {*stages} == built_ | taken and running(stages) == set()


def test_what_is_left_out_and_not_there_is_named_with_the_command_that_makes_it(
    built: House,
) -> None:
    shutil.rmtree(built.store.root / "store")
    with pytest.raises(
        UsageError, match=r"never run before.* `ttrain pipeline run full --only "
    ) as refused:
        built.plan(selection=only("lora"))
    names = str(refused.value).split("--only ")[-1].removesuffix("`").split(",")
    built.build(built.settings(), stages=names)
    assert running(built.plan(selection=only("lora"))) == {"lora"}


def test_a_selection_that_cannot_be_is_refused(built: House) -> None:
    for selection, force, words in (
        (only("sftt"), "", "there is no stage .sftt.; did you mean sft. there are tokenizer"),
        (Selection(until="base-model"), "", "stage base-model is not needed here"),
        (
            only("heldout"),
            "",
            "stage heldout belongs to nights; try `ttrain pipeline run nightly`. Here the stages are",
        ),
        (
            Selection(since="sft", until="pretrain"),
            "",
            "--from sft --until pretrain leaves no stage to build",
        ),
        (only("sft"), "lora", "--force lora refers to stage lora, which --only sft"),
    ):
        with pytest.raises(UsageError, match=words):
            built.plan(selection=selection, force=frozenset({force} - {""}))
    assert Selection(until="sft") and Selection(since="sft") and only("sft") and not Selection()
    for other in ({"since": "sft"}, {"until": "sft"}):
        with pytest.raises(
            UsageError, match="--only lora,sft cannot be combined with --from or --until"
        ):
            Selection(only=frozenset({"sft", "lora"}), **other)


def test_forcing_what_is_selected_leaves_what_is_taken_as_it_is(built: House) -> None:
    stages = built.plan(force=frozenset({"tokenizer"}), selection=only("tokenizer", "sft"))
    assert (
        {name for name, planned in stages.items() if planned.forced}
        == running(stages)
        == {"tokenizer"}
    )
    assert stages["pretrain"].state == stages["sft"].state == "cached"
    part = built.plan("sft.seed=2", selection=Selection(since="sft", until="lora"))
    assert part["sft"].inputs == {
        "base": part["pretrain"].artifact,
        "shards": part["shards-sft"].artifact,
    }
    assert (
        part["lora"].sources == {"base": "sft", "shards": "shards-lora"} and not part["lora"].inputs
    )


def test_the_planner_takes_an_artifact_that_exists_as_an_input(built: House) -> None:
    settings, base = built.settings("evaluate.seed=2"), built.store.latest("pretrain")
    graph = Graph()
    sft = graph.add(SFT, base=base, shards=built.store.latest("shards-sft"))
    graph.add(EVALUATE, base=base, sft=sft)
    taken, evaluation = plan(graph, settings, built.store)
    assert taken.state == "cached" and taken.inputs["base"] == base
    assert evaluation.inputs == {"base": base, "sft": taken.artifact}
    again = plan(graph, settings, built.store, Rerun(force=frozenset({"sft"})))
    assert [planned.state for planned in again] == ["run", "run"]
    assert plan(graph, built.settings("sft.seed=2"), built.store)[1].why == ("waits for sft",)


def test_a_training_whose_shards_are_taken_and_too_few_is_refused_before_it_begins(
    tmp_path: Path,
) -> None:
    home = Home.make(tmp_path)
    settings = stage_settings(pretrain={"tokens_per_step": 256_000, "tokens": 512_000})
    settings = settings.model_copy(update={"tracking": Tracking(enabled=False)})
    why = "taken from the store: left out by --only"
    tokenizer = Planned(TOKENIZER, "cached", (why,), home.tokenizer.key, home.tokenizer)
    inputs = {"tokenizer": home.tokenizer}
    counts = {"rows": 60, "tokens": 900}
    result = {"train": counts, "heldout": counts, "rows": {}, "blocks": 1, "encoded_blocks": 1}
    documents = replace(home.documents, manifest={**home.documents.manifest, "result": result})
    shards = Planned(
        SHARDS_PRETRAIN, "cached", (), documents.key, documents, inputs=inputs, sources=inputs
    )
    sources = {"tokenizer": "tokenizer", "shards": "shards-pretrain"}
    stages = [tokenizer, shards, Planned(PRETRAIN, "run", (), sources=sources)]
    with pytest.raises(
        TooFewRows, match=r"pretrain\.tokens_per_step is 256000, 8000 rows of 32 tokens"
    ):
        run_pipeline(
            Plan("full", settings, home.store, Graph(), stages),
            Console(quiet=True),
            RunOptions("none"),
        )
    assert not list(home.store.root.glob("work/pretrain/*")), "no process was started for it"
    [record] = runs.history(home.store.root)
    stages_by_name = {stage["name"]: stage for stage in record["stages"]}
    assert stages_by_name["pretrain"]["outcome"] == "failed" and stages_by_name["tokenizer"][
        "why"
    ] == [why]


def test_plan_shows_the_part_and_what_it_leaves_out(
    built: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTRAIN_HOME", str(built.store.root))
    words = [
        "pipeline",
        "plan",
        "full",
        "--only",
        "sft, shards-sft",
        "--only",
        "lora",
        *built.files,
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    rows = {
        line.split()[0]: line
        for line in done.output.splitlines()
        if line.startswith(("sft", "pretrain", "lora"))
    }
    assert "taken from the store" in rows["pretrain"] and "taken" not in rows["sft"] + rows["lora"]
    assert "left out by --only lora,sft,shards-sft: evaluate" in done.output


def test_models_that_it_leaves_out_and_the_store_lacks_are_not_evaluated(built: House) -> None:
    def evaluation() -> tuple[object, str]:
        names = "pretrain,sft,evaluate"
        planned = api.plan("full", built.settings(), only=names, home=built.store.root)
        return planned.graph["evaluate"].reads, planned["evaluate"].state

    assert evaluation() == ({"pretrain", "sft", "lora", *SHARDS}, "cached")
    shutil.rmtree(built.store.latest("lora").path)
    assert evaluation() == ({"pretrain", "sft", "shards-pretrain", "shards-sft"}, "run")
