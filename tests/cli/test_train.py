"""`ttrain train`: a stage alone, a user's task in its own process, from any directory; what is said, and the exit codes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.data_commands import Run, in_process
from support.pipeline_home import write_corpus
from support.waiting import wait_until

from ttrain.config import Settings
from ttrain.pipeline import processes
from ttrain.pipeline.stage_worker import job_of
from ttrain.stages import Stage, user_task

COMMAND = [sys.executable, "-P", "-c", "from ttrain.cli.main import main; main()"]
SLOW = """
import time
from ttrain.train.regression import Regression

class Slow(Regression):
    def train_step(self, model, batch, device):
        print("a line of the user's own")
        time.sleep(0.01)
        return super().train_step(model, batch, device)
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory and a home of the test."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("TTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TTRAIN__RUNTIME__THREADS", "1")
    monkeypatch.setenv("TTRAIN__TRACKING__ENABLED", "false")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], elsewhere: None) -> Run:
    return in_process(capsys)


@pytest.fixture
def plugged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with a task named `slow`."""
    site = tmp_path / "site"
    info = site / "plugged-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ttrain.tasks]\nslow = slow_task:Slow\n")
    (site / "slow_task.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.syspath_prepend(site)


def in_this_process(stage: Stage, settings: Settings, work: Path, log_path: Path, observer: Any) -> Any:
    """What the process of a task does, without the seconds that its imports take."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return user_task.run(*job_of(work))
    finally:
        torch.use_deterministic_algorithms(False)


STEPS = 10  # of one epoch
WORDS = ("train", "slow", "examples=640", "--out", "out", "runtime.log_every_steps=1")
CURVE = Path("out", "run", "metrics.jsonl")


def steps_with_a_loss() -> list[int]:
    lines = [json.loads(line) for line in CURVE.read_text().splitlines()]
    return [line["step"] for line in lines if "loss" in line["metrics"]]


@pytest.mark.soak
@pytest.mark.usefixtures("plugged", "elsewhere")
def test_a_task_that_is_told_to_stop_is_saved_and_continued(run: Run) -> None:
    """In processes of its own, as a user runs it."""
    process = subprocess.Popen([*COMMAND, *WORDS], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_until(lambda: process.poll() is not None or (CURVE.exists() and CURVE.read_text().count("\n") > 5), 60)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 143, said
    assert "stopped after step" in said and "the same command continues it" in said
    assert not Path("out", "model.safetensors").exists()
    done = run(*WORDS, "--json")
    assert 5 < done.json["resumed_from_step"] < done.json["steps"] == 100 and not done.json["was_finished"]
    assert steps_with_a_loss() == list(range(1, 101))
    assert "a line of the user's own" in Path("out", "run", "log.txt").read_text()


def test_a_task_is_trained_and_its_settings_are_its_own_from_then_on(
    run: Run, plugged: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "run", in_this_process)
    words = [*WORDS, "epochs=1"]
    done = run(*words, "--json")
    assert done.code == 0, done.err
    assert done.json["steps"] == STEPS and not done.json["was_finished"]
    assert steps_with_a_loss() == list(range(1, STEPS + 1))
    assert "0.weight" in load_file("out/model.safetensors") and list(Path("out", "checkpoints").glob("step-*"))

    refused = run(*words, "-c", str(_yaml(tmp_path, "hidden: 8\noptim: {lr: 0.001}\n")))
    assert refused.code == 2
    assert "hidden: 64 → 8" in refused.out and "optim.lr: 0.01 → 0.001" in refused.out and "--allow" in refused.out

    again = run(*words)
    assert again.code == 0 and f"it was already finished at step {STEPS}; nothing was trained" in again.out
    assert "-c" not in words and run(*words, "-c", Path("out", "settings.yaml")).code == 0


@pytest.mark.soak
@pytest.mark.usefixtures("plugged", "elsewhere")
def test_a_task_whose_terminal_is_closed_is_saved() -> None:
    screen, terminal = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *WORDS],
        stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(terminal)
    with contextlib.suppress(OSError):
        while not (*Path("out", "checkpoints").glob("*"), *Path("out", "run").glob("metrics.jsonl")):
            assert select.select([screen], [], [], 60)[0] and os.read(screen, 1 << 16)
    os.close(screen)  # the kernel sends SIGHUP, and what is printed from now on fails
    assert process.wait(60) == 129
    assert list(Path("out", "checkpoints").glob("step-*")) and not Path("out", "model.safetensors").exists()


def _yaml(directory: Path, text: str) -> Path:
    path = directory / "settings.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("slw",), "no task 'slw' (did you mean 'slow'?); the tasks are regression, slow"),
        ((), "needs the name of a task, and got none; the tasks are regression, slow"),
        (("hidden=8",), "needs the name of a task"),
        (("slow", "hidden"), "'hidden' is not a setting; write key=value"),
        (("slow", "runtime.thread=1"), "unknown setting 'runtime.thread' (from command line); did you mean"),
        (("slow", "runtime.nodes=2", "runtime.rendezvous=a:1"), "a task trains on one machine"),
        (("slow", "--out", "."), "which holds other files"),
        (("slow", "--out", "a.txt"), "which is a file"),
    ],
)
def test_a_mistake_of_the_command_is_told_before_anything_starts(
    run: Run, plugged: None, words: tuple[str, ...], said: str
) -> None:
    Path("a.txt").touch()
    done = run("train", *words)
    assert done.code == 2 and said in done.err
    assert [*Path.cwd().iterdir()] == [Path.cwd() / "a.txt"]


@pytest.mark.parametrize("words", [("train",), ("stage", "run")])
def test_help_opens_from_any_directory_and_shows_an_example(run: Run, words: tuple[str, ...]) -> None:
    shown = run(*words, "--help")
    assert shown.code == 0
    assert "Usage: " in shown.out and f"ttrain {' '.join(words)}" in shown.out.partition("Example")[2]


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    """The settings that name a tiny corpus."""
    data = tmp_path / "data"
    write_corpus(data)
    names = {"pretrain": "docs*.jsonl", "sft": "chats.jsonl", "lora": "domain.jsonl"}
    return ["-c", str(data / "tiny.yaml"), *(f"data.{name}={data / file}" for name, file in names.items())]


def test_a_stage_alone_names_the_commands_that_make_its_inputs_in_their_order(run: Run, corpus: list[str]) -> None:
    done = run("stage", "run", "sft", *corpus)
    commands = ["`ttrain stage run tokenizer`", "`ttrain stage run shards-pretrain`", "`ttrain stage run pretrain`"]
    assert done.code == 2
    places = [done.err.find(command) for command in commands]
    assert -1 not in places and sorted(places) == places
    assert "`ttrain stage run shards-sft`" in done.err and "`ttrain pipeline run full`" in done.err
    assert "lora" not in done.err, "it does not need the adapter's data"


def test_a_stage_goes_on_without_the_reader_of_its_output_and_under_nohup_without_a_terminal(
    elsewhere: None, corpus: list[str]
) -> None:
    command = ["nohup", *COMMAND, "stage", "run", "tokenizer", *corpus]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None and process.stdout.readline()
    process.stdout.close()
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 0
    assert list(Path(os.environ["TTRAIN_HOME"]).glob("store/tokenizer/*/manifest.json"))


def test_a_stage_alone_prints_json_that_says_what_it_left(run: Run, corpus: list[str]) -> None:
    made, again = (run("stage", "run", "tokenizer", *corpus, "--json") for _ in range(2))
    assert (made.json["stage"], made.json["state"], made.json["result"]["vocab_size"]) == ("tokenizer", "completed", 400)
    assert (Path(made.json["path"]) / "tokenizer.json").exists()
    assert again.json == {**made.json, "state": "cached"}
