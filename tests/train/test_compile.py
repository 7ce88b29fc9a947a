"""Compiled training: the eager fallback, and in `make soak` checkpoints that pass to and fro."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparing import same
from support.tiny_data import NumberedRows
from support.tiny_trainers import Recorder, make_trainer, settings_of_training, tiny_model

from ttrain.train.trainer import Trainer
from ttrain.train.training_options import Speed

COMPILED = Speed(compile=True)


def fit(directory: Path, how: Speed, **options: Any) -> tuple[Trainer, Recorder]:
    config, recorder = settings_of_training(tokens=6 * 96), Recorder()
    options |= {"rows_per_device": 6, "directory": directory, "how": how, "callbacks": [recorder]}
    trainer = make_trainer(config, tiny_model(), NumberedRows(52), **options)
    trainer.fit()
    return trainer, recorder


def test_where_compiling_fails_training_continues_eagerly_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, **_: compiler(module, backend=broken))
    eager, expected = fit(tmp_path / "eager", Speed())
    caplog.set_level("WARNING", "ttrain")
    fallen, recorder = fit(tmp_path / "fallen", COMPILED)
    assert {*recorder.figures("compiled")} == {0.0}, "a number, since trackers take numbers alone"
    assert (eager.model.compiled, fallen.model.compiled) == (False, False)
    assert "torch.compile" in caplog.text
    assert recorder.figures("loss") == expected.figures("loss")
    assert same(eager.weights.state(), fallen.weights.state())


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
def test_checkpoints_pass_between_compiled_and_eager_runs(tmp_path: Path) -> None:
    straight, expected = fit(tmp_path / "straight", Speed())
    compiled, _ = fit(tmp_path / "mixed", COMPILED, stop_after=3)
    assert compiled.model.compiled
    assert {*compiled.weights.state()} == {*straight.weights.state()}, "the names are the same"
    resumed, recorder = fit(tmp_path / "mixed", Speed())
    assert resumed.first == 3
    losses = recorder.figures("loss")
    assert losses == pytest.approx(expected.figures("loss")[-len(losses) :], rel=1e-4)
    assert fit(tmp_path / "mixed", COMPILED)[0].first == 6, "a finished run opens compiled"
