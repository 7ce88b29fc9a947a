"""`ttrain train`: a stage alone, a user's task in its own process, from any directory; what is said, and the exit codes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from support.comparing import logged_steps
from support.data_commands import Run, in_process, trains_here
from support.pipeline_home import Cli, write_corpus
from support.planned_homes import remember_modules

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
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("TTRAIN_HOME", str(tmp_path / "home"))
    remember_modules(tmp_path / "home")
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


STEPS = 10  # of one epoch
WORDS = ("train", "slow", "examples=640", "--out", "out", "runtime.log_every_steps=1")
CURVE = Path("out", "run", "metrics.jsonl")


def test_a_task_is_trained_and_its_settings_are_its_own_from_then_on(
    run: Run, plugged: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trains_here(monkeypatch)
    words = [*WORDS, "epochs=1"]
    Path("out", "run", "work").mkdir(
        parents=True
    )  # all that a training left which was killed at once
    done = run(*words, "--json")
    assert done.code == 0, done.err
    assert done.json["steps"] == STEPS and not done.json["was_finished"]
    lines = [json.loads(line) for line in CURVE.read_text().splitlines()]
    assert logged_steps(lines, "loss") == list(range(1, STEPS + 1))
    assert "0.weight" in load_file("out/model.safetensors") and list(
        Path("out", "checkpoints").glob("step-*")
    )
    Path("other.yaml").write_text("hidden: 8\noptim: {lr: 0.001}\n")
    refused = run(*words, "-c", "other.yaml")
    assert refused.code == 2
    assert (
        "hidden: 64 → 8" in refused.out
        and "optim.lr: 0.01 → 0.001" in refused.out
        and "--allow" in refused.out
    )
    again = run(*words)
    assert (
        again.code == 0
        and f"it was already finished at step {STEPS}; nothing was trained" in again.out
    )
    assert "-c" not in words and run(*words, "-c", Path("out", "settings.yaml")).code == 0


def test_settings_of_a_task_come_from_the_environment_below_the_command_line_and_above_a_file(
    run: Run, plugged: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trains_here(monkeypatch)
    words = ("train", "slow", "examples=64", "epochs=1")

    def trained(out: str, *more: str) -> dict[str, Any]:
        done = run(*words, *more, "--out", out, "--json")
        assert done.code == 0, done.err
        settings: dict[str, Any] = yaml.safe_load(Path(out, "settings.yaml").read_text())
        return settings

    Path("mine.yaml").write_text("optim: {lr: 0.5, weight_decay: 0.25}\nhidden: 8\n")
    monkeypatch.setenv("TTRAIN__OPTIM__LR", "0.125")
    monkeypatch.setenv("TTRAIN__HIDDEN", "16")
    monkeypatch.setenv(
        "TTRAIN__SFT__EPOCHS", "3"
    )  # of pipelines, as TTRAIN__TRACKING__ENABLED above
    settings = trained("a", "-c", "mine.yaml", "hidden=32")
    assert (settings["optim"]["lr"], settings["optim"]["weight_decay"], settings["hidden"]) == (
        0.125,
        0.25,
        32,
    )
    monkeypatch.setenv("TTRAIN__OPTIM__LRR", "1")
    refused = run(*words, "--out", "b")
    assert refused.code == 2
    assert (
        "unknown setting 'optim.lrr' (from TTRAIN__OPTIM__LRR); did you mean 'optim.lr'?"
        in refused.out
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("slw",), "no task 'slw' (did you mean 'slow'?); the tasks are regression, slow"),
        ((), "needs the name of a task, and got none; the tasks are regression, slow"),
        (("slow", "hidden"), "'hidden' is not a setting; write key=value"),
        (
            ("slow", "runtime.thread=1"),
            "unknown setting 'runtime.thread' (from command line); did you mean",
        ),
        (("slow", "runtime.nodes=2", "runtime.rendezvous=a:1"), "a task trains on one machine"),
        (("slow", "--out", "."), "which holds other files"),
    ],
)
def test_a_mistake_of_the_command_is_told_before_anything_starts(
    run: Run, plugged: None, words: tuple[str, ...], said: str
) -> None:
    Path("a.txt").touch()
    done = run("train", *words)
    assert done.code == 2 and said in done.err
    assert [*Path.cwd().iterdir()] == [Path.cwd() / "a.txt"]


def test_a_stage_alone_names_the_commands_that_make_its_inputs_in_their_order(run: Run) -> None:
    write_corpus(data := Path("data"))
    done = run("stage", "run", "sft", *Cli(Path("home"), data).settings)
    commands = [
        "`ttrain stage run tokenizer`",
        "`ttrain stage run shards-pretrain`",
        "`ttrain stage run pretrain`",
    ]
    assert done.code == 2
    places = [done.err.find(command) for command in commands]
    assert -1 not in places and sorted(places) == places
    assert (
        "`ttrain stage run shards-sft`" in done.err and "`ttrain pipeline run full -c " in done.err
    )
    assert "lora" not in done.err, "it does not need the adapter's data"
