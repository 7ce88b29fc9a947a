"""`ttrain train`: a user's task in its own process, from any directory; and a stage alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from support.comparing import logged_steps
from support.data_commands import Run, in_process, trains_here
from support.pipeline_home import Cli, write_corpus
from support.planned_homes import remember_modules

TASK = """
from ttrain.train.regression import Regression

class Slow(Regression):
    def train_step(self, model, batch, device):
        print("a line of the user's own")
        return super().train_step(model, batch, device)
"""
STEPS = 10  # of one epoch
WORDS = ("train", "slow", "examples=640", "epochs=1", "--out", "out", "runtime.log_every_steps=1")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The commands in a directory of its own, with an installed package that has a task `slow`."""
    info = tmp_path / "site" / "plugged-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ttrain.tasks]\nslow = slow_task:Slow\n")
    (tmp_path / "site" / "slow_task.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path / "site")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("TTRAIN_HOME", str(tmp_path / "home"))
    remember_modules(tmp_path / "home")
    monkeypatch.setenv("TTRAIN__RUNTIME__THREADS", "1")
    monkeypatch.setenv("TTRAIN__TRACKING__ENABLED", "false")
    return in_process(capsys)


def test_a_task_is_trained_with_the_same_settings(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    trains_here(monkeypatch)
    out = Path("out")
    (out / "run" / "work").mkdir(parents=True)  # what a training left that was killed at once
    done = run(*WORDS, "--json")
    assert done.code == 0, done.err
    assert done.json["steps"] == STEPS and not done.json["was_finished"]
    lines = [json.loads(line) for line in (out / "run/metrics.jsonl").read_text().splitlines()]
    assert logged_steps(lines, "loss") == list(range(1, STEPS + 1))
    assert "0.weight" in load_file(out / "model.safetensors")
    assert list((out / "checkpoints").glob("step-*"))
    Path("other.yaml").write_text("hidden: 8\noptim: {lr: 0.001}\n")
    refused = run(*WORDS, "-c", "other.yaml")
    assert refused.code == 2
    for name in ("hidden: 64", "optim.lr: 0.01", "--allow"):
        assert name in refused.out
    for more in ((), ("-c", out / "settings.yaml")):
        again = run(*WORDS, *more, "--json")
        assert again.code == 0 and again.json["was_finished"] and again.json["steps"] == STEPS


def test_environment_wins_over_files_and_loses_to_overrides(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    trains_here(monkeypatch)
    words = ("train", "slow", "examples=64", "epochs=1")
    Path("mine.yaml").write_text("optim: {lr: 0.5, weight_decay: 0.25}\nhidden: 8\n")
    monkeypatch.setenv("TTRAIN__OPTIM__LR", "0.125")
    monkeypatch.setenv("TTRAIN__HIDDEN", "16")
    monkeypatch.setenv("TTRAIN__SFT__EPOCHS", "3")  # of pipelines alone
    done = run(*words, "-c", "mine.yaml", "hidden=32", "--out", "a")
    assert done.code == 0, done.err
    settings: dict[str, Any] = yaml.safe_load(Path("a/settings.yaml").read_text())
    assert settings["optim"]["lr"] == 0.125 and settings["optim"]["weight_decay"] == 0.25
    assert settings["hidden"] == 32
    monkeypatch.setenv("TTRAIN__OPTIM__LRR", "1")
    refused = run(*words, "--out", "b")
    assert refused.code == 2 and "TTRAIN__OPTIM__LRR" in refused.out


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("slw",), "'slow'"),
        ((), "slow"),
        (("slow", "hidden"), "'hidden'"),
        (("slow", "runtime.thread=1"), "'runtime.threads'"),
        (("slow", "runtime.nodes=2", "runtime.rendezvous=a:1"), "nodes"),
        (("slow", "--out", "."), "--out"),
    ],
)
def test_a_mistake_is_named_before_anything_starts(
    run: Run, words: tuple[str, ...], name: str
) -> None:
    Path("a.txt").touch()
    done = run("train", *words)
    assert done.code == 2 and name in done.err
    assert [*Path().iterdir()] == [Path("a.txt")]


def test_a_stage_alone_names_the_commands_that_make_its_inputs_in_their_order(run: Run) -> None:
    write_corpus(data := Path("data"))
    done = run("stage", "run", "sft", *Cli(Path("home"), data).settings)
    assert done.code == 2
    stages = ("tokenizer", "shards-pretrain", "pretrain")
    places = [done.err.find(f"`ttrain stage run {stage}`") for stage in stages]
    assert -1 not in places and sorted(places) == places
    assert "shards-sft" in done.err
    assert "lora" not in done.err, "it does not need the adapter's data"
