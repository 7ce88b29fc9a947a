"""SIGINT and SIGTERM to `ttrain stage run pretrain` while it steps, validates and saves; signals to a pipeline."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.comparing import curve
from support.pipeline_home import Cli, write_corpus
from support.served import processes_of
from support.waiting import wait_until

from ttrain.core.hashing import sha256_file
from ttrain.core.signals import SAME_SIGNAL_SECONDS
from ttrain.store import runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.train import checkpoint
from ttrain.train.checkpoint_format import list_checkpoints

pytestmark = [pytest.mark.soak, pytest.mark.long]
# Steps of about 0.05 s, a validation of several of them.
RUN = (
    *("stage", "run", "pretrain", "model.hidden_size=64", "pretrain.tokens_per_step=1024", "pretrain.tokens=92160"),
    *("pretrain.validation_rows=200", "pretrain.validate_every_steps=6", "reading.heldout_fraction=0.5"),
    *("runtime.log_every_steps=1", "runtime.checkpoint_every_steps=4"),
)
STEPS = 90
STEPPED, VALIDATING, SAVING = (
    r" step \d+/\d+  loss",
    r" step (?:6|12|18)/\d+  loss",
    "checkpoint of step",
)  # lines of the log


@dataclass
class Home:
    """A home in which everything is ready for the pretraining."""

    cli: Cli
    ranks: int = 1

    def start(self, *words: str) -> subprocess.Popen[str]:
        """In a process group of its own, as a shell starts a command."""
        command = self.cli.command(*(words or RUN[:3]), *RUN[3:], f"runtime.devices={self.ranks}")
        return subprocess.Popen(
            command, env=self.cli.environment, cwd=self.cli.data, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def finish(self) -> None:
        process = self.start()
        said, _ = process.communicate()
        assert process.returncode == 0, said

    @property
    def output(self) -> Path | None:
        """Of the unfinished stage."""
        return next(self.cli.home.glob("work/pretrain/*/output"), None)

    @property
    def log(self) -> Path | None:
        return self.output / "run" / "log.txt" if self.output else None

    def newest(self) -> int:
        """The newest step that is saved; everything that has its name is whole."""
        if self.output is None:
            return 0
        return max((checkpoint.read(path).step for path in list_checkpoints(self.output / "checkpoints")), default=0)

    def tracked(self) -> list[tuple[str, str]]:
        """Name and status of all runs in MLflow, the newest last; the runs of stages by their stage."""
        with sqlite3.connect(self.cli.home / "mlflow" / "mlflow.db") as mlflow:
            found = mlflow.execute("select name, status from runs order by start_time").fetchall()
        return [(name.split()[0], status) for name, status in found]

    def left(self) -> dict[str, Any]:
        """What the finished stage has left."""
        path = ArtifactStore(self.cli.home).latest("pretrain").path
        names = ("model/model.safetensors", f"checkpoints/step-{STEPS:08d}/optimizer.safetensors")
        return {"curve": curve(path / "run" / "metrics.jsonl"), **{name: sha256_file(path / name) for name in names}}


@dataclass
class Undisturbed:
    """A home before the pretraining, and what that leaves."""

    cli: Cli
    root: Path
    left: dict[int, dict[str, Any]] = field(default_factory=dict)  # by the number of ranks

    def left_by(self, ranks: int) -> dict[str, Any]:
        """What so many ranks leave that nothing disturbs."""
        if ranks not in self.left:
            home = self.copy(self.root / f"of-{ranks}", ranks)
            home.finish()
            self.left[ranks] = home.left()
        return self.left[ranks]

    def copy(self, root: Path, ranks: int) -> Home:
        shutil.copytree(self.cli.home, root / "home", copy_function=shutil.copy2)
        return Home(Cli(root / "home", self.cli.data), ranks)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    root = tmp_path_factory.mktemp("signals")
    write_corpus(root / "data")
    cli = Cli(root / "home", root / "data")
    for stage in ("tokenizer", "shards-pretrain"):
        cli("stage", "run", stage, *RUN[3:])
    return Undisturbed(cli, root)


def wait_for_lines(home: Home, process: subprocess.Popen[str], pattern: str, count: int) -> None:
    """Wait until the stage's log has so many such lines."""
    while process.poll() is None:
        if home.log is not None and home.log.exists() and len(re.findall(pattern, home.log.read_text())) >= count:
            return
        time.sleep(0.001)
    raise AssertionError(f"it ended before: {process.communicate()[0]}")


def send(home: Home, process: subprocess.Popen[str], signum: int, to: str) -> None:
    """To the command, as `kill` does, to its process group, as a terminal does, or to all processes, as systemd does."""
    if to == "the group":
        os.killpg(process.pid, signum)
    for one in {"all": processes_of(home.cli.home), "the command": [psutil.Process(process.pid)]}.get(to, []):
        with contextlib.suppress(psutil.Error):
            one.send_signal(signum)


@pytest.mark.parametrize(
    ("ranks", "signum", "to", "moment"),
    [
        (1, signal.SIGINT, "the group", VALIDATING),
        (1, signal.SIGTERM, "all", SAVING),
        (2, signal.SIGTERM, "the command", STEPPED),
        (2, signal.SIGINT, "all", SAVING),
    ],
)
def test_a_signal_saves_one_common_step_and_the_run_goes_on_to_the_same_bits(
    undisturbed: Undisturbed, tmp_path: Path, ranks: int, signum: int, to: str, moment: str
) -> None:
    home = undisturbed.copy(tmp_path, ranks)
    process = home.start()
    wait_for_lines(home, process, moment, 2)
    send(home, process, signum, to)
    assert home.log is not None and home.output is not None
    stepped = len(re.findall(STEPPED, home.log.read_text()))
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signum and "Traceback" not in said, said
    wait_until(lambda: not processes_of(home.cli.home), 5, lambda: said)
    newest = home.newest()
    assert stepped <= newest <= stepped + 2, said
    assert f"stopped after step {newest} of {STEPS}; the state is saved" in said
    written = curve(home.output / "run" / "metrics.jsonl")
    assert written[-1]["step"] == newest, "no step was made beyond the one that is saved"
    run, tracked = runs.history(home.cli.home)[0], dict(home.tracked())
    assert run["outcome"] == run["stages"][0]["outcome"] == "interrupted"
    assert tracked[run["run"]] == tracked["pretrain"] == "KILLED"
    home.finish()
    assert home.left() == undisturbed.left_by(home.ranks)
    assert "RUNNING" not in dict(home.tracked()).values()


@pytest.mark.parametrize("how", ["hang-up", "to all", "twice to one that hangs"])
def test_prefect_and_mlflow_are_told_of_a_signal_and_of_a_second_one_to_a_stage_that_hangs(
    undisturbed: Undisturbed, tmp_path: Path, how: str
) -> None:
    home, hangs = undisturbed.copy(tmp_path, 1), how.startswith("twice")
    process = home.start("pipeline", "run", "full")
    wait_for_lines(home, process, STEPPED, 7)
    began = time.monotonic()
    if hangs:
        [worker] = [one for one in processes_of(home.cli.home) if one.name() == "ttrain-worker"]
        worker.suspend()
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(SAME_SIGNAL_SECONDS + 0.1)
        os.killpg(process.pid, signal.SIGINT)
    elif how == "hang-up":
        process.send_signal(signal.SIGHUP)
    else:
        send(home, process, signal.SIGTERM, "all")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == {"hang-up": 129, "to all": 143}.get(how, 130), said
    assert time.monotonic() - began < 20, "the time for a stage to stop by itself is 60 s"
    assert "Traceback" not in said
    assert ("did not stop by itself and was ended" if hangs else "the state is saved") in said
    wait_until(lambda: not processes_of(home.cli.home), 5)
    run = runs.history(home.cli.home)[0]
    assert run["outcome"] == {stage["name"]: stage["outcome"] for stage in run["stages"]}["pretrain"] == "interrupted"
    with sqlite3.connect(home.cli.home / "prefect" / "prefect.db") as prefect:
        assert prefect.execute("select state_name from flow_run").fetchall() == [("Cancelled",)]
    tracked = dict(home.tracked())
    assert hangs or tracked[run["run"]] == tracked["pretrain"] == "KILLED"  # after a second signal the next run tells it
    assert home.newest() >= (4 if hangs else 7)
