"""Loggers: the values of the metrics file once each, also when a training continues."""

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest
from support.tiny_data import NumberedRows
from support.tiny_trainers import make_trainer, settings_of_training, tiny_model

from ttrain.config import Optim, Settings, TaskConfig
from ttrain.core import extras
from ttrain.engine.graph import Graph
from ttrain.engine.planner import plan
from ttrain.errors import UsageError
from ttrain.store.artifacts import ArtifactStore
from ttrain.tasks.common.callbacks import description, make_loggers
from ttrain.tracking.loggers import Logger, SwanLab, Wandb
from ttrain.train.callbacks import Callback, LogRecord, MetricsFile
from ttrain.train.training_options import Cadence

RUN = "full-20261121-160222-1a2b4"
LABELS = {"project": "mine", "group": RUN, "job_type": "pretrain", "name": "pretrain 1a2b4"}
CRASHED = {"state": "crashed", "error": "the training failed"}
ABOUT = {**LABELS, "config": {"pretrain.optim.lr": 0.01}}


def train(directory: Path, *loggers: Callback, stop_after: int | None = None) -> None:
    make_trainer(
        settings_of_training(tokens=12 * 96, optim=Optim(lr=1e-2)),
        tiny_model(),
        NumberedRows(52),
        directory=directory / "checkpoints",
        validation=[NumberedRows(2).batch([0, 1])],
        cadence=Cadence(log=2, checkpoint=5, validate=4),
        callbacks=[MetricsFile(directory / "metrics.jsonl"), *loggers],
        stop_after=stop_after,
    ).fit()


def curve(directory: Path, name: str) -> dict[int, float]:
    rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["metrics"][name] for row in rows if name in row["metrics"]}


def test_tensorboard_has_each_value_once_also_when_continued(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for stop_after in (7, None):
        train(tmp_path, *make_loggers(["tensorboard"], tmp_path, ABOUT), stop_after=stop_after)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert "tokens" in events.Tags()["scalars"]
    for name, steps in (("loss", [2, 4, 6, 8, 10, 12]), ("validation_loss", [4, 8, 12])):
        values = curve(tmp_path, name)
        assert [*values] == steps
        scalars = [(event.step, event.value) for event in events.Scalars(name)]
        assert scalars == [(step, np.float32(value)) for step, value in values.items()]


class Service(Mock):
    """The interface of Weights & Biases and SwanLab; a run is the service itself."""

    starting_step = 6  # of a run that is continued: the first step that Weights & Biases lacks

    def init(self, **options: Any) -> Any:
        self.begin(options)
        return self


@pytest.mark.parametrize(
    ("kind", "steps", "end"),
    # SwanLab ignores steps that it has
    [(Wandb, [6, 8], {"exit_code": 1}), (SwanLab, [4, 6, 8], CRASHED)],
)
def test_a_service_gets_what_it_lacks_under_one_id_and_how_the_training_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, steps: list[int], end: Any
) -> None:
    name = kind.__name__.lower()
    monkeypatch.setitem(sys.modules, name, service := Service())
    for _ in range(2):
        logger = kind(name, tmp_path, ABOUT)
        logger.start(3, 20)
        for variable in ("WANDB_PROJECT", "SWANLAB_PROJECT_NAME"):
            monkeypatch.setenv(variable, "ours")
    first, second = (begun.args[0] for begun in service.begin.call_args_list)
    assert {key: first[key] for key in ABOUT} == ABOUT and second["project"] == "ours"
    assert first["id"] == second["id"] and first["resume"] == "allow"
    for step in (4, 6, 8):
        logger.log(LogRecord(step, 20, 96 * step, {"loss": step / 2, "lr": float("inf")}))
    logger.failed(ZeroDivisionError())
    values = [call({"tokens": 96 * step, "loss": step / 2}, step=step) for step in steps]
    assert service.log.call_args_list == values
    assert service.finish.call_args_list == [call(**end)]


def test_secret_settings_are_masked_for_loggers() -> None:
    about = {"stage": "pretrain", "run": RUN, "experiment": "mine"}
    shown = description(settings_of_training(optim=Optim(lr=0.25)), about)
    assert {name: shown[name] for name in LABELS} == LABELS
    assert shown["config"]["training.optim.lr"] == 0.25

    class OfMine(TaskConfig):
        hub_token: str

    of_mine = description(OfMine(rows_per_step=1, hub_token="secret"), {"stage": "task"})
    assert of_mine["name"] == "task" and of_mine["config"]["hub_token"] == "***"


@pytest.mark.parametrize("broken", ["open", "write", "close"])
def test_a_broken_logger_is_one_warning(
    tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    fail = Mock(side_effect=ConnectionError("no route"))
    train(tmp_path, type("Broken", (Logger,), {broken: fail})("broken", tmp_path, ABOUT))
    assert [*curve(tmp_path, "loss")] == [2, 4, 6, 8, 10, 12]
    messages = [record.getMessage() for record in caplog.records]
    [warning] = [message for message in messages if "logger broken" in message]
    assert "ConnectionError" in warning


def test_a_logger_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_directory = ModuleSpec("wandb", None, is_package=True)  # such as the service leaves one
    monkeypatch.setattr(extras, "find_spec", lambda name: of_directory)
    settings = Settings.model_validate({"runtime": {"loggers": ["wandb"]}})
    message = rf"runtime\.loggers.*wandb.*pip install 'ttrain\[{extras.EXTRAS['wandb']}\]'"
    with pytest.raises(UsageError, match=message):
        make_loggers(["wandb"], tmp_path, ABOUT)
    with pytest.raises(UsageError, match=message):
        plan(Graph(), settings, ArtifactStore(tmp_path))
