"""About how long a plan takes, and how often it passes over its data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from support.planned_homes import House
from typer.testing import CliRunner

from ttrain import api
from ttrain.cli import pipeline as cli_pipeline
from ttrain.cli.main import app
from ttrain.engine import estimate as estimates
from ttrain.engine import provenance
from ttrain.engine.estimate import Estimate, StageEstimate, estimate
from ttrain.errors import UsageError
from ttrain.store.runs import RunRecord
from ttrain.tasks import PRETRAIN

RATE = {"steps": 10, "tokens": 4096, "tokens_per_second": 1000.0, "train_seconds": 40.0}


@pytest.fixture(autouse=True)
def cpu_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "GPU_FILES", ())
    monkeypatch.setattr(estimates.sys, "platform", "linux")


def estimated(house: House, *overrides: str) -> dict[str, StageEstimate]:
    settings = house.settings(*overrides)
    planned = list(house.plan(*overrides).values())
    return {each.stage: each for each in estimate(planned, settings, house.store).stages}


def made_here(house: House, **more: object) -> dict[str, object]:
    settings = house.settings()
    made = {"run": "full-1", "machine": dict(provenance.machine()), "settings": settings.model_dump(mode="json")}
    return {"provenance": {**made, "runtime": settings.runtime.model_dump(mode="json"), **more}}


def with_pretraining(house: House, *overrides: str, result: object = RATE, **more: object) -> None:
    """Publish a pretraining whose rate is known."""
    house.build(house.settings(), stages=("tokenizer", "shards-pretrain", "shards-sft", "shards-lora"))
    planned = house.plan(*overrides)[PRETRAIN.name]
    house.publish(planned, result=result, seconds=9.0, **made_here(house, **more))


def test_the_time_of_a_training_follows_the_rate_that_this_machine_has_shown(house: House) -> None:
    with_pretraining(house)
    again = estimated(house, "pretrain.seed=2", "pretrain.tokens=100_000")["pretrain"]
    assert again.seconds == pytest.approx(100 + estimates.START_SECONDS)
    deeper = estimated(house, "model.layers=8", "pretrain.tokens=100_000")["pretrain"]
    assert deeper.seconds is not None and deeper.seconds > 140, "a token of more parameters costs more"


def test_without_any_rate_the_time_is_left_out_and_the_rest_is_told(house: House) -> None:
    found = estimated(house, "runtime.device=cuda", "pretrain.tokens=100")
    assert found["pretrain"].seconds is None and found["pretrain"].tokens == 100
    settings = house.settings("runtime.device=cuda")
    whole = estimate(list(house.plan("runtime.device=cuda").values()), settings, house.store)
    assert whole.without == ["pretrain", "sft", "lora"] and "day" not in "".join(whole.remarks())


def test_passes_follow_from_the_bytes_of_the_files_and_exactly_from_the_shards(house: House) -> None:
    house.write("documents.jsonl", '{"text": "' + "a" * 31_000 + '"}\n')
    passes = estimated(house, "pretrain.tokens=50_000")["pretrain"].passes
    assert passes is not None and 4.5 < passes < 5.5
    built = house.build(house.settings(), stages=("tokenizer",))["tokenizer"]
    planned = house.plan()["shards-pretrain"]
    house.publish(planned, result={**RATE, "train": {"tokens": 25_000}})
    assert built and estimated(house, "pretrain.tokens=50_000")["pretrain"].passes == 2


def test_a_long_run_and_one_of_many_passes_are_remarked_on() -> None:
    def of(seconds: float, passes: float) -> list[str]:
        return Estimate((StageEstimate("pretrain", seconds, 10, passes),), "").remarks()

    assert of(86_000, 40) == []
    assert ["day" in line for line in of(87_000, 1)] == [True]
    assert "passes about 41 times" in of(10, 41)[0]


def test_unfinished_work_takes_the_rest_of_its_steps(house: House) -> None:
    with_pretraining(house)
    overrides = ("pretrain.seed=2", "pretrain.tokens=204_800", "pretrain.tokens_per_step=2048")
    planned = house.plan(*overrides)["pretrain"]
    checkpoint = house.store.work("pretrain", planned.key or "") / "output" / "checkpoints" / "step-00000050"
    checkpoint.mkdir(parents=True)
    rest = estimated(house, *overrides)["pretrain"]
    assert rest.seconds == pytest.approx((204_800 - 50 * 2048) / 1000 + estimates.START_SECONDS)


# --- what the reasons compare with


def record(house: House, overrides: tuple[str, ...], outcome: str = "completed", **notes: object) -> str:
    """A run of these settings with the keys of its plan."""
    settings = house.settings(*overrides)
    planned = house.plan(*overrides)
    run = RunRecord(house.store.root, "full", list(planned), settings.model_dump(mode="json"))
    for name, stage in planned.items():
        run.stage(name, outcome="completed", key=stage.key)
    run.note(**notes)
    run.finish(outcome, {})
    return run.run


def test_the_plan_compares_with_the_newest_finished_run_of_its_name_and_names_it(built: House) -> None:
    built.build(built.settings("lora.rank=4"))
    mine = record(built, ("lora.rank=4",))
    built.build(built.settings("lora.rank=3"))
    record(built, ("lora.rank=3", "name=other"))
    record(built, ("lora.rank=3",), sweep="sweep-1")
    record(built, ("lora.rank=3",), outcome="failed")
    plan = api.plan("full", built.settings("lora.rank=2"), home=built.store.root)
    assert plan.compared_with == mine and plan["lora"].reasons == ("lora.rank: 4 → 2",)
    assert plan.to_json()["compared_with"] == mine
    unknown = api.plan("full", built.settings("lora.rank=2", "name=third"), home=built.store.root)
    assert unknown.compared_with == "" and len(unknown["lora"].reasons) == 1


def test_a_changed_input_is_named_by_the_stage_that_made_it(built: House, tmp_path: Path) -> None:
    shards = {"stage": "shards-lora", "key": "k", "content": "c"}
    inputs = {"base": {"stage": "sft", "key": "k", "content": "c"}, "shards": shards}
    planned = built.plan()["lora"]
    (path,) = (built.store.root / "store" / "lora").iterdir()
    path.rename(tmp_path / "moved")
    built.publish(planned, inputs=inputs)
    built.build(
        built.settings("sft.seed=2"), stages=("tokenizer", "shards-pretrain", "shards-sft", "shards-lora", "pretrain", "sft")
    )
    assert built.plan("sft.seed=2")["lora"].why == ("sft changed",)


# --- the commands


@pytest.fixture
def ttrain(house: House, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("TTRAIN_HOME", str(house.store.root))
    return lambda *words, **more: CliRunner().invoke(app, ["pipeline", *words, *house.files], **more)


def test_rules_are_printed_where_they_are_asked_for(ttrain: Callable[..., Result]) -> None:
    said = ttrain("plan", "full").output
    assert "by rule" not in said and "takes about" in said
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
    assert declined.exit_code == 1 and "--yes runs it" in declined.output and len(started) == len(asked) == 1
    ttrain(*words, "--yes")
    assert len(started) == 2 and len(asked) == 1
