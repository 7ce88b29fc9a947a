"""SIGINT and SIGTERM at random moments of `ttrain stage run pretrain`, on one rank and on two.

`make soak` runs it; TTRAIN_SOAK_KILLS says how many signals: half as many, four at least.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.comparing import curve
from support.pipeline_home import Cli, write_corpus
from support.served import processes_of
from support.waiting import wait_until

from ttrain.core.hashing import sha256_file
from ttrain.store import runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.train import checkpoint
from ttrain.train.checkpoint_format import list_checkpoints

pytestmark = [pytest.mark.soak, pytest.mark.long]
# Steps of about 0.05 s, a validation of several of them; `tree` makes the bits those of one rank.
RUN = (
    *("stage", "run", "pretrain", "model.hidden_size=64", "pretrain.tokens_per_step=1024", "pretrain.tokens=92160"),
    *("pretrain.validation_rows=200", "pretrain.validate_every_steps=6", "reading.heldout_fraction=0.5"),
    *("runtime.log_every_steps=1", "runtime.checkpoint_every_steps=4", "runtime.reduction=tree"),
)
STEPS, VALIDATE = 90, 6
MOMENTS = ("start", "step", "validation", "save")


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
    """A home before the pretraining, what that leaves, and after how many seconds it makes its first step."""

    cli: Cli
    left: dict[str, Any]
    seconds: float

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
    alone = Undisturbed(cli, {}, 0.0)
    home, began = alone.copy(root / "alone", 1), time.monotonic()
    process = home.start()
    wait_for_lines(home, process, 0, r" step 1/", 1)
    alone.seconds = time.monotonic() - began
    said, _ = process.communicate()
    assert process.returncode == 0, said
    alone.left = home.left()
    return alone


def lines(home: Home, position: int, pattern: str) -> list[str]:
    """The lines that the stage's log has after this position."""
    if home.log is None or not home.log.exists():
        return []
    return re.findall(rf"^.*{pattern}.*$", home.log.read_text()[position:], re.MULTILINE)


def wait_for_lines(home: Home, process: subprocess.Popen[str], position: int, pattern: str, count: int) -> list[str]:
    """Wait for so many such lines; all that came, fewer where the process ended before."""
    while True:
        ended = process.poll() is not None
        there = lines(home, position, pattern)
        if ended or len(there) >= count:
            return there
        time.sleep(0.001)


def step_of(line: str) -> int:
    """The step of a line in the log."""
    match = re.search(r"(?: step |from step |checkpoint of step )(\d+)", line)
    assert match, line
    return int(match[1])


@dataclass
class Sent:
    """A signal, and what the run was at when it came."""

    moment: str
    signum: int
    to: str
    twice: bool
    begun: bool = False  # the trainer
    step: int = 0  # the last one that was logged
    met: bool = True  # whether it came at that moment

    def send(self, home: Home, process: subprocess.Popen[str]) -> None:
        """To the command, as `kill` does, to its process group, as a terminal does, or to all processes, as systemd does."""
        with contextlib.suppress(ProcessLookupError):
            if self.to == "the group":
                os.killpg(process.pid, self.signum)
            elif self.to == "the command":
                os.kill(process.pid, self.signum)
        if self.to == "all":
            for one in processes_of(home.cli.home):
                with contextlib.suppress(psutil.Error):
                    one.send_signal(self.signum)


def wait_for_moment(home: Home, process: subprocess.Popen[str], sent: Sent, chance: random.Random, seconds: float) -> None:
    """Return at the moment, or when the run has ended."""
    position = len(home.log.read_text()) if home.log is not None and home.log.exists() else 0
    step = r" step \d+/\d+  loss"
    if sent.moment == "start":
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(chance.uniform(0, seconds))
    elif sent.moment == "step":
        wait_for_lines(home, process, position, step, chance.randint(1, 8))
        time.sleep(chance.uniform(0, 0.1))
    elif sent.moment == "validation":
        for count in itertools.count(1):
            some = wait_for_lines(home, process, position, step, count)
            if len(some) < count or step_of(some[-1]) % VALIDATE == 0:
                break
    else:
        wait_for_lines(home, process, position, "checkpoint of step", chance.randint(1, 2))
        while process.poll() is None and not any((home.output or Path("/nowhere")).glob("checkpoints/.writing-*")):
            time.sleep(0.0002)
    new = lines(home, position, r"from step \d+ to") + lines(home, position, step)
    sent.begun, sent.step = bool(new), step_of(new[-1]) if new else 0


def interrupt(home: Home, sent: Sent, chance: random.Random, seconds: float) -> bool:
    """Start the run, send the signal at its moment and look at everything; False where the run had come to its end."""
    before, history = home.newest(), runs.history(home.cli.home)
    process = home.start()
    wait_for_moment(home, process, sent, chance, seconds)
    sent.send(home, process)
    if sent.twice:
        time.sleep(chance.uniform(0.02, 0.5))
        sent.send(home, process)
    began = time.monotonic()
    said, _ = process.communicate(timeout=60)
    took = time.monotonic() - began
    if process.returncode == 0:
        return False
    early = not sent.begun and runs.history(home.cli.home) == history  # before Python had our code, which says something
    codes = {128 + sent.signum} | ({-sent.signum} if early or sent.twice else set())  # a shell tells both as the same
    assert process.returncode in codes, f"{sent}\n{said}"
    assert early or "Traceback" not in said, f"{sent}\n{said}"
    wait_until(lambda: not processes_of(home.cli.home), 5, lambda: f"{sent}\n{said}")
    if not early and not sent.twice:  # what is in the middle of being told at a second signal is settled by the next run
        check_what_is_told(home, sent, said)
    newest = home.newest()
    assert newest >= before, "what was durable is gone"
    if sent.twice:
        assert took < 10, f"{sent}: ended only after {took:.1f} s"
    elif sent.begun:
        assert sent.step <= newest <= sent.step + 2, f"{sent}: step {newest} is saved\n{said}"
        assert home.output is not None
        written = [line["step"] for line in curve(home.output / "run" / "metrics.jsonl")]
        assert [0, *written][-1] == newest, "no step was made beyond the one that is saved"
        assert f"stopped after step {newest} of {STEPS}; the state is saved" in said
        sent.met = sent.moment != "validation" or newest == sent.step
    return True


def check_what_is_told(home: Home, sent: Sent, said: str) -> None:
    """The record of the run and MLflow know that it was interrupted."""
    run = runs.history(home.cli.home)[0]
    stage, tracked = run["stages"][0]["outcome"], dict(home.tracked())
    assert run["outcome"] == "interrupted", f"{sent}: {run}\n{said}"
    assert stage == "interrupted" or (stage == "pending" and not sent.begun), f"{sent}: {run}\n{said}"
    assert tracked[run["run"]] == "KILLED", f"{sent}: {tracked}\n{said}"
    assert not sent.begun or tracked["pretrain"] == "KILLED", f"{sent}: {tracked}\n{said}"


def plan(count: int, ranks: int, chance: random.Random) -> Iterator[Sent]:
    """All moments equally often, every fifth time with a second signal."""
    for number in range(2 * ranks - 2, 2 * ranks - 2 + count):
        signum, to = chance.choice([signal.SIGINT, signal.SIGTERM]), chance.choice(["the command", "the group", "all"])
        yield Sent(MOMENTS[number % len(MOMENTS)], signum, to, twice=number % 5 == 4)


def sweep(undisturbed: Undisturbed, root: Path, ranks: int, count: int) -> tuple[int, Counter[tuple[str, str]]]:
    """How many runs came to their end, and how many signals at a moment were met or missed."""
    chance, ended, tally = random.Random(100 + ranks), 0, Counter[tuple[str, str]]()
    home: Home | None = None

    def finish(home: Home) -> None:
        process = home.start()
        said, _ = process.communicate()
        assert process.returncode == 0, said
        assert home.left() == undisturbed.left
        assert "RUNNING" not in dict(home.tracked()).values()

    for sent in plan(count, ranks, chance):
        home = home or undisturbed.copy(root / f"run-{ended}", ranks)
        if not interrupt(home, sent, chance, undisturbed.seconds) or home.newest() > STEPS - 30:
            finish(home)
            home, ended = None, ended + 1
            continue
        tally[sent.moment, "met" if sent.met else "missed"] += 1
    if home is not None:
        finish(home)
    return ended + (home is not None), tally


@pytest.mark.parametrize("ranks", [1, 2])
def test_signals_at_any_moment_save_one_common_step_and_the_run_goes_on_to_the_same_bits(
    undisturbed: Undisturbed, tmp_path: Path, ranks: int
) -> None:
    count = max(2, int(os.environ.get("TTRAIN_SOAK_KILLS", "5")) // 4)
    ended, tally = sweep(undisturbed, tmp_path, ranks, count)
    print(f"signals to {ranks} rank(s) in {ended} runs: {dict(tally)}")


@pytest.mark.parametrize("how", ["hang-up", "to all", "twice to one that hangs"])
def test_prefect_and_mlflow_are_told_of_a_signal_and_of_a_second_one_to_a_stage_that_hangs(
    undisturbed: Undisturbed, tmp_path: Path, how: str
) -> None:
    home, hangs = undisturbed.copy(tmp_path, 1), how.startswith("twice")
    process = home.start("pipeline", "run", "full")
    wait_for_lines(home, process, 0, r" step \d+/", 7)
    began = time.monotonic()
    if hangs:
        [worker] = [one for one in processes_of(home.cli.home) if one.name() == "ttrain-worker"]
        worker.suspend()
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
    elif how == "hang-up":
        process.send_signal(signal.SIGHUP)
    else:
        Sent("step", signal.SIGTERM, "all", twice=False).send(home, process)
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
