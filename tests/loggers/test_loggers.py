"""Loggers beside MLflow: the values of the metrics file, once each, whatever happens to the training or to the logger."""

from __future__ import annotations

import json
import struct
import subprocess
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

from ttrain import loggers as trackers
from ttrain.config import Optim, Settings, TaskConfig
from ttrain.config.loading import load
from ttrain.errors import UsageError
from ttrain.flows.full import full
from ttrain.loggers import callback, process
from ttrain.loggers.callback import Loggers
from ttrain.loggers.service import LoggerState
from ttrain.pipeline.plan import plan
from ttrain.stages.callbacks import description
from ttrain.store.artifacts import ArtifactStore
from ttrain.train.callbacks import MetricsFile
from ttrain.train.trainer import Cadence

SETTINGS = {"pretrain.optim.lr": 0.01}
ABOUT = {"project": "mine", "group": "full-1", "kind": "pretrain", "name": "pretrain 1", "config": SETTINGS}
BATCH = NumberedRows(2).batch([0, 1])
Points = dict[str, list[tuple[int, float]]]  # (step, value) in the order of the file; nothing that is there twice is hidden


def train(directory: Path, *names: str, stop_after: int | None = None) -> None:
    """Twelve steps, or up to a stop; the next call continues at the checkpoint."""
    config = settings_of_training(tokens=12 * 96, optim=Optim(lr=1e-2))
    make_trainer(
        config, tiny_model(), NumberedRows(52), directory=directory / "checkpoints", validation=[BATCH],
        callbacks=[MetricsFile(directory / "metrics.jsonl"), Loggers(names, directory, ABOUT)],
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
    """TensorBoard's."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    found: Points = {}
    for path in sorted((directory / "tensorboard").iterdir()):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, float(make_ndarray(value.tensor))))
    return found


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


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes minutes for what takes a second."""
    monkeypatch.setattr(callback, "PATIENCE_SECONDS", 600.0)


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


@pytest.mark.soak
@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_what_a_kill_kept_from_the_disk_is_there_after_the_next_try(tmp_path: Path, name: str) -> None:
    """A service's process that is killed takes along what it has been told and not yet written."""
    (tmp_path / "loggers").mkdir()
    kept = {"id": "0123456789abcdef0123", "online": False, "steps": {"loss": 8, "lr": 6, "tokens": 8}}
    (tmp_path / "loggers" / f"{name}.json").write_text(json.dumps(kept))
    train(tmp_path, name)
    assert READERS[name](tmp_path) == wanted(tmp_path)
    assert json.loads((tmp_path / "loggers" / f"{name}.json").read_text())["id"] == kept["id"]


def write_sample(directory: Path, step: int = 1, text: str = "=== a < b\n is 天\n\n") -> None:
    (directory / "samples").mkdir(exist_ok=True)
    (directory / "samples" / f"step-{step:08d}.txt").write_text(text, encoding="utf-8")


def test_what_the_model_writes_goes_to_a_logger_once_in_the_order_of_steps_and_not_before_its_row(tmp_path: Path) -> None:
    """Services take no step that is earlier than the last one."""
    lines = [json.dumps({"step": step, "tokens": step, "time": 1.0, "metrics": {}}) + "\n" for step in (5, 10)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    for step in (12, 3, 7):
        write_sample(tmp_path, step, f"at {step}")
    told: list[Any] = []
    logger = SimpleNamespace(
        steps={}, log_text=lambda name, text, step: told.append((name, text, step)), flush=lambda: None,
        log=lambda values, step, seconds: told.append(step),
    )  # fmt: skip
    ended = SimpleNamespace(received=SimpleNamespace(wait=lambda seconds: True))
    process.follow(tmp_path / "metrics.jsonl", logger, ended)
    assert told == [("samples", "at 3", 3), 5, ("samples", "at 7", 7), 10]
    process.follow(tmp_path / "metrics.jsonl", logger, ended)
    assert len(told) == 4 and logger.steps["samples"] == 7


def test_what_a_service_has_is_not_sent_again_and_what_it_lacks_is(tmp_path: Path) -> None:
    """As Weights & Biases tells the last step that it has; none: it has never seen the run."""
    path = tmp_path / "wandb.json"
    for online, last, expected in (
        (False, None, {}),
        (False, -1, {"loss": -1, "lr": -1}),
        (True, 5, {"loss": 5, "lr": 3}),
        (True, None, {"loss": 8, "lr": 3}),
    ):
        path.write_text(json.dumps({"id": "i", "online": online, "steps": {"loss": 8, "lr": 3}}))
        kept = LoggerState(path)
        kept.continued(tmp_path / "present", online=True, last=last)
        assert kept.steps == expected
        assert LoggerState(path).online and LoggerState(path).steps == expected


@pytest.mark.usefixtures("offline")
def test_a_run_of_wandb_says_what_it_is_and_how_it_ended_and_leaves_no_link(tmp_path: Path) -> None:
    write_sample(tmp_path)
    loggers = Loggers(["wandb"], tmp_path, ABOUT)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tokens": 96, "time": 1.0, "metrics": {"loss": null, "lr": 0.5}}\n')
    loggers.start(0, 2)
    loggers.failed(ZeroDivisionError())
    (run,) = [record.run for record in wandb_records(tmp_path) if record.HasField("run")][:1]
    assert (run.project, run.run_group, run.job_type, run.display_name) == ("mine", "full-1", "pretrain", "pretrain 1")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["pretrain.optim.lr"] == 0.01
    assert [record.exit.exit_code for record in wandb_records(tmp_path) if record.HasField("exit")] == [1]
    points = wandb_points(tmp_path)
    [(step, _)] = points.pop("samples")
    [file] = tmp_path.glob("wandb/offline-run-*/files/media/html/samples_*.html")
    assert step == 1 and "=== a &lt; b\n is 天\n" in file.read_text(encoding="utf-8"), "what the model wrote"
    assert points == {"tokens": [(1, 96.0)], "lr": [(1, 0.5)]}, "what is no number is left out"
    assert not [path for path in tmp_path.rglob("*") if path.is_symlink()]


@pytest.mark.usefixtures("offline")
def test_an_experiment_of_swanlab_says_what_it_is_and_how_it_ended_without_a_key_and_without_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not online for lack of a key; it is told before it would ask the network."""
    for name in ("SWANLAB_MODE", "SWANLAB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SWANLAB_PROJECT_NAME", "ours")
    write_sample(tmp_path)
    loggers = Loggers(["swanlab"], tmp_path, ABOUT)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tokens": 96, "time": 1.0, "metrics": {"loss": 2.5}}\n')
    loggers.start(0, 2)
    loggers.failed(ZeroDivisionError())
    (start,) = [record.start for record in swanlab_records(tmp_path) if record.HasField("start")]
    assert (start.project, start.group, start.job_type, start.name) == ("ours", "full-1", "pretrain", "pretrain 1")
    (finish,) = [record.finish for record in swanlab_records(tmp_path) if record.HasField("finish")]
    assert "RUN_STATE_CRASHED" in str(finish)
    assert swanlab_points(tmp_path) == {"tokens": [(1, 96.0)], "loss": [(1, 2.5)]}
    texts = [path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.txt") if "swanlab" in path.parts]
    assert "=== a < b\n is 天\n\n" in texts, "what the model wrote"
    (run,) = (tmp_path / "swanlab").glob("run-*")
    assert "pretrain.optim.lr" in (run / "files/config.yaml").read_text()
    assert json.loads((run / "files/swanlab-metadata.json").read_text())["git"] is None
    assert not (run / "files/requirements.txt").exists()


def test_what_looks_secret_is_not_among_the_settings_that_loggers_show() -> None:
    config = settings_of_training(optim=Optim(lr=0.25))
    shown = description(config, {"stage": "pretrain", "run": "full-20261121-160222-1a2b4", "experiment": "mine"})
    names = {name: shown[name] for name in ("project", "group", "kind", "name")}
    assert names == {"project": "mine", "group": "full-20261121-160222-1a2b4", "kind": "pretrain", "name": "pretrain 1a2b4"}
    assert shown["config"]["training.optim.lr"] == 0.25

    class OfMine(TaskConfig):
        hub_token: str

    of_mine = description(OfMine(rows_per_step=1, hub_token="secret"), {"stage": "task"})
    assert of_mine["name"] == "task" and of_mine["config"]["hub_token"] == "***"


# --- troubles -----------------------------------------------------------------------------------------------------------


def told_in_vain(directory: Path, *, ended: bool = False) -> None:
    """A training that tells its logger of its beginning and of its end; where `ended`, nobody reads that any more."""
    loggers = Loggers(["tensorboard"], directory, ABOUT)
    loggers.start(0, 2)
    if ended:
        (process,) = loggers.processes.values()
        process.wait(60)
    loggers.end(2)


def test_a_logger_that_crashes_hangs_or_cannot_begin_costs_the_training_nothing_but_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tensorboard").write_text("a file where its directory should be")
    told_in_vain(tmp_path, ended=True)
    assert "the logger tensorboard ended with code 1" in caplog.text
    caplog.clear()
    monkeypatch.setattr(callback, "FOLLOWER", "time_that_never_ends")
    monkeypatch.setattr(callback, "PATIENCE_SECONDS", 0.5)
    (tmp_path / "time_that_never_ends.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    told_in_vain(tmp_path)
    assert "the logger tensorboard ended with code -9" in caplog.text
    caplog.clear()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    told_in_vain(tmp_path)
    assert "the logger tensorboard cannot be started" in caplog.text


def test_when_a_training_is_killed_its_loggers_write_what_is_there_and_end(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "tokens": 96, "time": 1.0, "metrics": {"loss": 2.5}}\n{"step": 2, "tokens": 192, "ti'
    )
    task = json.dumps({"logger": "tensorboard", "directory": str(tmp_path), **ABOUT}) + "\n"
    command = [sys.executable, "-P", "-m", callback.FOLLOWER]
    killed = subprocess.run(command, input=task.encode(), timeout=60)  # its input ends without a word
    assert killed.returncode == 0
    assert events(tmp_path) == {"tokens": [(1, 96.0)], "loss": [(1, 2.5)]}


@pytest.mark.parametrize(
    ("name", "found"), [*((name, None) for name in trackers.EXTRAS), ("wandb", ModuleSpec("wandb", None, is_package=True))]
)
def test_a_logger_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    name: str, found: ModuleSpec | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there is a directory of its name, as services leave one where one stands."""
    monkeypatch.setattr(trackers, "find_spec", lambda name: found)
    extra = trackers.EXTRAS[name]
    for refuse in (
        lambda: Loggers([name], tmp_path, ABOUT),
        lambda: plan(full, Settings.model_validate({"runtime": {"loggers": [name]}}), ArtifactStore(tmp_path)),
    ):
        with pytest.raises(UsageError, match=rf"runtime\.loggers has {name}, .*pip install 'ttrain\[{extra}\]'"):
            refuse()


def test_loggers_are_given_as_a_list_by_commas_and_by_names_that_there_are() -> None:
    assert load(["runtime.loggers=tensorboard,wandb"], environment={}).settings.runtime.loggers == ("tensorboard", "wandb")
    assert load(["runtime.loggers=[swanlab]"], environment={}).settings.runtime.loggers == ("swanlab",)
    with pytest.raises(UsageError, match=r"runtime\.loggers"):
        load(["runtime.loggers=mlflow"], environment={})
