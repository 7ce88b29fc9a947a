"""SIGINT and SIGTERM to `ttrain stage run pretrain` while it steps, validates and saves; a second one to one that hangs."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
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
from ttrain.engine.stage_worker import PROCESS_NAME
from ttrain.store import runs
from ttrain.train import checkpoint
from ttrain.train.checkpoint_format import list_checkpoints

pytestmark = [pytest.mark.soak, pytest.mark.long]
# Steps of about 0.05 s, a validation of several of them.
SETTINGS = (
    "model.hidden_size=64", "pretrain.tokens_per_step=1024", "pretrain.tokens=92160", "pretrain.validation_rows=200",
    "pretrain.validate_every_steps=6", "reading.heldout_fraction=0.5", "runtime.log_every_steps=1",
    "runtime.checkpoint_every_steps=4",
)  # fmt: skip
STEPS = 90
# Lines of the log
STEPPED, VALIDATING, SAVING = r" step \d+/\d+  loss", r" step (?:6|12|18)/\d+  loss", "checkpoint of step"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """A home in which everything is ready for the pretraining."""
    root = tmp_path_factory.mktemp("signals")
    write_corpus(root / "data")
    cli = Cli(root / "home", root / "data")
    for stage in ("tokenizer", "shards-pretrain"):
        cli("stage", "run", stage, *SETTINGS)
    return cli


def copied(prepared: Cli, root: Path) -> Cli:
    shutil.copytree(prepared.home, root / "home")
    return Cli(root / "home", prepared.data)


def left(cli: Cli) -> dict[str, Any]:
    """The curve of the finished stage, and the bytes of its weights and of its optimizer's state."""
    [path] = cli.home.glob("store/pretrain/*")
    names = ("model/model.safetensors", f"checkpoints/step-{STEPS:08d}/optimizer.safetensors")
    return {"curve": curve(path / "run" / "metrics.jsonl"), **{name: sha256_file(path / name) for name in names}}


@pytest.fixture(scope="module")
def undisturbed(prepared: Cli, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What one rank and two leave where nothing disturbs them."""
    found = {}
    for ranks in (1, 2):
        cli = copied(prepared, tmp_path_factory.mktemp("undisturbed"))
        cli("stage", "run", "pretrain", *SETTINGS, f"runtime.devices={ranks}")
        found[ranks] = left(cli)
    return found


def started(cli: Cli, *words: str, pattern: str, count: int) -> tuple[subprocess.Popen[str], Path]:
    """The command in a process group of its own, and its stage's output, once the stage's log has so many such lines."""
    process = subprocess.Popen(
        cli.command(*words, *SETTINGS), env=cli.environment, cwd=cli.data, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    while process.poll() is None:
        for log in cli.home.glob("work/pretrain/*/output/run/log.txt"):
            if len(re.findall(pattern, log.read_text())) >= count:
                return process, log.parents[1]
        time.sleep(0.001)
    raise AssertionError(f"it ended before: {process.communicate()[0]}")


def send(cli: Cli, process: subprocess.Popen[str], signum: int, to: str) -> None:
    """To the command, as `kill` does, to its process group, as a terminal does, or to all processes, as systemd does."""
    if to == "the group":
        os.killpg(process.pid, signum)
    for one in {"all": processes_of(cli.home), "the command": [psutil.Process(process.pid)]}.get(to, []):
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
    prepared: Cli, undisturbed: dict[int, Any], tmp_path: Path, ranks: int, signum: int, to: str, moment: str
) -> None:
    cli, words = copied(prepared, tmp_path), ("stage", "run", "pretrain", f"runtime.devices={ranks}")
    process, output = started(cli, *words, pattern=moment, count=2)
    send(cli, process, signum, to)
    stepped = len(re.findall(STEPPED, (output / "run" / "log.txt").read_text()))
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signum and "Traceback" not in said, said
    wait_until(lambda: not processes_of(cli.home), 5, lambda: said)
    newest = max(checkpoint.read(path).step for path in list_checkpoints(output / "checkpoints"))
    assert stepped <= newest <= stepped + 2 and f"step {newest} of {STEPS}" in said, said
    written = curve(output / "run" / "metrics.jsonl")
    assert written[-1]["step"] == newest, "no step was made beyond the one that is saved"
    run = runs.history(cli.home)[0]
    assert run["outcome"] == run["stages"][0]["outcome"] == "interrupted"
    cli(*words, *SETTINGS)
    assert left(cli) == undisturbed[ranks]


def test_a_second_signal_ends_a_stage_that_hangs(prepared: Cli, tmp_path: Path) -> None:
    cli = copied(prepared, tmp_path)
    process, _ = started(cli, "pipeline", "run", "full", pattern=STEPPED, count=7)
    began = time.monotonic()
    [worker] = [one for one in processes_of(cli.home) if one.name() == PROCESS_NAME]
    worker.suspend()
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(SAME_SIGNAL_SECONDS + 0.1)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in said, said
    assert time.monotonic() - began < 20, "the time for a stage to stop by itself is 60 s"
    wait_until(lambda: not processes_of(cli.home), 5)
    assert cli.rows("prefect", "select state_name from flow_run") == [("Cancelled",)]
