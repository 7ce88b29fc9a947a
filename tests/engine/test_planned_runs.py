"""What a run takes, builds or restarts, from its options, and how long it is likely to take."""

import shutil
from pathlib import Path

import pytest
from support.held_locks import held_elsewhere
from support.planned_homes import SHARDS, House, running

from ttrain.cli.options import RestartOptions
from ttrain.config.loading import load
from ttrain.engine import provenance, resume
from ttrain.engine.estimate import START_SECONDS, Estimate, StageEstimate, estimate
from ttrain.engine.graph import Graph, Plan, Planned, Selection
from ttrain.engine.resume import restart, steps_in
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
CHATS = """
tokenizer
shards-sft <- tokenizer
new-model <- tokenizer
sft <- new-model, shards-sft
evaluate <- new-model, sft, shards-sft
"""
BASE = {"tokenizer", "shards-pretrain", "pretrain"}
SEED = "sft.seed=5"  # so that the stage runs
CPU = "runtime.device=cpu"
RATE = {"steps": 10, "tokens": 4096, "tokens_per_second": 1000.0, "train_seconds": 40.0}


def test_each_stage_reads_its_sources() -> None:
    only_chats = ["sft.start_from=none", "data.sft=a.jsonl"]
    preferences = load([], profiles=("preferences",), environment={})
    for loaded, expected in ((preferences, PREFERENCES), (load(only_chats, environment={}), CHATS)):
        nodes = full(loaded.settings).items()
        lines = [f"{name} <- {', '.join(map(str, node.sources.values()))}" for name, node in nodes]
        assert [line.removesuffix(" <- ") for line in lines] == expected.split("\n")[1:-1]


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
        (Selection(since="sft", until="sft"), {"sft"}, {*BASE, "shards-sft"}),
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


def unfinished(house: House, planned: Planned) -> Path:
    work = house.leave(planned, 10, 20, 30)
    (work / "output" / "run").mkdir()
    (work / "output" / "run" / "metrics.jsonl").write_text('{"step": 30}\n')
    return work


def test_fresh_training_renames_its_unfinished_work_aside(built: House) -> None:
    planned = built.plan(SEED)["sft"]
    work = unfinished(built, planned)
    aside = f"at step 30 is set aside; --continue {work.name}.1 resumes it"
    assert restart(built.store, [planned], None) == [f"the unfinished work of sft {aside}"]
    assert not work.exists()
    again = built.plan(SEED)["sft"]
    assert again.why[0] == f"unfinished work {aside}"
    continued = built.plan(SEED, resume_key=f"{work.name}.1")["sft"]
    assert continued.partial_run is not None and continued.first_step == 30


def test_an_older_checkpoint_is_copied_and_the_old_work_kept(built: House) -> None:
    planned = built.plan(SEED)["sft"]
    work = unfinished(built, planned)
    assert restart(built.store, [planned], 20)[-1] == "sft continues at the checkpoint of step 20"
    assert steps_in(work / "output") == [10, 20]
    assert (work / "output" / "run" / "metrics.jsonl").exists()
    assert steps_in(work.with_name(f"{work.name}.1") / "output") == [10, 20, 30]
    assert built.plan(SEED)["sft"].first_step == 20
    assert resume.find_stage(built.store, work.name) == "sft", "a whole key is not ambiguous"
    aside = work.with_name(f"{work.name}.1")
    other = built.plan(SEED, "sft.optim.lr=0.0005", resume_key=aside.name)["sft"]
    restart(built.store, [other], 10)
    own = built.store.work("sft", other.known_key)
    assert steps_in(own / "output") == [10] and steps_in(aside / "output") == [10, 20, 30]
    [entry] = resume.history(own, other.known_key)
    assert (entry["key"], entry["step"]) == (aside.name, 10)
    assert "sft.optim.lr: 0.001 → 0.0005" in entry["differences"]


def test_what_cannot_restart_is_refused_and_stays(built: House) -> None:
    planned = built.plan(SEED)["sft"]

    def refuse(stage: str, step: int | None, words: str) -> None:
        with pytest.raises(UsageError, match=words):
            restart(built.store, [built.plan(SEED)[stage]], step)

    refuse("sft", 15, r"--from-step is 15, .* sft .*none")
    work = unfinished(built, planned)
    refuse("sft", 15, r"sft .* 10, 20, 30 .*keep_every_steps")
    refuse("tokenizer", 15, "rerun STAGE --from-step 15`")
    with held_elsewhere(built.store.root, "sft", work.name):
        for step in (None, 20):
            refuse("sft", step, "stop that run")
    assert steps_in(work / "output") == [10, 20, 30]
    with pytest.raises(UsageError, match=r"--fresh .*--from-step 3"):
        RestartOptions(fresh=True, from_step=3)


def estimated(house: House, stage: str, *overrides: str) -> StageEstimate:
    stages = list(house.plan(CPU, *overrides).values())
    plan = Plan("full", house.settings(CPU, *overrides), house.store, Graph(), stages)
    return {each.stage: each for each in estimate(plan).stages}[stage]


@pytest.fixture
def pretrained(house: House) -> House:
    """A home with a pretraining whose rate is known."""
    settings = house.settings(CPU)
    house.build(settings, stages=("tokenizer", *SHARDS))
    tree = settings.model_dump(mode="json")
    origin = {"run": "full-1", "machine": dict(provenance.machine()), "settings": tree}
    origin["runtime"] = tree["runtime"]
    house.publish(house.plan()["pretrain"], result=RATE, provenance=origin, seconds=9.0)
    return house


def test_the_time_of_a_training_follows_the_measured_rate(pretrained: House) -> None:
    budget = "pretrain.tokens=100_000"
    same_model = estimated(pretrained, "pretrain", "pretrain.seed=2", budget)
    assert same_model.seconds == pytest.approx(100 + START_SECONDS)
    deeper = estimated(pretrained, "pretrain", "model.layers=8", budget)
    assert deeper.seconds is not None and deeper.seconds > 140, "more parameters per token"
    overrides = ("pretrain.seed=2", "pretrain.tokens=204_800", "pretrain.tokens_per_step=2048")
    pretrained.leave(pretrained.plan(*overrides)["pretrain"], 50)
    rest = estimated(pretrained, "pretrain", *overrides)
    assert rest.seconds == pytest.approx((204_800 - 50 * 2048) / 1000 + START_SECONDS)


def test_passes_follow_from_the_bytes_and_then_exactly_from_the_shards(house: House) -> None:
    budget = "pretrain.tokens=50_000"
    assert estimated(house, "pretrain").passes == 5, "a row that is not full counts as one"
    assert estimated(house, "sft") == StageEstimate("sft"), "bytes of chats say too little"
    house.write("documents.jsonl", '{"text": "' + "a" * 31_000 + '"}\n')
    passes = estimated(house, "pretrain", budget).passes
    assert passes is not None and 4.5 < passes < 5.5
    house.build(house.settings(), stages=("tokenizer",))
    shards = house.plan()["shards-pretrain"]
    house.publish(shards, result={**RATE, "train": {"tokens": 25_000}})
    assert estimated(house, "pretrain", budget).passes == 2


def test_a_long_run_and_one_of_many_passes_are_remarked_on() -> None:
    for seconds, passes, count in ((86_400, 40, 0), (86_401, 1, 1), (10, 41, 1)):
        stages = (StageEstimate("pretrain", seconds, 10, passes),)
        assert len(Estimate(stages, "").remarks()) == count
