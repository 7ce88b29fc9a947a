"""`runtime.tune` of a stage: off in deterministic mode, to the bit, and else the choice is what the stage runs with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.comparing import distance, same
from support.tiny_data import NumberedRows
from support.tiny_stages import Home, stage_settings

from ttrain.core.machine import processor
from ttrain.doctor import machine
from ttrain.stages import user_task
from ttrain.stages.trainable_model import compiles
from ttrain.store import tunings
from ttrain.store.tunings import Choice
from ttrain.train import tuning

CHOSEN = Choice(2, "masked", 256, False)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home.make(tmp_path_factory.mktemp("home"))


def run(home: Home, output: Path, **runtime: Any) -> Any:
    settings = stage_settings(2, {"optim": {"kind": "adamw"}}, **runtime)
    without_dropout = settings.replaced({"model": {"dropout": 0.0}})  # whose masks follow the micro-batches
    return home.pretrain(without_dropout, output, home=output / "home")


def weights(output: Path) -> Any:
    return load_file(output / "model" / "model.safetensors")


def test_in_deterministic_mode_nothing_is_measured_and_no_bit_is_another(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tuning, "tune", lambda *given, **more: pytest.fail("it may not be called"))
    outputs = []
    for tune in ("off", "auto"):
        outputs.append(tmp_path / tune)
        assert "tuned" not in run(home, outputs[-1], tune=tune)
    assert "nothing is tuned" in caplog.text and "set runtime.deterministic=false" in caplog.text
    assert same(*map(weights, outputs))
    assert not (tmp_path / "auto" / "home").exists()


def test_else_the_stage_runs_with_what_is_fastest_and_the_weights_are_equal_up_to_the_order_of_sums(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(self: Any, choice: Choice) -> float:
        differing = sum(value != getattr(CHOSEN, name) for name, value in vars(choice).items())
        return 1.0 if not differing else 2.0 + differing

    monkeypatch.setattr(tuning.Subject, "seconds_of_a_step", measure)
    plain = run(home, tmp_path / "plain", deterministic=False)
    found = run(home, tmp_path / "tuned", deterministic=False, tune="auto")
    assert "tuned" not in plain and found["tuned"] == vars(CHOSEN)
    assert distance(weights(tmp_path / "plain"), weights(tmp_path / "tuned")) < 1e-4
    (remembered,) = tunings.of_machine(tmp_path / "tuned" / "home", processor())
    assert remembered.choice == CHOSEN and remembered.subject["rows_per_step"] == 8
    assert "rows of 32: rows_per_device=2 attention=masked" in machine.tuning(stage_settings().runtime, [remembered]).figure


def test_it_measures_a_real_stage_and_what_has_a_value_stays(home: Home, tmp_path: Path) -> None:
    options = {"deterministic": False, "tune": "auto", "attention": "records", "loss_chunk_tokens": 64, "compile": False}
    found = run(home, tmp_path, **options)
    assert found["tuned"]["attention"] == "records" and found["tuned"]["loss_chunk_tokens"] == 64
    assert found["tuned"]["rows_per_device"] in (1, 2, 4, 8) and found["tuned"]["compile"] is False
    assert found["steps"] == 2


def test_the_doctor_says_that_tuning_and_determinism_contradict_each_other() -> None:
    assert machine.tuning(stage_settings().runtime, []).ok
    contradicting = machine.tuning(stage_settings(tune="auto").runtime, [])
    assert not contradicting.ok and "runtime.deterministic=false" in str(contradicting)
    assert machine.tuning(stage_settings(tune="auto", deterministic=False).runtime, []).ok


def test_a_model_is_compiled_as_the_setting_says_and_else_on_cuda_in_long_runs_over_rows_of_one_width() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    rows, trimmed = NumberedRows(4), NumberedRows(4)
    trimmed.trimmed = True
    unset, on, off = (stage_settings(compile=compile).runtime for compile in (None, True, False))
    assert compiles(unset, cuda, rows, 500)
    assert not compiles(unset, cpu, rows, 500)
    assert not compiles(unset, cuda, rows, 499)
    assert not compiles(unset, cuda, trimmed, 500)
    assert not compiles(unset, cuda, user_task.Batches([1], list), 500), "rows of a user's task may have any shape"
    assert compiles(on, cpu, trimmed, 1)
    assert not compiles(off, cuda, rows, 500)
