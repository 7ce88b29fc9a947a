"""What a tracked run shows: curves by tokens, settings that are not defaults, a description."""

import math
from pathlib import Path
from typing import Any

import pytest

from ttrain.config import flatten
from ttrain.config.loading import load
from ttrain.reports import facts, summary
from ttrain.store.runs import RunRecord
from ttrain.tracking import run_summary


def line(step: int, **metrics: float | None) -> dict[str, Any]:
    return {"step": step, "tokens": step * 512, "time": 100.0 + step, "metrics": metrics}


def test_the_step_of_a_curve_is_its_tokens() -> None:
    lines = [line(5, loss=3.0, grad_norm=1.0), line(5, validation_loss=3.5), line(10, loss=None)]
    lines.append({"step": 1, "metrics": {"loss": 1.0}})  # without tokens
    assert list(run_summary.curves("sft", lines)) == [
        {"step": 2560, "time": 105.0, "metrics": {"Curves/sft loss": 3.0}},
        {"step": 5120, "time": 110.0, "metrics": {"Curves/sft loss": None}},
        {"step": 2560, "time": 105.0, "metrics": {"Curves/sft validation": 3.5}},
    ]


def test_quick_validations_are_the_curve_where_there_are_any() -> None:
    losses = {0: 9.0, 5: 7.0, 10: 6.5}
    rows = [line(step, validation_loss_quick=loss) for step, loss in losses.items()]
    curve = list(run_summary.curves("sft", [*rows, line(10, validation_loss=6.75)]))
    points = [(row["step"], row["metrics"]["Curves/sft validation"]) for row in curve]
    assert points == [(0, 9.0), (2560, 7.0), (5120, 6.5)]


def test_a_long_curve_keeps_a_thousand_losses_and_its_end() -> None:
    rows = [line(step, loss=1 / step) for step in range(1, 10_500)]
    steps = [row["step"] for row in run_summary.curves("pretrain", rows)]
    assert 900 < len(steps) <= run_summary.POINTS
    assert steps[-1] == 512 * 10_499 and steps == sorted(steps)


def test_the_parameters_of_a_run_are_changed_settings_and_main_ones_that_no_rule_sets() -> None:
    settings = load(["sft.optim.lr=2e-4", "runtime.threads=1"], environment={}).settings
    params = facts.parameters(dict(flatten(settings.model_dump(mode="json"))))
    by_rule = "pretrain.optim.lr"
    assert set(params) == {*facts.MAIN_SETTINGS, "runtime.threads"} - {by_rule}


def test_a_description_is_the_note_then_what_is_unusual_and_the_metric(tmp_path: Path) -> None:
    sft = {"name": "sft", "outcome": "completed", "seconds": 2.0, "metric": "validation_loss 4.1"}
    lora = {"name": "lora", "outcome": "failed", "error": "a <b>line\n| with bars"}
    run = {"run": "full-1", "pipeline": "full", "outcome": "completed", "stages": [sft, lora]}
    run |= {"note": "Three\nepochs", "settings": {"name": "mine"}}
    text = run_summary.description(tmp_path, run, {"eval/bits_per_byte": 1.44659})
    assert text.startswith("Three  \nepochs\n\nthe first run of mine: 1.4466 bits per byte\n")
    lines = text.split("\n")
    [row] = [line for line in lines if line.startswith("| lora")]
    assert row == "| lora | failed | – | a &lt;b>line \\| with bars |"
    assert "report full-1" in lines[-1]
    failed = {**run, "note": "", "outcome": "failed", "error": "disk full"}
    text = run_summary.description(tmp_path, failed, {})
    assert text.startswith("the first run of mine\n\n**failed**: disk full\n")


def test_usual_is_the_most_common_setting_of_the_earlier_runs_of_the_name(tmp_path: Path) -> None:
    def difference(**changes: object) -> str:
        settings = {"name": "mine", "sft": {"epochs": 1, "seed": 1}, "model": {"layers": 2}}
        run = RunRecord(tmp_path, "full", [], {**settings, **changes})
        run.finish("completed", {})
        return run_summary.difference(tmp_path, run.snapshot())

    assert difference() == "the first run of mine"
    assert difference(model={"layers": 3}) == "`model.layers=3`"
    difference(name="other", model={"layers": 9})
    # of two values the older one is usual
    assert difference(sft={"epochs": 3, "seed": 2}) == "`sft.epochs=3`, `sft.seed=2`"
    assert difference() == "the usual settings"


def test_the_cost_counts_every_training_once_and_the_steps_before_a_kill() -> None:
    half = {"steps": 40, "resumed_from_step": 20, "train_seconds": 10.0, "ranks": 2, "loss": 1.0}
    whole = {"steps": 5, "resumed_from_step": 0, "train_seconds": 16.0, "ranks": 1}
    results = {"pretrain": half, "sft": whole, "tokenizer": {"train_seconds": 99.0}}
    metrics = summary.metrics_of(results)
    assert metrics["total/train_seconds"] == pytest.approx(36)
    assert metrics["total/device_hours"] == pytest.approx((20 * 2 + 16) / 3600, rel=1e-5)
    assert math.isfinite(metrics["pretrain/loss"])
    no_step = {"steps": 40, "resumed_from_step": 40, "train_seconds": 0.1}
    assert not any(name.startswith("total/") for name in summary.metrics_of({"sft": no_step}))
