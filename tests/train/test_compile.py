"""Compiled training: a fallback that is told, and in `make soak` the same checkpoints, and with many steps the same bits."""

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
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU"
)


def fit(directory: Path, how: Speed, **options: Any) -> tuple[Trainer, Recorder]:
    recorder = Recorder()
    trainer = make_trainer(
        settings_of_training(tokens=6 * 96),
        tiny_model(),
        NumberedRows(52),
        rows_per_device=6,
        directory=directory,
        how=how,
        callbacks=[recorder],
        **options,
    )
    trainer.fit()
    return trainer, recorder


def test_where_compiling_fails_training_goes_on_eagerly_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    real = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda module, **options: real(module, backend=broken, **options)
    )
    eager, expected = fit(tmp_path / "eager", Speed())
    caplog.set_level("WARNING", "ttrain")
    fallen, found = fit(tmp_path / "fallen", COMPILED)
    assert {*found.figures("compiled")} == {0.0}, "a curve, since trackers take numbers alone"
    assert (eager.model.compiled, fallen.model.compiled) == (False, False)
    assert "torch.compile failed" in caplog.text and "training continues without it" in caplog.text
    assert found.figures("loss") == expected.figures("loss")
    assert same(eager.weights.state(), fallen.weights.state())


@pytest.mark.soak
@needs_compiler
def test_checkpoints_pass_between_compiled_and_eager_runs(tmp_path: Path) -> None:
    straight, expected = fit(tmp_path / "straight", Speed())
    compiled, _ = fit(tmp_path / "mixed", COMPILED, stop_after=3)
    assert compiled.model.compiled
    assert {*compiled.weights.state()} == {*straight.weights.state()}, (
        "no name says that it was compiled"
    )
    resumed, recorder = fit(tmp_path / "mixed", Speed())
    losses, rest = expected.figures("loss"), recorder.figures("loss")
    assert resumed.first == 3
    assert rest == pytest.approx(losses[-len(rest) :], rel=1e-4)
    again, _ = fit(tmp_path / "mixed", COMPILED)
    assert again.first == 6, "a finished run is opened by a compiled one"
