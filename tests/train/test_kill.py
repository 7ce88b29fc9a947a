"""A stage that is killed, orphaned and stopped comes to the same bytes as one that is left alone."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.comparing import curve, logged_steps
from support.tiny_stages import Home, Watcher, stage_settings

from ttrain.config import Settings
from ttrain.core.hashing import sha256_file
from ttrain.errors import Interrupted, StageFailed
from ttrain.pipeline import launch
from ttrain.pipeline.plan import plan_stage
from ttrain.pipeline.recipe import Rerun
from ttrain.pipeline.stage_worker import PROCESS_NAME
from ttrain.stages import PRETRAIN
from ttrain.store.layout import Artifact
from ttrain.train import checkpoint_format
from ttrain.train.trainer import QUICK

STEPS = 160  # of which chance takes at most 3 * 12 and the few that pass before a signal arrives
WEIGHTS = Path("model") / "model.safetensors"


def settings_of_story() -> Settings:
    return stage_settings(STEPS, checkpoint_every_steps=5)


def step_of(line: str) -> int:
    """The step whose checkpoint the log line speaks of, else 0."""
    found = re.search(r"checkpoint of step (\d+)", line)
    return int(found[1]) if found else 0


def worker_of(pid: int) -> psutil.Process:
    """The worker that a launching process has started."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # a child that has just ended
            found += [child] if child.name() == PROCESS_NAME else []
    (worker,) = found
    return worker


def whole_steps(work: Path) -> list[int]:
    """Steps of the checkpoints, each of which verifies; one may lack its name only."""
    return [
        checkpoint_format.read(path).step for path in checkpoint_format.list_checkpoints(work / "output" / "checkpoints")
    ]


@dataclass
class Story:
    """What happened to one stage, in this order."""

    orphan_ended: bool
    after_orphan: list[int]
    killed: str
    after_kill: list[int]
    stopped: Interrupted
    after_stop: list[int]
    lines: list[list[str]]
    artifact: Artifact
    alone: Path


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Launcher killed, worker killed, worker stopped, finished; and the same stage undisturbed, in this process."""
    root = tmp_path_factory.mktemp("kill")
    home, settings, dice = Home.make(root / "home"), settings_of_story(), random.Random()
    inputs = home.pretrain_inputs()
    key = plan_stage(PRETRAIN, settings, home.store, inputs).key
    assert key is not None
    work = home.store.work("pretrain", key)
    lines: list[list[str]] = []

    # 1. the launching process is killed, and the worker is alone
    receiver, sender = multiprocessing.Pipe(duplex=False)
    launcher = multiprocessing.get_context("fork").Process(
        target=launch.build, args=(PRETRAIN, settings, home.store, inputs, Watcher(sender.send))
    )
    launcher.start()
    assert launcher.pid is not None
    at, lines_of_orphan = dice.randint(1, 12), []
    while (
        not lines_of_orphan or step_of(lines_of_orphan[-1]) < at or not [*(work / "output" / "checkpoints").glob("step-*")]
    ):
        assert receiver.poll(240), "the launching process says nothing"
        lines_of_orphan.append(receiver.recv())  # it is logged before it is whole
    worker = worker_of(launcher.pid)
    launcher.kill()
    launcher.join()
    gone, _ = psutil.wait_procs([worker], timeout=30)
    lines.append(lines_of_orphan)
    after_orphan = whole_steps(work)

    # 2. the worker is killed
    at = after_orphan[-1] + dice.randint(1, 12)

    def kill(line: str) -> None:
        saved = [int(path.name.removeprefix("step-")) for path in (work / "output" / "checkpoints").glob("step-*")]
        if step_of(line) >= at and max(saved) > after_orphan[-1]:  # the line is written before the checkpoint is
            worker_of(os.getpid()).send_signal(signal.SIGKILL)
            time.sleep(0.05)  # so that the lines that follow find it dead
            watcher.act = lambda line: None

    watcher = Watcher(kill)
    with pytest.raises(StageFailed) as killed:
        launch.build(PRETRAIN, settings, home.store, inputs, watcher)
    lines.append(watcher.lines)
    after_kill = whole_steps(work)

    # 3. it is asked to stop
    stopper = Watcher()
    at_stop = after_kill[-1] + dice.randint(1, 12)
    stopper.act = lambda line: stopper.stop() if step_of(line) >= at_stop else None
    with pytest.raises(Interrupted) as stopped:
        launch.build(PRETRAIN, settings, home.store, inputs, stopper)
    lines.append(stopper.lines)
    after_stop = whole_steps(work)

    # 4. it is left alone
    last = Watcher()
    artifact = launch.build(PRETRAIN, settings, home.store, inputs, last).artifact
    lines.append(last.lines)
    home.pretrain(settings, root / "alone")
    return Story(
        bool(gone), after_orphan, str(killed.value), after_kill, stopped.value, after_stop, lines, artifact, root / "alone"
    )


def test_a_stage_that_was_killed_and_stopped_gives_the_bytes_of_one_that_never_was(story: Story) -> None:
    assert sha256_file(story.artifact.path / WEIGHTS) == sha256_file(story.alone / WEIGHTS)
    assert story.artifact.manifest["files"][str(WEIGHTS)]["sha256"] == sha256_file(story.alone / WEIGHTS)
    optimizer = Path("checkpoints") / f"step-{STEPS:08d}" / "optimizer.safetensors"
    assert sha256_file(story.artifact.path / optimizer) == sha256_file(story.alone / optimizer)


def test_its_curve_has_every_step_once_with_the_same_figures(story: Story) -> None:
    ours = curve(story.artifact.path / "run" / "metrics.jsonl")
    assert logged_steps(ours, "loss") == [*range(1, STEPS + 1)] and logged_steps(ours, "validation_loss") == [STEPS]
    quick = logged_steps(ours, QUICK)
    assert quick == sorted({*quick}) and quick[0] == 0, "one each, and one before the first step"
    assert ours == curve(story.alone / "run" / "metrics.jsonl")


def test_each_try_continues_at_the_newest_checkpoint_of_the_one_before(story: Story) -> None:
    """Bitwise, above; here: that there was something to continue, each time."""
    begins = [0, story.after_orphan[-1], story.after_kill[-1], story.after_stop[-1]]
    assert begins == sorted({*begins}), "every try got further"
    for begin, lines in zip(begins, story.lines, strict=True):
        assert any(f"training from step {begin} to {STEPS}" in line for line in lines)
    assert story.artifact.result["resumed_from_step"] == story.after_stop[-1] < STEPS


def test_a_worker_dies_with_the_process_that_waits_for_it(story: Story) -> None:
    assert story.orphan_ended
    assert 0 < story.after_orphan[-1] < STEPS


def test_a_killed_worker_is_a_failed_stage_that_says_so(story: Story) -> None:
    assert "its process was killed by SIGKILL without a result" in story.killed
    assert "log.txt" in story.killed


def test_a_stop_saves_the_step_at_which_it_stops(story: Story) -> None:
    found = re.search(rf"stage pretrain: stopped after step (\d+) of {STEPS}; the state is saved", str(story.stopped))
    assert found
    assert story.after_stop[-1] == int(found[1])
    assert story.stopped.exit_code == 128 + signal.SIGTERM


def test_nothing_of_the_tries_is_left_behind(story: Story) -> None:
    kept = sorted(path.name for path in (story.artifact.path / "checkpoints").iterdir())
    assert kept == sorted(path.name for path in (story.alone / "checkpoints").iterdir())
    work = story.artifact.path.parents[2] / "work" / "pretrain"
    assert [path.name for path in work.iterdir() if path.suffix != ".lock"] == []


# --- extending a finished run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("short", "long", "begins"),
    [
        ({"tokens": 8 * 256, "schedule": {"warmup_steps": 2}}, {"tokens": 12 * 256, "schedule": {"warmup_steps": 2}}, 4),
        # the run ends within a step, which a longer run fills up: the checkpoint after it is of another run
        ({"epochs": 0.2, "tokens": None, "schedule": {"kind": "constant"}},
         {"epochs": 0.4, "tokens": None, "schedule": {"kind": "constant"}}, None),
    ],
    ids=["before the decay", "a last step cut short"],
)  # fmt: skip
def test_an_extended_stage_gives_the_bytes_of_one_from_the_start(
    tmp_path: Path, short: dict[str, Any], long: dict[str, Any], begins: int | None
) -> None:
    home = Home.make(tmp_path / "home")
    inputs = home.pretrain_inputs()
    first, second = (stage_settings(pretrain=budget, keep_checkpoints=9) for budget in (short, long))
    planned = plan_stage(PRETRAIN, first, home.store, inputs)
    assert planned.key is not None
    result = home.pretrain(first, tmp_path / "short")
    if begins is None:
        assert result["steps"] * 256 > result["tokens"], "the last step is a part of one"
        begins = 4 * ((result["steps"] - 1) // 4)
    manifest = {"result": result, "ingredients": planned.ingredients}
    home.store.publish("pretrain", planned.key, tmp_path / "short", manifest)
    extension = plan_stage(PRETRAIN, second, home.store, inputs, Rerun(extend=True))
    assert extension.start_from is not None
    assert extension.start_from.name == f"step-{begins:08d}"
    extended = home.pretrain(second, tmp_path / "extended", start_from=extension.start_from)
    straight = home.pretrain(second, tmp_path / "straight")
    assert (extended["resumed_from_step"], extended["extended_from_step"]) == (begins, begins)
    assert extended["steps"] == straight["steps"] > result["steps"]
    assert sha256_file(tmp_path / "extended" / WEIGHTS) == sha256_file(tmp_path / "straight" / WEIGHTS)
