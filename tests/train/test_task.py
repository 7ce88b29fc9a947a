"""Tasks of users: what they must bring, that they train and continue as stages do, and what is said to mistakes."""

import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.paths import ROOT
from torch import nn
from torch.utils.data import TensorDataset

from ttrain.config import TaskConfig, TaskJob
from ttrain.config.loading import layers, merge
from ttrain.config.runtime import TaskRuntime
from ttrain.core.files import ProgressWriter
from ttrain.errors import ArtifactError, DataError, Interrupted, TTrainError, UsageError
from ttrain.tasks import user_task
from ttrain.tasks.common.job import StageContext
from ttrain.tasks.user_task import Adapted, Batches, task_class
from ttrain.train import task
from ttrain.train.regression import Regression
from ttrain.train.task import LossSum, UserTask

DOCS = ROOT / "docs" / "tasks.md"
CPU = torch.device("cpu")


class Line(UserTask):
    class Config(TaskConfig):
        slope: float = 2.0
        width: int = 4
        penalty: float = 0.01
        rows_total: int = 100

    config: Config

    def rows(self) -> Any:
        x = torch.linspace(-1, 1, self.config.rows_total)[:, None]
        return TensorDataset(x, self.config.slope * x + 1)

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(1, self.config.width), nn.Dropout(0.1), nn.Linear(self.config.width, 1)
        )

    def build_criterion(self) -> Any:
        return nn.MSELoss(reduction="sum")

    def train_step(self, model: nn.Module, batch: Any, device: torch.device) -> LossSum:
        x, y = batch
        error = self.criterion(model(x), y)
        size = (
            self.config.penalty
            * sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
            * len(y)
        )
        return LossSum(error + size, len(y), {"error": error, "size": size})

    def validation_step(self, model: nn.Module, batch: Any, device: torch.device) -> LossSum:
        with torch.no_grad():
            return self.train_step(model, batch, device)


def run(
    output: Path,
    *settings: str,
    task: str = "test_task:Line",
    allow: tuple[str, ...] = (),
    stop: Callable[[], bool] = lambda: False,
    **runtime: Any,
) -> dict[str, Any]:
    torch.seed()  # random numbers from elsewhere must not matter
    config = TaskJob(task=task, given=tuple(layers(settings)), allow=allow)
    speed = {
        "device": "cpu",
        "threads": 1,
        "log_every_steps": 1,
        "checkpoint_every_steps": 4,
        **runtime,
    }
    given = layers([f"runtime.{name}={value}" for name, value in speed.items()])
    job = StageContext(
        {}, {}, {}, output, merge(TaskRuntime, given)[0].runtime, ProgressWriter(None), stop
    )
    try:
        return user_task.run(config, job)
    finally:
        torch.use_deterministic_algorithms(False)


def after_five_steps() -> Callable[[], bool]:
    answers = itertools.chain([False] * 5, itertools.repeat(True))
    return lambda: next(answers)


def metrics(output: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)["metrics"]
        for line in (output / "run" / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.fixture(autouse=True)
def path_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A task of the form module:Class puts the working directory on the path."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield


def test_the_task_of_the_documentation_has_thirty_lines_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert code is not None
    lines = code.group(1).splitlines()
    own = lines[next(number for number, line in enumerate(lines) if line.startswith("class ")) :]
    assert sum(bool(line.strip()) for line in own) <= 30
    (tmp_path / "noise.py").write_text(code.group(1))
    monkeypatch.chdir(tmp_path)
    figures = run(tmp_path / "out", "optim.lr=0.01", "epochs=4", task="noise:Denoise")
    curve = [found["loss"] for found in metrics(tmp_path / "out")]
    assert figures["loss"] == curve[-1] < 0.3 * curve[0]
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in weights.items()} == {
        "0.weight": [16, 16],
        "0.bias": [16],
        "2.weight": [16, 16],
        "2.bias": [16],
    }


def test_regression_comes_below_a_hundredth_in_ten_seconds(tmp_path: Path) -> None:
    began = time.process_time()  # of this process: others may have the cores
    figures = run(tmp_path, task="regression", log_every_steps=10, checkpoint_every_steps=100)
    assert time.process_time() - began < 10
    assert (
        figures["validation_loss"]
        < 0.01
        < 0.1
        < float(Regression(Regression.Config()).heldout_rows().tensors[1].var())
    )


def test_a_stopped_training_continues_bit_for_bit(tmp_path: Path) -> None:
    settings = ("epochs=1", "rows_per_step=9", "optim.lr=0.05")
    whole = run(tmp_path / "whole", *settings)
    with pytest.raises(Interrupted, match="saved"):
        run(tmp_path / "cut", *settings, stop=after_five_steps())
    continued = run(tmp_path / "cut", *settings)
    assert 0 < continued["resumed_from_step"] < continued["steps"] == whole["steps"]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    losses = [[found["loss"] for found in metrics(tmp_path / name)] for name in ("whole", "cut")]
    assert losses[0] == losses[1] and len(losses[0]) == whole["steps"]
    again = run(tmp_path / "cut", *settings)
    assert again["resumed_from_step"] == again["steps"] and again["loss"] == whole["loss"]


def test_changed_settings_are_refused_with_old_and_new_unless_allowed(tmp_path: Path) -> None:
    settings = ("epochs=1", "rows_per_step=10")
    with pytest.raises(Interrupted):
        run(tmp_path, *settings, stop=after_five_steps())
    refusals: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
        (("optim.lr=1e-3",), {}, "optim.lr: 0.004 → 0.001"),
        ((), {"task": "test_task:Mean"}, "test_task:Line → test_task:Mean"),
        ((), {"allow": ("lr",)}, "'optim.lr'"),
    ]
    for changes, options, part in refusals:
        with pytest.raises(UsageError, match=re.escape(part)):
            run(tmp_path, *settings, *changes, **options)
    with pytest.raises(UsageError, match="10 → 20") as refused:
        run(tmp_path, "epochs=1", "rows_per_step=20", "optim.lr=1e-3", allow=("optim",))
    assert "optim.lr" not in str(refused.value)
    with pytest.raises(ArtifactError, match=re.escape("0.weight is [4, 1] but must be [8, 1]")):
        run(tmp_path, *settings, "width=8", allow=("width",))
    figures = run(tmp_path, *settings, "optim.lr=1e-3", allow=("optim.lr",), rows_per_device=3)
    assert 0 < figures["resumed_from_step"] < figures["steps"] == 10
    assert [row["lr_adamw"] for row in metrics(tmp_path) if "loss" in row][-1] < 1e-3


def test_a_filler_takes_part_and_moves_nothing() -> None:
    task = Line(Line.Config())
    model = task.build_model()
    adapted, batch = Adapted(task, model), Batches(task.rows(), task.collate).batch([3, 4, 5])
    counted, filler = (
        adapted.train_step(model, batch, CPU),
        adapted.train_step(model, batch.without_targets(), CPU),
    )
    assert counted.count == 3 and counted.total.item() > 0
    assert (filler.count, filler.total.item(), filler.parts["error"].item()) == (0, 0.0, 0.0)
    filler.total.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


class Mean(Line):
    def train_step(self, model: nn.Module, batch: Any, device: torch.device) -> Any:
        return super().train_step(model, batch, device).total


class Exploding(Line):
    def train_step(self, model: nn.Module, batch: Any, device: torch.device) -> Any:
        loss = super().train_step(model, batch, device)
        return LossSum(loss.total * float("inf"), loss.count)


class Unfinished(UserTask):
    def rows(self) -> Any:
        return []


class Overlapping(Line):
    class Config(TaskConfig):  # type: ignore[assignment]
        runtime: int = 3


@pytest.mark.parametrize(
    ("task", "settings", "error", "parts"),
    [
        ("test_task:Lines", (), UsageError, ["Lines"]),
        ("test_task:CPU", (), UsageError, ["UserTask"]),
        ("test_task:Unfinished", (), UsageError, ["build_criterion", "validation_step"]),
        ("test_task:Overlapping", (), UsageError, ["'runtime'"]),
        ("test_task:Line", ("qqq=3",), UsageError, ["'qqq'", "epochs", "slope"]),
        ("test_task:Line", ("early_stopping.patience=2",), UsageError, ["validate_every_steps"]),
        ("test_task:Line", ("rows_total=7",), DataError, ["rows_per_step=7"]),
        ("test_task:Mean", (), TTrainError, ["Mean.train_step", "LossSum"]),
        ("test_task:Exploding", (), TTrainError, ["optim.lr (0.004)", "nonfinite=skip"]),
        (
            "test_task:Exploding",
            ("nonfinite=skip",),
            TTrainError,
            ["steps were left out", "optim.lr (0.004)"],
        ),
    ],
)
def test_a_mistake_is_told_by_its_name(
    tmp_path: Path, task: str, settings: tuple[str, ...], error: type[TTrainError], parts: list[str]
) -> None:
    with pytest.raises(error) as told:
        run(tmp_path, *settings, task=task)
    assert [part for part in parts if part not in str(told.value)] == []


def test_an_installed_package_brings_its_task_by_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "regression" in task.installed_tasks() and task_class("regression") is Regression
    info = tmp_path / "plugged-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ttrain.tasks]\nmy-line = plugged_tasks:MyLine\n")
    (tmp_path / "plugged_tasks.py").write_text(
        "from test_task import Line\n\nclass MyLine(Line): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert {"regression", "my-line"} <= set(task.installed_tasks())
    assert task_class("my-line").__name__ == "MyLine"
    with pytest.raises(UsageError, match=r"my-line.*regression"):
        task.find_task("other")
