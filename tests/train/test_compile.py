"""Compiled training: the eager fallback."""

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
