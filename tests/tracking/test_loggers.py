"""Loggers beside MLflow: the values of the metrics file once each, also when a training continues."""

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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

SETTINGS = {"pretrain.optim.lr": 0.01}
ABOUT = {
    "project": "mine",
    "group": "full-1",
    "job_type": "pretrain",
    "name": "pretrain 1",
    "config": SETTINGS,
}


def train(directory: Path, *loggers: Callback, stop_after: int | None = None) -> None:
    config = settings_of_training(tokens=12 * 96, optim=Optim(lr=1e-2))
    make_trainer(
        config,
        tiny_model(),
        NumberedRows(52),
        directory=directory / "checkpoints",
        validation=[NumberedRows(2).batch([0, 1])],
        cadence=Cadence(log=2, checkpoint=5, validate=4),
        callbacks=[MetricsFile(directory / "metrics.jsonl"), *loggers],
        stop_after=stop_after,
    ).fit()


def points(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """The points of the metrics file as TensorBoard rounds them; a step that has two rows has one number of tokens."""
    found: dict[str, dict[int, float]] = {}
    for line in map(json.loads, (directory / "metrics.jsonl").read_text().splitlines()):
        for name, value in {"tokens": line["tokens"], **line["metrics"]}.items():
            found.setdefault(name, {})[line["step"]] = float(np.float32(value))
    return {name: list(values.items()) for name, values in found.items()}


def test_tensorboard_has_the_values_of_the_metrics_file_once_also_when_continued(
    tmp_path: Path,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for stop_after in (7, None):
        train(tmp_path, *make_loggers(["tensorboard"], tmp_path, ABOUT), stop_after=stop_after)
    expected = points(tmp_path)
    assert [step for step, _ in expected["loss"]] == [2, 4, 6, 8, 10, 12]
    assert [step for step, _ in expected["validation_loss"]] == [4, 8, 12]
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    events = {tag: shown.Scalars(tag) for tag in shown.Tags()["scalars"]}
    assert {
        tag: [(one.step, one.value) for one in values] for tag, values in events.items()
    } == expected


class Service:
    class Settings(SimpleNamespace):
        Probe = SimpleNamespace

    starting_step = 6  # of a run that is continued: the first step that Weights & Biases lacks

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.ended: list[dict[str, Any]] = []

    def init(self, **options: Any) -> "Service":
        self.begun.append(options)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self, **state: Any) -> None:
        self.ended.append(state)

    def teardown(self) -> None: ...


@pytest.mark.parametrize(
    ("kind", "project", "steps", "end"),
    [
        (Wandb, "WANDB_PROJECT", [6, 8], {"exit_code": 1}),
        (
            SwanLab,
            "SWANLAB_PROJECT_NAME",
            [4, 6, 8],
            {"state": "crashed", "error": "the training failed"},
        ),
    ],
)
def test_a_service_gets_what_it_lacks_under_one_id_and_how_the_training_ended(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Logger],
    project: str,
    steps: list[int],
    end: dict[str, Any],
) -> None:
    """SwanLab itself ignores steps that it has. A metric that is not finite is left out."""
    name = kind.__name__.lower()
    monkeypatch.setitem(sys.modules, name, service := Service())
    for _ in range(2):
        logger = kind(name, tmp_path, ABOUT)
        logger.start(3, 20)
        monkeypatch.setenv(project, "ours")
    first, second = service.begun
    assert {key: first[key] for key in ABOUT} == ABOUT and second["project"] == "ours"
    assert first["id"] == second["id"] and first["resume"] == "allow"
    for step in (4, 6, 8):
        logger.log(LogRecord(step, 20, 96 * step, {"loss": step / 2, "lr": float("inf")}))
    logger.failed(ZeroDivisionError())
    assert service.logged == [(step, {"tokens": 96 * step, "loss": step / 2}) for step in steps]
    assert service.ended == [end]


@pytest.mark.soak
@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_the_real_services_take_what_they_are_given_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.setenv(f"{name.upper()}_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for stop_after in (7, None):
        train(tmp_path, *make_loggers([name], tmp_path, ABOUT), stop_after=stop_after)
    assert "logs nothing more" not in caplog.text
    assert len([*(tmp_path / name).rglob(f"run-*.{name}")]) == 2
    assert not [path for path in (tmp_path / name).rglob("*") if path.is_symlink()]


def test_what_looks_secret_is_not_among_the_settings_that_loggers_show() -> None:
    run = "full-20261121-160222-1a2b4"
    about = {"stage": "pretrain", "run": run, "experiment": "mine"}
    shown = description(settings_of_training(optim=Optim(lr=0.25)), about)
    names = {name: shown[name] for name in ("project", "group", "job_type", "name")}
    assert names == {
        "project": "mine",
        "group": run,
        "job_type": "pretrain",
        "name": "pretrain 1a2b4",
    }
    assert shown["config"]["training.optim.lr"] == 0.25

    class OfMine(TaskConfig):
        hub_token: str

    of_mine = description(OfMine(rows_per_step=1, hub_token="secret"), {"stage": "task"})
    assert of_mine["name"] == "task" and of_mine["config"]["hub_token"] == "***"


@pytest.mark.parametrize("broken", ["open", "write", "close"])
def test_a_logger_that_raises_costs_one_warning_and_not_the_training(
    tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ConnectionError("no route")

    train(tmp_path, type("Broken", (Logger,), {broken: fail})("broken", tmp_path, ABOUT))
    assert [step for step, _ in points(tmp_path)["loss"]] == [2, 4, 6, 8, 10, 12]
    [warning] = [
        text for record in caplog.records if "logger broken" in (text := record.getMessage())
    ]
    assert "ConnectionError('no route')" in warning


@pytest.mark.parametrize(
    ("name", "spec"),
    [("tensorboard", None), ("wandb", ModuleSpec("wandb", None, is_package=True))],
)
def test_a_logger_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    name: str, spec: ModuleSpec | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there is a directory of its name, as services leave one where one stands."""
    monkeypatch.setattr(extras, "find_spec", lambda name: spec)
    settings = Settings.model_validate({"runtime": {"loggers": [name]}})
    refusal = rf"runtime\.loggers has {name}, .*pip install 'ttrain\[{extras.EXTRAS[name]}\]'"
    with pytest.raises(UsageError, match=refusal):
        make_loggers([name], tmp_path, ABOUT)
    with pytest.raises(UsageError, match=refusal):
        plan(Graph(), settings, ArtifactStore(tmp_path))
