"""What a tracked run shows: settings that are not defaults, a description."""

import math
from pathlib import Path

import pytest

from ttrain.reports import summary
from ttrain.tracking import run_summary


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
