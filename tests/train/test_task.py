"""Tasks of users: what they must bring, that they train and continue as stages do, and messages of
mistakes."""

import itertools
import json
import re
import sys
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

CPU = torch.device("cpu")
PLUG_IN = {
    "plugged-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n",
    "plugged-1.0.dist-info/entry_points.txt": "[ttrain.tasks]\nmy-line = plugged_tasks:MyLine\n",
    "plugged_tasks.py": "from test_task import Line\n\nclass MyLine(Line): pass\n",
}


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
        width = self.config.width
        return nn.Sequential(nn.Linear(1, width), nn.Dropout(0.1), nn.Linear(width, 1))

    def build_criterion(self) -> Any:
        return nn.MSELoss(reduction="sum")

    def train_step(self, model: nn.Module, batch: Any, device: torch.device) -> LossSum:
        x, y = batch
        error = self.criterion(model(x), y)
        squares = sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
        size = self.config.penalty * squares * len(y)
        return LossSum(error + size, len(y), {"error": error, "size": size})

    def validation_step(self, model: nn.Module, batch: Any, device: torch.device) -> LossSum:
        with torch.no_grad():
            return self.train_step(model, batch, device)


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
    speed = {"device": "cpu", "threads": 1, "log_every_steps": 1, "checkpoint_every_steps": 4}
    overrides = layers([f"runtime.{name}={value}" for name, value in (speed | runtime).items()])
    merged = merge(TaskRuntime, overrides)[0].runtime
    job = StageContext({}, {}, {}, output, merged, ProgressWriter(None), stop)
    try:
        return user_task.run(config, job)
    finally:
        torch.use_deterministic_algorithms(False)


def after_five_steps() -> Callable[[], bool]:
    answers = itertools.chain([False] * 5, itertools.repeat(True))
    return lambda: next(answers)


def metrics(output: Path) -> list[dict[str, Any]]:
    lines = (output / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["metrics"] for line in lines]


@pytest.fixture(autouse=True)
def path_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A task of the form module:Class puts the working directory on the path."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield


def test_the_task_of_the_documentation_has_thirty_lines_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "tasks.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert code is not None
    body = code.group(1).partition("\nclass ")[2]
    assert sum(bool(line.strip()) for line in body.splitlines()) <= 30
    (tmp_path / "noise.py").write_text(code.group(1))
    monkeypatch.chdir(tmp_path)
    figures = run(tmp_path / "out", "optim.lr=0.01", "epochs=4", task="noise:Denoise")
    curve = [line["loss"] for line in metrics(tmp_path / "out")]
    assert figures["loss"] == curve[-1] < 0.3 * curve[0]
    weights = load_file(tmp_path / "out" / "model.safetensors")
    sizes = {name: list(tensor.shape) for name, tensor in weights.items()}
    assert sizes == {"0.weight": [16, 16], "0.bias": [16], "2.weight": [16, 16], "2.bias": [16]}


def test_a_stopped_training_continues_bit_for_bit(tmp_path: Path) -> None:
    settings, whole_run, cut = (
        ("epochs=1", "rows_per_step=9", "optim.lr=0.05"),
        tmp_path / "1",
        tmp_path / "2",
    )
    whole = run(whole_run, *settings)
    with pytest.raises(Interrupted, match="saved"):
        run(cut, *settings, stop=after_five_steps())
    continued = run(cut, *settings)
    assert 0 < continued["resumed_from_step"] < continued["steps"] == whole["steps"]
    first, second = (load_file(path / "model.safetensors") for path in (whole_run, cut))
    assert all(torch.equal(first[name], second[name]) for name in first)
    losses, others = ([line["loss"] for line in metrics(path)] for path in (whole_run, cut))
    assert losses == others and len(losses) == whole["steps"]
    again = run(cut, *settings)
    assert again["resumed_from_step"] == again["steps"] and again["loss"] == whole["loss"]


def test_changed_settings_are_refused_with_old_and_new_unless_allowed(tmp_path: Path) -> None:
    settings = ("epochs=1", "rows_per_step=10")
    with pytest.raises(Interrupted):
        run(tmp_path, *settings, stop=after_five_steps())
    refusals: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
        (("optim.lr=1e-3",), {}, r"optim\.lr: 0\.004 → 0\.001"),
        ((), {"task": "test_task:Mean"}, "test_task:Line → test_task:Mean"),
        ((), {"allow": ("lr",)}, r"'optim\.lr'"),
    ]
    for changes, options, part in refusals:
        with pytest.raises(UsageError, match=part):
            run(tmp_path, *settings, *changes, **options)
    with pytest.raises(UsageError, match=r"^(?!.*optim\.lr).*10 → 20"):
        run(tmp_path, "epochs=1", "rows_per_step=20", "optim.lr=1e-3", allow=("optim",))
    with pytest.raises(ArtifactError, match=r"0\.weight.*\[8, 1\]"):
        run(tmp_path, *settings, "width=8", allow=("width",))
    figures = run(tmp_path, *settings, "optim.lr=1e-3", allow=("optim.lr",), rows_per_device=3)
    assert 0 < figures["resumed_from_step"] < figures["steps"] == 10
    assert [row["lr_adamw"] for row in metrics(tmp_path) if "loss" in row][-1] < 1e-3


def test_a_filler_takes_part_and_moves_nothing() -> None:
    line = Line(Line.Config())
    model = line.build_model()
    adapted, batch = Adapted(line, model), Batches(line.rows(), line.collate).batch([3, 4, 5])
    counted = adapted.train_step(model, batch, CPU)
    filler = adapted.train_step(model, batch.without_targets(), CPU)
    assert counted.count == 3 and counted.total.item() > 0
    assert (filler.count, filler.total.item(), filler.parts["error"].item()) == (0, 0.0, 0.0)
    filler.total.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


SKIPPING = ["steps were left out", "optim.lr (0.004)"]


@pytest.mark.parametrize(
    ("name", "settings", "error", "parts"),
    [
        ("Lines", (), UsageError, ["Lines"]),
        ("CPU", (), UsageError, ["UserTask"]),
        ("Unfinished", (), UsageError, ["build_criterion", "validation_step"]),
        ("Overlapping", (), UsageError, ["'runtime'"]),
        ("Line", ("qqq=3",), UsageError, ["'qqq'", "epochs", "slope"]),
        ("Line", ("early_stopping.patience=2",), UsageError, ["validate_every_steps"]),
        ("Line", ("rows_total=7",), DataError, ["rows_per_step=7"]),
        ("Mean", (), TTrainError, ["Mean.train_step", "LossSum"]),
        ("Exploding", (), TTrainError, ["optim.lr (0.004)", "nonfinite=skip"]),
        ("Exploding", ("nonfinite=skip",), TTrainError, SKIPPING),
    ],
)
def test_a_mistake_is_named(
    tmp_path: Path, name: str, settings: tuple[str, ...], error: type[TTrainError], parts: list[str]
) -> None:
    with pytest.raises(error) as raised:
        run(tmp_path, *settings, task=f"test_task:{name}")
    assert [part for part in parts if part not in str(raised.value)] == []


def test_an_installed_package_brings_its_task_by_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "regression" in task.installed_tasks() and task_class("regression") is Regression
    for name, text in PLUG_IN.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert {"regression", "my-line"} <= set(task.installed_tasks())
    assert task_class("my-line").__name__ == "MyLine"
    with pytest.raises(UsageError, match=r"my-line.*regression"):
        task.find_task("other")
