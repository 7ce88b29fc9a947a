"""Tasks of users: they train and continue as stages do, and mistakes in them are named."""

import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.comparing import same
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
from ttrain.tasks.user_task import Adapted, Batches
from ttrain.train.task import LossSum, UserTask

CPU = torch.device("cpu")


class Line(UserTask):
    class Config(TaskConfig):
        width: int = 4
        rows_total: int = 100

    config: Config

    def rows(self) -> Any:
        x = torch.linspace(-1, 1, self.config.rows_total)[:, None]
        return TensorDataset(x, 2 * x + 1)

    def build_model(self) -> nn.Module:
        width = self.config.width
        return nn.Sequential(nn.Linear(1, width), nn.Dropout(0.1), nn.Linear(width, 1))

    def build_criterion(self) -> Any:
        return nn.MSELoss(reduction="sum")

    def train_step(self, model: nn.Module, batch: Any, device: torch.device) -> LossSum:
        x, y = batch
        error = self.criterion(model(x), y)
        return LossSum(error, len(y), {"error": error})

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
    pass


def run(
    output: Path, *settings: str, task: str = "test_task:Line", stop: Any = bool, allow: Any = ()
) -> dict[str, Any]:
    torch.seed()  # random numbers from elsewhere must not matter
    config = TaskJob(task=task, given=tuple(layers(settings)), allow=allow)
    speed = {"device": "cpu", "threads": 1, "log_every_steps": 1, "checkpoint_every_steps": 4}
    overrides = layers([f"runtime.{name}={value}" for name, value in speed.items()])
    merged = merge(TaskRuntime, overrides)[0].runtime
    job = StageContext({}, {}, {}, output, merged, ProgressWriter(None), stop)
    try:
        return user_task.run(config, job)
    finally:
        torch.use_deterministic_algorithms(False)


def stop_after_five_steps(output: Path, *settings: str) -> None:
    answers = itertools.chain([False] * 5, itertools.repeat(True))
    with pytest.raises(Interrupted, match="saved"):
        run(output, *settings, stop=lambda: next(answers))


def metrics(output: Path) -> list[dict[str, Any]]:
    lines = (output / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["metrics"] for line in lines]


@pytest.fixture(autouse=True)
def path_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task of the form module:Class puts the working directory on the path."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_the_documented_task_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "tasks.md").read_text(), re.DOTALL)
    assert code is not None
    (tmp_path / "noise.py").write_text(code.group(1))
    monkeypatch.chdir(tmp_path)
    figures = run(tmp_path / "out", "optim.lr=0.01", "epochs=4", task="noise:Denoise")
    curve = [line["loss"] for line in metrics(tmp_path / "out")]
    assert figures["loss"] == curve[-1] < 0.3 * curve[0]
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {*weights} == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_stopped_training_continues_bit_for_bit(tmp_path: Path) -> None:
    settings, straight, cut = ["epochs=1", "rows_per_step=9"], tmp_path / "1", tmp_path / "2"
    whole = run(straight, *settings)
    stop_after_five_steps(cut, *settings)
    continued = run(cut, *settings)
    assert 0 < continued["resumed_from_step"] < continued["steps"] == whole["steps"]
    first, second = (load_file(path / "model.safetensors") for path in (straight, cut))
    assert same(first, second)
    losses, others = ([line["loss"] for line in metrics(path)] for path in (straight, cut))
    assert losses == others and len(losses) == whole["steps"]
    again = run(cut, *settings)
    assert again["resumed_from_step"] == again["steps"] and again["loss"] == whole["loss"]


def test_changed_settings_are_refused_with_old_and_new_unless_allowed(tmp_path: Path) -> None:
    settings = ("epochs=1", "rows_per_step=10")
    stop_after_five_steps(tmp_path, *settings)
    refusals: list[tuple[tuple[str, ...], dict[str, Any], type[TTrainError], str]] = [
        (("optim.lr=1e-3",), {}, UsageError, r"optim\.lr: 0\.004 → 0\.001"),
        ((), {"task": "test_task:Mean"}, UsageError, "test_task:Line → test_task:Mean"),
        ((), {"allow": ("lr",)}, UsageError, r"'optim\.lr'"),
        (("rows_per_step=20",), {"allow": ("optim",)}, UsageError, "10 → 20"),
        (("width=8",), {"allow": ("width",)}, ArtifactError, r"0\.weight.*\[8, 1\]"),
    ]
    for changes, options, error, part in refusals:
        with pytest.raises(error, match=part):
            run(tmp_path, *settings, *changes, **options)
    figures = run(tmp_path, *settings, "optim.lr=1e-3", allow=("optim.lr",))
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


@pytest.mark.parametrize(
    ("name", "settings", "error", "parts"),
    [
        ("Lines", (), UsageError, ["Lines"]),
        ("CPU", (), UsageError, ["UserTask"]),
        ("Unfinished", (), UsageError, ["rows", "validation_step"]),
        ("Line", ("qqq=3",), UsageError, ["'qqq'", "epochs", "width"]),
        ("Line", ("early_stopping.patience=2",), UsageError, ["validate_every_steps"]),
        ("Line", ("rows_total=7",), DataError, ["rows_per_step=7"]),
        ("Mean", (), TTrainError, ["Mean.train_step", "LossSum"]),
        ("Exploding", (), TTrainError, ["optim.lr (0.004)", "nonfinite=skip"]),
        ("Exploding", ("nonfinite=skip",), TTrainError, ["optim.lr (0.004)"]),
    ],
)
def test_a_mistake_is_named(
    tmp_path: Path, name: str, settings: tuple[str, ...], error: type[TTrainError], parts: list[str]
) -> None:
    with pytest.raises(error) as raised:
        run(tmp_path, *settings, task=f"test_task:{name}")
    assert [part for part in parts if part not in str(raised.value)] == []
