"""SIGINT and SIGTERM at random moments of `ttrain train pretrain`, on one rank and on two, as a user or a system sends them.

`make soak` runs it; TTRAIN_SOAK_KILLS says how many signals: half as many.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from doubles import curve
from harness import Cli, write_corpus

from ttrain import runs
from ttrain.digests import sha256_file
from ttrain.store import Store
from ttrain.train import checkpoint
from ttrain.train.checkpoint_files import found

pytestmark = pytest.mark.soak
# Steps of about 0.05 s, a validation of several of them; `tree` makes the bits those of one rank.
RUN = (
    *("train", "pretrain", "model.hidden_size=64", "pretrain.tokens_per_step=1024", "pretrain.tokens=122880"),
    *("pretrain.validation_rows=32", "pretrain.validate_every_steps=6", "reading.heldout_fraction=0.2"),
    *("runtime.log_every_steps=1", "runtime.checkpoint_every_steps=4", "runtime.reduction=tree"),
)
STEPS, VALIDATE = 120, 6
MOMENTS = ("start", "step", "validation", "save")


@dataclass
class Home:
    """A home in which everything is ready for the pretraining."""

    cli: Cli
    ranks: int = 1

    def start(self) -> subprocess.Popen[str]:
        """In a process group of its own, as a shell starts a command."""
        return subprocess.Popen(
            self.cli.command(*RUN, f"runtime.devices={self.ranks}"), env=self.cli.environment, cwd=self.cli.data, text=True,
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
        return max((checkpoint.read(path).step for path in found(self.output / "checkpoints")), default=0)

    def processes(self) -> list[psutil.Process]:
        there = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TTRAIN_HOME") == str(self.cli.home):
                    there.append(process)
        return there

    def left(self) -> dict[str, Any]:
        """What the finished stage has left."""
        path = Store(self.cli.home).latest("pretrain").path
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
        cli("stage", "run", stage, *RUN[2:])
    alone = Undisturbed(cli, {}, 0.0)
    home, began = alone.copy(root / "alone", 1), time.monotonic()
    process = home.start()
    lines(home, process, 0, r" step 1/", 1)
    alone.seconds = time.monotonic() - began
    said, _ = process.communicate()
    assert process.returncode == 0, said
    alone.left = home.left()
    return alone


def lines(home: Home, process: subprocess.Popen[str], position: int, pattern: str, count: int) -> list[str]:
    """Wait for so many such lines in the log after this position; all that came, fewer where the process ended before."""
    there: list[str] = []
    while len(there) < count:
        ended = process.poll() is not None
        if home.log is not None and home.log.exists():
            there = re.findall(rf"^.*{pattern}.*$", home.log.read_text()[position:], re.MULTILINE)
        if ended:
            break
        time.sleep(0.001)
    return there


def step_of(line: str) -> int:
    """The step of a line in the log."""
    match = re.search(r"(?: step |from step |checkpoint of step )(\d+)", line)
    assert match, line
    return int(match[1])


@dataclass
class Sent:
    """A signal: what the run was at, what of it was there."""

    moment: str
    signum: int
    second: bool
    everyone: bool
    step: int = 0  # the last one that was logged
    begun: bool = False  # the trainer
    hit: bool = True  # whether it came at that moment


def wait_for_moment(home: Home, process: subprocess.Popen[str], sent: Sent, chance: random.Random, seconds: float) -> None:
    """Return at the moment, or when the run has ended."""
    position = len(home.log.read_text()) if home.log is not None and home.log.exists() else 0
    if sent.moment == "start":
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(chance.uniform(0, seconds))
    elif sent.moment == "step":
        lines(home, process, position, r" step \d+/", chance.randint(1, 8))
        time.sleep(chance.uniform(0, 0.1))
    elif sent.moment == "validation":
        step = 0
        for count in itertools.count(1):
            some = lines(home, process, position, r" step \d+/", count)
            if len(some) < count or (step := step_of(some[-1])) % VALIDATE == 0:
                break
    else:
        lines(home, process, position, "checkpoint of step", chance.randint(1, 2))
        while process.poll() is None and not any((home.output or Path("/nowhere")).glob("checkpoints/.writing-*")):
            time.sleep(0.0002)
    new = lines(home, process, position, r" step \d+/", 0) or lines(home, process, position, r"from step \d+ to", 0)
    sent.begun, sent.step = bool(new), step_of(new[-1]) if new else 0


def interrupt(home: Home, sent: Sent, chance: random.Random, seconds: float) -> bool:
    """Start the run, send the signal at its moment and look at everything; False where the run had come to its end."""
    before = home.newest()
    process = home.start()
    wait_for_moment(home, process, sent, chance, seconds)
    for _ in range(1 + sent.second):
        with contextlib.suppress(ProcessLookupError):
            if sent.everyone:
                os.killpg(process.pid, sent.signum)
            else:
                os.kill(process.pid, sent.signum)
        time.sleep(chance.uniform(0.02, 0.5) if sent.second else 0)
    began = time.monotonic()
    said, _ = process.communicate(timeout=60)
    took = time.monotonic() - began
    if process.returncode == 0:
        return False
    assert process.returncode == 128 + sent.signum, f"{sent}\n{said}"
    assert "Traceback" not in said, f"{sent}\n{said}"
    while home.processes() and time.monotonic() < began + took + 5:
        time.sleep(0.05)
    assert home.processes() == [], f"{sent}\n{said}"
    check_what_is_told(home, sent, said)
    newest = home.newest()
    assert newest >= before, "what was durable is gone"
    if sent.second:
        assert took < 5, f"{sent}: ended only after {took:.1f} s"
    elif sent.begun:
        assert sent.step <= newest <= sent.step + 2, f"{sent}: step {newest} is saved\n{said}"
        assert home.output is not None
        written = [line["step"] for line in curve(home.output / "run" / "metrics.jsonl")]
        assert written[-1] == newest, "no step was made beyond the one that is saved"
        assert f"stopped after step {newest} of {STEPS}; the state is saved" in said
        sent.hit = sent.moment != "validation" or newest == sent.step
    return True


def check_what_is_told(home: Home, sent: Sent, said: str) -> None:
    """The record of the run and MLflow know that it was interrupted."""
    history = runs.history(home.cli.home)
    if history and history[0]["stages"][0]["name"] == "pretrain":
        assert history[0]["outcome"] == "interrupted", f"{sent}\n{said}"
        assert history[0]["stages"][0]["outcome"] in ("interrupted", "pending"), f"{sent}\n{said}"
    with sqlite3.connect(home.cli.home / "mlflow" / "mlflow.db") as mlflow:
        status = dict(mlflow.execute("select name, status from runs order by start_time").fetchall())
    assert "RUNNING" not in status.values(), f"{sent}: {status}\n{said}"
    assert status.get("pretrain", "KILLED") == "KILLED", f"{sent}: {status}"


def plan(count: int, chance: random.Random) -> Iterator[Sent]:
    """All moments equally often, every fourth time with a second signal."""
    for number in range(count):
        moment = MOMENTS[number % len(MOMENTS)]
        signum = chance.choice([signal.SIGINT, signal.SIGTERM])
        yield Sent(moment, signum, second=number // len(MOMENTS) % 4 == 3, everyone=chance.random() < 0.5)


@dataclass
class Tally:
    """What was sent, and how often the moment was met."""

    sent: Counter[str] = field(default_factory=Counter)
    hit: Counter[str] = field(default_factory=Counter)
    runs: int = 0


def sweep(undisturbed: Undisturbed, root: Path, ranks: int, count: int) -> Tally:
    chance, tally = random.Random(100 + ranks), Tally()
    home: Home | None = None

    def finish(home: Home) -> None:
        process = home.start()
        said, _ = process.communicate()
        assert process.returncode == 0, said
        assert home.left() == undisturbed.left
        tally.runs += 1

    for sent in plan(count, chance):
        home = home or undisturbed.copy(root / f"run-{tally.runs}", ranks)
        if not interrupt(home, sent, chance, undisturbed.seconds) or home.newest() > STEPS - 30:
            finish(home)
            home = None
            continue
        tally.sent[sent.moment] += 1
        tally.hit[sent.moment] += sent.hit
    if home is not None:
        finish(home)
    return tally


@pytest.mark.parametrize("ranks", [1, 2])
def test_signals_at_any_moment_save_one_common_step_and_the_run_goes_on_to_the_same_bits(
    undisturbed: Undisturbed, tmp_path: Path, ranks: int
) -> None:
    count = max(4, int(os.environ.get("TTRAIN_SOAK_KILLS", "5")) // 4)
    tally = sweep(undisturbed, tmp_path, ranks, count)
    print(f"signals to {ranks} rank(s): {dict(tally.sent)} in {tally.runs} runs; met at their moment: {dict(tally.hit)}")
