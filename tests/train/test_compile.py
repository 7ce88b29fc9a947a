"""Compiled training: a fallback that is told, and in `make soak` the same checkpoints, and with many steps the same bits."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparing import digest, same
from support.paths import ROOT, TESTS
from support.tiny_data import NumberedRows
from support.tiny_trainers import Recorder, make_trainer, settings_of_training, tiny_model

from ttrain.train.precision import set_deterministic
from ttrain.train.trainer import Trainer
from ttrain.train.training_options import Speed

COMPILED = Speed(compile=True)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")


def fit(directory: Path, how: Speed, recorder: Recorder | None = None, **options: Any) -> tuple[Trainer, list[float]]:
    recorder = recorder or Recorder()
    trainer = make_trainer(
        settings_of_training(tokens=6 * 96), tiny_model(), NumberedRows(52), rows_per_device=6, directory=directory, how=how,
        callbacks=[recorder], **options,
    )  # fmt: skip
    trainer.fit()
    return trainer, recorder.figures("loss")


def test_where_compiling_fails_training_goes_on_eagerly_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, **options: real(module, backend=broken, **options))
    eager, losses = fit(tmp_path / "eager", Speed())
    caplog.set_level("WARNING", "ttrain")
    recorder = Recorder()
    fallen, same_losses = fit(tmp_path / "fallen", COMPILED, recorder)
    assert {*recorder.figures("compiled")} == {0.0}, "a curve, since trackers take numbers alone"
    assert (eager.model.compiled, fallen.model.compiled) == (False, False)
    assert "torch.compile failed" in caplog.text and "training continues without it" in caplog.text
    assert losses == same_losses
    assert same(eager.weights.state(), fallen.weights.state())


@pytest.mark.soak
@needs_compiler
def test_checkpoints_pass_between_compiled_and_eager_runs(tmp_path: Path) -> None:
    straight, losses = fit(tmp_path / "straight", Speed())
    compiled, _ = fit(tmp_path / "mixed", COMPILED, stop_after=3)
    assert compiled.model.compiled
    assert {*compiled.weights.state()} == {*straight.weights.state()}, "no name says that it was compiled"
    resumed, rest = fit(tmp_path / "mixed", Speed())
    assert resumed.first == 3
    assert rest == pytest.approx(losses[-len(rest) :], rel=1e-4)
    again, _ = fit(tmp_path / "mixed", COMPILED)
    assert again.first == 6, "a finished run is opened by a compiled one"


def digest_of_a_compiled_run(precision: str) -> str:
    """Of the weights after 20 steps on two threads."""
    torch.set_num_threads(2)
    set_deterministic(True)
    model = tiny_model(hidden_size=64)
    config = settings_of_training(precision=precision, tokens=20 * 512, tokens_per_step=512, row_length=64)
    trainer = make_trainer(config, model, NumberedRows(52, 64), rows_per_device=8, how=COMPILED)
    trainer.fit()
    assert trainer.model.compiled
    return digest(trainer.weights.state())


@pytest.mark.soak
@needs_compiler
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_training_on_two_threads_gives_the_same_bits_each_time(precision: str) -> None:
    environment = {"PYTHONPATH": f"{Path(__file__).parent}:{TESTS}:{ROOT}", "PATH": "/usr/bin:/bin"}
    program = f"import test_compile; print(test_compile.digest_of_a_compiled_run({precision!r}))"
    command = [sys.executable, "-c", program]
    runs = [subprocess.run(command, env=environment, check=True, capture_output=True, text=True) for _ in range(4)]
    assert len({run.stdout.split()[-1] for run in runs}) == 1
