"""Loggers beside MLflow: the values of the metrics file once each, also when a training continues."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.tiny_data import NumberedRows
from support.tiny_trainers import make_trainer, settings_of_training, tiny_model

from ttrain.config import Optim, Settings, TaskConfig
from ttrain.config.loading import load
from ttrain.core import extras
from ttrain.engine.graph import Graph
from ttrain.engine.planner import plan
from ttrain.errors import UsageError
from ttrain.store.artifacts import ArtifactStore
from ttrain.tasks.common.callbacks import description, make_loggers
from ttrain.tracking import loggers
from ttrain.tracking.loggers import Logger
from ttrain.train.callbacks import LogRecord, MetricsFile
from ttrain.train.training_options import Cadence

SETTINGS = {"pretrain.optim.lr": 0.01}
ABOUT = {"project": "mine", "group": "full-1", "job_type": "pretrain", "name": "pretrain 1", "config": SETTINGS}
BATCH = NumberedRows(2).batch([0, 1])
Points = dict[str, list[tuple[int, float]]]  # (step, value) in the order of the file; nothing that is there twice is hidden


def train(directory: Path, *names: str, stop_after: int | None = None) -> None:
    """Twelve steps, or up to a stop; the next call continues at the checkpoint."""
    config = settings_of_training(tokens=12 * 96, optim=Optim(lr=1e-2))
    make_trainer(
        config, tiny_model(), NumberedRows(52), directory=directory / "checkpoints", validation=[BATCH],
        callbacks=[MetricsFile(directory / "metrics.jsonl"), *make_loggers(names, directory, ABOUT)],
        cadence=Cadence(log=2, checkpoint=5, validate=4), stop_after=stop_after,
    ).fit()  # fmt: skip


def wanted(directory: Path, kind: Callable[[float], float] = float) -> Points:
    """The points of the metrics file; a step that has two rows has one number of tokens."""
    found: dict[str, dict[int, float]] = {}
    for line in map(json.loads, (directory / "metrics.jsonl").read_text().splitlines()):
        for name, value in {"tokens": line["tokens"], **line["metrics"]}.items():
            found.setdefault(name, {})[line["step"]] = kind(value)
    return {name: list(points.items()) for name, points in found.items()}


# --- reading back -------------------------------------------------------------------------------------------------------


def events(directory: Path) -> Points:
    """As TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(directory / "tensorboard")).Reload()
    return {tag: [(event.step, event.value) for event in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]}


def records(path: Path) -> list[bytes]:
    """Of a file in the log format of LevelDB, as Weights & Biases and SwanLab write theirs: blocks of 32 KiB; records have
    checksum, length and kind (whole, first, middle, last) before them.
    """
    data, at, found, parts = path.read_bytes(), 7, list[bytes](), b""  # after seven bytes of their own
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            found.append(parts)
            parts = b""
    return found


def wandb_runs(directory: Path) -> list[Path]:
    return sorted((directory / "wandb").glob("offline-run-*/run-*.wandb"))


def wandb_records(directory: Path) -> list[Any]:
    from wandb.proto import wandb_internal_pb2

    return [wandb_internal_pb2.Record.FromString(data) for path in wandb_runs(directory) for data in records(path)]


def wandb_points(directory: Path) -> Points:
    found: Points = {}
    for record in wandb_records(directory):
        items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        step = record.history.step.num
        for name, value in items.items():
            if not name.startswith("_"):
                found.setdefault(name, []).append((step, value))
    return found


def swanlab_records(directory: Path) -> list[Any]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    paths = sorted((directory / "swanlab").glob("run-*/run-*.swanlab"))
    return [Record.FromString(data) for path in paths for data in records(path)]


def swanlab_points(directory: Path) -> Points:
    found: Points = {}
    for record in swanlab_records(directory):
        if record.HasField("scalar"):
            found.setdefault(record.scalar.key, []).append((record.scalar.step, record.scalar.value.number))
    return found


READERS: dict[str, Callable[[Path], Points]] = {
    "tensorboard": events, "wandb": wandb_points, "swanlab": swanlab_points,
}  # fmt: skip


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The services' own switches; nothing leaves the machine."""
    for name, value in {
        "WANDB_MODE": "offline", "SWANLAB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path / "home"),
        "WANDB_CACHE_DIR": str(tmp_path / "cache"), "WANDB_CONFIG_DIR": str(tmp_path / "config"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)


# --- values -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    "name", ["tensorboard", *(pytest.param(name, marks=pytest.mark.soak) for name in ("wandb", "swanlab"))]
)
def test_a_logger_has_the_values_of_the_metrics_file_once_also_when_continued(tmp_path: Path, name: str) -> None:
    for stop_after in (7, None):
        train(tmp_path, name, stop_after=stop_after)
    points = wanted(tmp_path, (lambda value: float(np.float32(value))) if name == "tensorboard" else float)
    assert [step for step, _ in points["loss"]] == [2, 4, 6, 8, 10, 12]
    assert [step for step, _ in points["validation_loss"]] == [4, 8, 12]
    assert READERS[name](tmp_path) == points


def log(logger: Logger, *steps: int) -> None:
    """Metrics of these steps: a loss of half of each, and a rate that was not finite."""
    for step in steps:
        logger.log(LogRecord(step, 20, 96 * step, {"loss": step / 2, "lr": float("inf")}))


class Recorder(Logger):
    """Keeps what it is given, and raises in the hook `broken`."""

    def __init__(self, directory: Path, broken: str = "") -> None:
        super().__init__("recorder", directory, ABOUT)
        self.broken, self.calls = broken, list[Any]()

    def open(self, step: int) -> None:
        self._note("open", "open")

    def write(self, values: Any, step: int) -> None:
        self._note("write", (step, dict(values)))

    def close(self, *, failed: bool) -> None:
        self._note("close", "failed" if failed else "closed")

    def _note(self, hook: str, call: Any) -> None:
        self.calls.append(call)
        if hook == self.broken:
            raise ConnectionError("no route")


def test_what_wandb_has_is_not_sent_again_and_what_it_lacks_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    run = SimpleNamespace(starting_step=6, log=lambda values, step: sent.append(step))
    fake = SimpleNamespace(Settings=dict, init=lambda **options: run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    logger = loggers.Wandb("wandb", tmp_path, ABOUT)
    logger.start(3, 20)
    log(logger, 4, 6, 8)
    assert sent == [6, 8]


@pytest.mark.usefixtures("offline")
def test_a_run_of_wandb_says_what_it_is_and_how_it_ended_and_leaves_no_link(tmp_path: Path) -> None:
    [logger] = make_loggers(["wandb"], tmp_path, ABOUT)
    logger.start(0, 2)
    log(logger, 1)
    logger.failed(ZeroDivisionError())
    [run] = [record.run for record in wandb_records(tmp_path) if record.HasField("run")][:1]
    shown = (run.project, run.run_group, run.job_type, run.display_name)
    assert shown == ("mine", "full-1", "pretrain", "pretrain 1")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["pretrain.optim.lr"] == 0.01
    assert [record.exit.exit_code for record in wandb_records(tmp_path) if record.HasField("exit")] == [1]
    points = wandb_points(tmp_path)
    assert points == {"tokens": [(1, 96.0)], "loss": [(1, 0.5)]}, "a value that is not finite is left out"
    assert not [path for path in tmp_path.rglob("*") if path.is_symlink()]


@pytest.mark.usefixtures("offline")
def test_an_experiment_of_swanlab_says_what_it_is_and_how_it_ended_without_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWANLAB_PROJECT_NAME", "ours")
    [logger] = make_loggers(["swanlab"], tmp_path, ABOUT)
    logger.start(0, 2)
    log(logger, 1)
    logger.failed(ZeroDivisionError())
    [start] = [record.start for record in swanlab_records(tmp_path) if record.HasField("start")]
    shown = (start.project, start.group, start.job_type, start.name)
    assert shown == ("ours", "full-1", "pretrain", "pretrain 1")
    [finish] = [record.finish for record in swanlab_records(tmp_path) if record.HasField("finish")]
    assert "RUN_STATE_CRASHED" in str(finish)
    assert swanlab_points(tmp_path) == {"tokens": [(1, 96.0)], "loss": [(1, 0.5)]}
    [run] = (tmp_path / "swanlab").glob("run-*")
    assert "pretrain.optim.lr" in (run / "files/config.yaml").read_text()
    assert json.loads((run / "files/swanlab-metadata.json").read_text())["git"] is None
    assert not (run / "files/requirements.txt").exists()


def test_what_looks_secret_is_not_among_the_settings_that_loggers_show() -> None:
    config = settings_of_training(optim=Optim(lr=0.25))
    run = "full-20261121-160222-1a2b4"
    shown = description(config, {"stage": "pretrain", "run": run, "experiment": "mine"})
    names = {name: shown[name] for name in ("project", "group", "job_type", "name")}
    assert names == {"project": "mine", "group": run, "job_type": "pretrain", "name": "pretrain 1a2b4"}
    assert shown["config"]["training.optim.lr"] == 0.25

    class OfMine(TaskConfig):
        hub_token: str

    of_mine = description(OfMine(rows_per_step=1, hub_token="secret"), {"stage": "task"})
    assert of_mine["name"] == "task" and of_mine["config"]["hub_token"] == "***"


# --- troubles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["open", "write", "close"])
def test_a_logger_that_raises_costs_one_warning_and_not_the_training(
    tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    logger = Recorder(tmp_path, broken)
    make_trainer(
        settings_of_training(tokens=12 * 96), tiny_model(), NumberedRows(52), directory=tmp_path / "checkpoints",
        callbacks=[MetricsFile(tmp_path / "metrics.jsonl"), logger], cadence=Cadence(log=2),
    ).fit()  # fmt: skip
    assert [step for step, _ in wanted(tmp_path)["loss"]] == [2, 4, 6, 8, 10, 12]
    messages = [record.getMessage() for record in caplog.records]
    [warning] = [message for message in messages if "the logger recorder" in message]
    assert "raised ConnectionError('no route') and logs nothing more" in warning


@pytest.mark.parametrize(
    ("name", "found"), [*((name, None) for name in extras.EXTRAS), ("wandb", ModuleSpec("wandb", None, is_package=True))]
)
def test_a_logger_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    name: str, found: ModuleSpec | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there is a directory of its name, as services leave one where one stands."""
    monkeypatch.setattr(extras, "find_spec", lambda name: found)
    extra = extras.EXTRAS[name]
    for refuse in (
        lambda: make_loggers([name], tmp_path, ABOUT),
        lambda: plan(Graph(), Settings.model_validate({"runtime": {"loggers": [name]}}), ArtifactStore(tmp_path)),
    ):
        with pytest.raises(UsageError, match=rf"runtime\.loggers has {name}, .*pip install 'ttrain\[{extra}\]'"):
            refuse()


def test_loggers_are_given_as_a_list_by_commas_and_by_names_that_there_are() -> None:
    assert load(["runtime.loggers=tensorboard,wandb"], environment={}).settings.runtime.loggers == ("tensorboard", "wandb")
    assert load(["runtime.loggers=[swanlab]"], environment={}).settings.runtime.loggers == ("swanlab",)
    with pytest.raises(UsageError, match=r"runtime\.loggers"):
        load(["runtime.loggers=mlflow"], environment={})
