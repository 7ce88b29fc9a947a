"""Estimated time and passes of a plan."""

import pytest
from support.planned_homes import SHARDS, House

from ttrain.engine import provenance
from ttrain.engine.estimate import START_SECONDS, Estimate, StageEstimate, estimate
from ttrain.engine.graph import Graph, Plan
from ttrain.train import rates

RATE = {"steps": 10, "tokens": 4096, "tokens_per_second": 1000.0, "train_seconds": 40.0}


@pytest.fixture(autouse=True)
def cpu_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "GPU_FILES", ())
    monkeypatch.setattr(rates.sys, "platform", "linux")


def estimated(house: House, stage: str, *overrides: str) -> StageEstimate:
    stages = list(house.plan(*overrides).values())
    plan = Plan("full", house.settings(*overrides), house.store, Graph(), stages)
    return {each.stage: each for each in estimate(plan).stages}[stage]


@pytest.fixture
def pretrained(house: House) -> House:
    """A home with a pretraining whose rate is known."""
    settings = house.settings()
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
