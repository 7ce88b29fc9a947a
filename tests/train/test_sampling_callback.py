"""Samples and quick validations during training, which move nothing, and the names of what callbacks log."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from support.comparing import curve, logged_steps
from support.tiny_stages import Home, stage_settings
from support.tiny_trainers import tiny_model

from ttrain.config import Runtime
from ttrain.core.hashing import DigestCache, code_digests
from ttrain.stages.callbacks import is_without_effect
from ttrain.train.callbacks import StepRecord
from ttrain.train.periodic_evaluation import PeriodicSamples
from ttrain.train.trainer import QUICK

# --- samples ------------------------------------------------------------------------------------------------------------


def test_sampling_leaves_random_numbers_modes_and_gradients_as_they_were(tmp_path: Path) -> None:
    model = tiny_model()
    model.train()
    frozen = model.model.layers[0]
    frozen.eval()
    modes = [module.training for module in model.modules()]
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(7)
    wanted = (torch.rand(3), np.random.rand(3), random.random())
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(7)

    def write() -> list[tuple[str, str]]:
        assert not torch.is_grad_enabled()
        model.eval()
        torch.rand(5), np.random.rand(5), random.random()
        raise ZeroDivisionError

    record = StepRecord(4, 9, 1.0, 1.0, 1, False, 0.1, 0.0, lambda: np.zeros(1, np.int64))
    with pytest.raises(ZeroDivisionError):
        PeriodicSamples(tmp_path, model, write, every=2).step_end(record)
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled()
    assert torch.equal(torch.rand(3), wanted[0])
    assert (np.random.rand(3) == wanted[1]).all()
    assert random.random() == wanted[2]


def test_a_stage_that_samples_and_validates_quickly_has_the_same_curve_and_weights_as_one_that_does_not(
    stage_home: Home, tmp_path: Path
) -> None:
    assert Runtime().quick_validations == 8
    watched, results = {"sample_every_steps": 6, "quick_validations": 8, "guards": "off"}, []
    for name, runtime in (("without", {"quick_validations": 0}), ("with", watched)):
        settings = stage_settings(12, **runtime)
        results.append(stage_home.pretrain(settings, tmp_path / name))
    first, second = (tmp_path / name for name in ("without", "with"))
    assert (first / "model" / "model.safetensors").read_bytes() == (second / "model" / "model.safetensors").read_bytes()
    lines = curve(second / "run" / "metrics.jsonl")
    assert curve(first / "run" / "metrics.jsonl") == [line for line in lines if QUICK not in line["metrics"]]
    assert logged_steps(lines, QUICK) == [0, 2, 3, 5, 6, 8, 9, 11, 12]
    assert logged_steps(lines, "validation_loss") == [12], "the last alone decides"
    quick = {line["step"]: line["metrics"][QUICK] for line in lines if QUICK in line["metrics"]}
    assert quick[12] < quick[2] and quick[12] != results[1]["validation_loss"] == results[0]["validation_loss"]
    assert [path.name for path in sorted((second / "run" / "samples").iterdir())] == [
        "step-00000006.txt", "step-00000012.txt",
    ]  # fmt: skip
    text = (second / "run" / "samples" / "step-00000012.txt").read_text(encoding="utf-8")
    assert text.count("=== ") == len(settings.runtime.sample_prompts) == 2
    assert results[0]["guard_warnings"] == {}
    assert not (first / "run" / "samples").exists()
    names = {name for line in map(json.loads, (first / "run" / "metrics.jsonl").open()) for name in line["metrics"]}
    assert {
        "loss", "grad_norm", "validation_loss", "perplexity", "tokens_per_second", "step_seconds", "data_wait_fraction",
        "mfu", "memory_bytes", "eta_seconds", "epoch_time", "lr", "logits_loss", "aux_loss",
    } <= names  # fmt: skip


# --- keys, and what the curve tells ----------------------------------------------------------------------------------------


def test_what_watches_is_in_no_key_and_early_stopping_is(tmp_path: Path) -> None:
    modules = code_digests("ttrain.stages.pretrain", DigestCache(tmp_path / "digests.json"))
    assert {"ttrain.train.early_stopping", "ttrain.train.trainer"} <= set(modules)
    watching = ("callbacks", "monitor", "guards", "periodic_evaluation", "watchdog")
    assert not {"ttrain.stages.callbacks", "ttrain.evaluate.run", *(f"ttrain.train.{name}" for name in watching)} & set(
        modules
    )
    assert not [
        name for name in modules if name.startswith(("ttrain.loggers", "ttrain.pipeline.system_metrics", "ttrain.tracking"))
    ]


def test_a_rate_that_does_not_move_the_validation_loss_is_told(
    stage_home: Home, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = stage_settings(12, {"optim": {"kind": "adamw", "lr": 1e-9}})
    assert stage_home.pretrain(settings, tmp_path)["guard_warnings"] == {"no_effect": 1}
    assert "pretrain.optim.lr is 1e-09: try a larger one" in caplog.text


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([5.0, 2.1, 2.0, 2.02, 2.01, 2.05], False),  # learnt at once
        ([5.0, 4.9, 4.8, 4.7], False),
        ([5.0, 5.02, 4.99, 5.01, 4.995], True),  # to and fro
        ([5.0, 4.9999, 4.9998, 4.9997], True),
        ([5.0, 5.0], False),  # too few to tell
    ],
)
def test_a_stage_is_without_effect_where_its_curve_ends_as_it_began(
    tmp_path: Path, losses: list[float], expected: bool
) -> None:
    rows = ({"step": step, "metrics": {"validation_loss_quick": loss}} for step, loss in enumerate(losses))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert is_without_effect(tmp_path / "metrics.jsonl") == expected
