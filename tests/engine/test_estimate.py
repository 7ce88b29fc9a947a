"""About how long a plan takes, and how often it passes over its data; what its reasons compare with."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from support.planned_homes import SHARDS, House
from typer.testing import CliRunner

from ttrain import api
from ttrain.cli import pipeline as cli_pipeline
from ttrain.cli.main import app
from ttrain.engine import estimate as estimates
from ttrain.engine import provenance
from ttrain.engine.estimate import Estimate, StageEstimate, estimate
from ttrain.engine.graph import Graph, Plan
from ttrain.errors import UsageError
from ttrain.store.runs import RunRecord
from ttrain.tasks import PRETRAIN
from ttrain.train.measured_steps import Measured

RATE = {"steps": 10, "tokens": 4096, "tokens_per_second": 1000.0, "train_seconds": 40.0}


@pytest.fixture(autouse=True)
def cpu_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "GPU_FILES", ())
    monkeypatch.setattr(estimates.sys, "platform", "linux")


def estimated(house: House, *overrides: str) -> dict[str, StageEstimate]:
    stages = list(house.plan(*overrides).values())
    plan = Plan("full", house.settings(*overrides), house.store, Graph(), stages)
    return {each.stage: each for each in estimate(plan).stages}


@pytest.fixture
def pretrained(house: House) -> House:
    """A house with a pretraining whose rate is known."""
    settings = house.settings().model_dump(mode="json")
    house.build(house.settings(), stages=("tokenizer", *SHARDS))
    made = {"run": "full-1", "machine": dict(provenance.machine()), "settings": settings}
    house.publish(
        house.plan()["pretrain"],
        result=RATE,
        provenance={**made, "runtime": settings["runtime"]},
        seconds=9.0,
    )
    return house


def test_the_time_of_a_training_follows_the_rate_that_this_machine_has_shown(
    pretrained: House,
) -> None:
    again = estimated(pretrained, "pretrain.seed=2", "pretrain.tokens=100_000")["pretrain"]
    assert again.seconds == pytest.approx(100 + estimates.START_SECONDS)
    deeper = estimated(pretrained, "model.layers=8", "pretrain.tokens=100_000")["pretrain"]
    assert deeper.seconds is not None and deeper.seconds > 140, (
        "a token of more parameters costs more"
    )


def test_where_no_time_is_known_none_is_said() -> None:
    one, other = StageEstimate("pretrain", None, 300, 3.0), StageEstimate("evaluate")
    assert Estimate((one, other), "").lines() == [
        "how long it takes here is not known yet: pretrain ? (3 passes)"
    ]
    tokenizer = StageEstimate("tokenizer", 7.0)
    assert Estimate((tokenizer, one, other), "a rate").lines() == [
        "takes about 7 s here without pretrain, evaluate, by a rate: tokenizer 7 s, pretrain ? (3 passes)"
    ]


def test_passes_follow_from_the_bytes_of_documents_and_exactly_from_the_shards(
    house: House,
) -> None:
    assert estimated(house)["pretrain"].passes == 5, "a row that is not full counts as one"
    house.write("documents.jsonl", '{"text": "' + "a" * 31_000 + '"}\n')
    passes = estimated(house, "pretrain.tokens=50_000")["pretrain"].passes
    assert passes is not None and 4.5 < passes < 5.5
    house.build(house.settings(), stages=("tokenizer",))
    house.publish(house.plan()["shards-pretrain"], result={**RATE, "train": {"tokens": 25_000}})
    assert estimated(house, "pretrain.tokens=50_000")["pretrain"].passes == 2


def test_passes_over_chats_are_told_once_their_shards_are_there(house: House) -> None:
    """Before, their number is not known: 3 were told where 6 came."""
    assert estimated(house)["sft"] == StageEstimate("sft")
    house.build(house.settings(), stages=("tokenizer",))
    house.publish(house.plan()["shards-sft"], result={**RATE, "train": {"tokens": 20 * 256}})
    assert estimated(house)["sft"].passes == 3


def test_a_long_run_and_one_of_many_passes_are_remarked_on() -> None:
    def of(seconds: float, passes: float) -> list[str]:
        return Estimate((StageEstimate("pretrain", seconds, 10, passes),), "").remarks()

    assert of(86_000, 40) == []
    assert ["day" in line for line in of(87_000, 1)] == [True]
    assert "passes about 41 times" in of(10, 41)[0]


def test_unfinished_work_takes_the_rest_of_its_steps(pretrained: House) -> None:
    overrides = ("pretrain.seed=2", "pretrain.tokens=204_800", "pretrain.tokens_per_step=2048")
    work = pretrained.store.work("pretrain", pretrained.plan(*overrides)["pretrain"].known_key)
    (work / "output" / "checkpoints" / "step-00000050").mkdir(parents=True)
    rest = estimated(pretrained, *overrides)["pretrain"]
    assert rest.seconds == pytest.approx((204_800 - 50 * 2048) / 1000 + estimates.START_SECONDS)


def record(house: House, *overrides: str, outcome: str = "completed", **notes: object) -> str:
    """A run of these settings with the keys of its plan."""
    planned = house.plan(*overrides)
    run = RunRecord(
        house.store.root, "full", list(planned), house.settings(*overrides).model_dump(mode="json")
    )
    for name, stage in planned.items():
        run.stage(name, outcome="completed", key=stage.key)
    run.note(**notes)
    run.finish(outcome, {})
    return run.run


def test_the_plan_compares_with_the_newest_finished_run_of_its_name_and_names_it(
    built: House,
) -> None:
    built.build(built.settings("lora.rank=4"))
    mine = record(built, "lora.rank=4")
    built.build(built.settings("lora.rank=3"))
    record(built, "lora.rank=3", "name=other")
    record(built, "lora.rank=3", sweep="sweep-1")
    record(built, "lora.rank=3", outcome="failed")
    plan = api.plan("full", built.settings("lora.rank=2"), home=built.store.root)
    assert plan["lora"].reasons == ("lora.rank: 4 → 2",) and plan.to_json()["compared_with"] == mine
    unknown = api.plan("full", built.settings("lora.rank=2", "name=third"), home=built.store.root)
    assert unknown.compared_with == "" and len(unknown["lora"].reasons) == 1


def test_a_changed_input_is_named_by_the_stage_that_made_it(built: House, tmp_path: Path) -> None:
    makers = {"base": "sft", "shards": "shards-lora"}
    inputs = {name: {"stage": stage, "key": "k", "content": "c"} for name, stage in makers.items()}
    planned = built.plan()["lora"]
    built.store.latest("lora").path.rename(tmp_path / "moved")
    built.publish(planned, inputs=inputs)
    built.build(built.settings("sft.seed=2"), stages=("tokenizer", *SHARDS, PRETRAIN.name, "sft"))
    assert built.plan("sft.seed=2")["lora"].why == ("sft changed",)


@pytest.fixture
def ttrain(house: House, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("TTRAIN_HOME", str(house.store.root))
    return lambda *words: CliRunner().invoke(app, ["pipeline", *words, *house.files])


def test_rules_are_printed_where_they_are_asked_for(ttrain: Callable[..., Result]) -> None:
    said = ttrain("plan", "full").output
    assert "by rule" not in said and "takes about" in said
    assert (
        " here without tokenizer, shards-pretrain, shards-sft, shards-lora, sft, lora, evaluate, by"
        in said
    )
    assert "pretrain.tokens_per_step is" in ttrain("plan", "full", "--rules").output


def test_a_run_of_many_passes_is_asked_about_on_a_terminal_alone(
    ttrain: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def run_pipeline(plan: api.Plan, *_: object) -> None:
        started.append(plan.pipeline)
        raise UsageError("it was started")

    monkeypatch.setattr("ttrain.flows.engine.run_pipeline", run_pipeline)
    asked: list[str] = []
    monkeypatch.setattr(cli_pipeline, "confirm", lambda text, **_: asked.append(text) or False)
    words = ("run", "full", "pretrain.tokens=1_000_000")
    assert "passes about" in ttrain(*words).output and started == ["full"] and not asked
    monkeypatch.setattr(cli_pipeline, "is_on_terminal", lambda: True)
    declined = ttrain(*words)
    assert (
        declined.exit_code == 1
        and "--yes runs it" in declined.output
        and len(started) == len(asked) == 1
    )
    ttrain(*words, "--yes")
    assert len(started) == 2 and len(asked) == 1


def test_what_was_measured_for_a_training_is_remembered_and_comes_first(pretrained: House) -> None:
    settings = ("pretrain.seed=2", "pretrain.tokens=100_000")
    plan = Plan("full", pretrained.settings(*settings), pretrained.store, Graph(), [])
    plan = replace(plan, stages=[pretrained.plan(*settings)["pretrain"]])
    section = plan.settings.pretrain.resolved(100)
    passes = (1 + estimates.QUICK_SHARE) * 0.5 * 100_000 / section.step_tokens
    expected = estimates.START_SECONDS + passes + 0.01 * section.validation_rows
    measured = list[str]()

    def measure(stage: str, config: object) -> Measured:
        measured.append(stage)
        return Measured(step=0.5, row=0.01)

    for _ in range(2):
        assert estimate(plan, measure).seconds == pytest.approx(expected)
    assert measured == ["pretrain"]
    assert estimate(plan).seconds == pytest.approx(expected), "without measuring"
