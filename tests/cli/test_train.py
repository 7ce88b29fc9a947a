"""`ttrain train`: a user's task in its own process, from any directory; and a stage alone."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.comparing import logged_steps
from support.data_commands import Run, in_process, trains_here
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


def test_a_task_is_trained_with_its_settings(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    trains_here(monkeypatch)
    out = Path("out")
    (out / "run" / "work").mkdir(parents=True)  # what a training left that was killed at once
    done = run(*WORDS, "--json")
    assert done.json["steps"] == STEPS and not done.json["was_finished"], done.err
    lines = [json.loads(line) for line in (out / "run/metrics.jsonl").read_text().splitlines()]
    assert logged_steps(lines, "loss") == list(range(1, STEPS + 1))
    assert "0.weight" in load_file(out / "model.safetensors")
    assert list((out / "checkpoints").glob("step-*"))
    Path("other.yaml").write_text("hidden: 8\noptim: {lr: 0.001}\n")
    refused = run(*WORDS, "-c", "other.yaml")
    assert refused.code == 2 and "hidden: 64" in refused.out
    for more in ((), ("-c", out / "settings.yaml")):
        again = run(*WORDS, *more, "--json")
        assert again.code == 0 and again.json["was_finished"] and again.json["steps"] == STEPS


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("slw",), "'slow'"),
        (("slow", "runtime.thread=1"), "'runtime.threads'"),
        (("slow", "runtime.nodes=2", "runtime.rendezvous=a:1"), "nodes"),
        (("slow", "--out", "."), "--out"),
    ],
)
def test_a_mistake_is_named_before_a_start(run: Run, words: tuple[str, ...], name: str) -> None:
    Path("a.txt").touch()
    done = run("train", *words)
    assert done.code == 2 and name in done.err
    assert [*Path().iterdir()] == [Path("a.txt")]
