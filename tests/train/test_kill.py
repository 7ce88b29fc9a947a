"""A stage that is orphaned, killed and stopped comes to the same bytes as one that is left alone; an extended one too."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.comparing import curve, logged_steps
from support.tiny_stages import Home, Watcher, build_stage, stage_settings

from ttrain.core.hashing import sha256_file
from ttrain.engine.graph import Rerun
from ttrain.engine.planner import plan_stage
from ttrain.engine.stage_worker import PROCESS_NAME
from ttrain.errors import Interrupted, StageFailed
from ttrain.store.layout import Artifact
from ttrain.tasks import PRETRAIN
from ttrain.train import checkpoint_format
from ttrain.train.trainer import QUICK

STEPS = 100  # of which chance takes at most 3 * 6, and the watch of parents half a second
TOKENS_PER_STEP = 1024  # 15 ms on a fast core; with 256 that half second was 100 steps there
WEIGHTS = Path("model") / "model.safetensors"


class Tries:
    """One stage that is built again and again."""

    def __init__(self, home: Home) -> None:
        steps = {"tokens": STEPS * TOKENS_PER_STEP, "tokens_per_step": TOKENS_PER_STEP}
        self.home, self.settings = home, stage_settings(STEPS, steps, rows_per_device=8, checkpoint_every_steps=4)
        self.inputs = home.pretrain_inputs()
        key = plan_stage(PRETRAIN, self.settings, home.store, self.inputs).key
        assert key is not None
        self.work = home.store.work("pretrain", key)
        self.lines: list[list[str]] = []
        self.begins = [0]  # the step at which each try has to begin

    def build(self, observer: Watcher) -> Artifact:
        self.lines.append(observer.lines)
        return build_stage(PRETRAIN, self.settings, self.home.store, self.inputs, observer).artifact

    def saved(self) -> list[int]:
        """Steps of the checkpoints that have their name."""
        return sorted(int(path.name.removeprefix("step-")) for path in self._checkpoints.glob("step-*"))

    def ended(self) -> None:
        """Every checkpoint verifies; one may lack its name only."""
        found = checkpoint_format.list_checkpoints(self._checkpoints)
        self.begins.append(max(checkpoint_format.read(path).step for path in found))

    @property
    def _checkpoints(self) -> Path:
        return self.work / "output" / "checkpoints"


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


def orphan(tries: Tries, at: int) -> None:
    """Kill the launching process, and see that the worker does not outlive it."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    launcher = multiprocessing.get_context("fork").Process(target=tries.build, args=(Watcher(sender.send),))
    launcher.start()
    assert launcher.pid is not None
    lines: list[str] = []
    while not lines or step_of(lines[-1]) < at or not tries.saved():  # it is logged before it is whole
        assert receiver.poll(240), "the launching process says nothing"
        lines.append(receiver.recv())
    worker = worker_of(launcher.pid)
    launcher.kill()
    launcher.join()
    assert psutil.wait_procs([worker], timeout=30)[1] == []
    tries.lines.append(lines)


def kill(tries: Tries, at: int) -> str:
    """Kill the worker; what is said of it."""

    def act(line: str) -> None:
        if step_of(line) >= at and tries.saved()[-1] > tries.begins[-1]:  # the line is written before the checkpoint is
            worker_of(os.getpid()).send_signal(signal.SIGKILL)
            time.sleep(0.05)  # so that the lines that follow find it dead
            watcher.act = lambda line: None

    watcher = Watcher(act)
    with pytest.raises(StageFailed) as killed:
        tries.build(watcher)
    return str(killed.value)


def stop(tries: Tries, at: int) -> Interrupted:
    """Ask it to stop; what is said of it."""
    watcher = Watcher()
    watcher.act = lambda line: watcher.stop() if step_of(line) >= at else None
    with pytest.raises(Interrupted) as stopped:
        tries.build(watcher)
    return stopped.value


def test_a_stage_that_was_orphaned_killed_and_stopped_gives_the_bytes_of_one_that_never_was(
    stage_home: Home, tmp_path: Path
) -> None:
    tries, dice = Tries(stage_home), random.Random()
    orphan(tries, dice.randint(1, 6))
    tries.ended()
    said = kill(tries, tries.begins[-1] + dice.randint(1, 6))
    assert "its process was killed by SIGKILL without a result" in said and "log.txt" in said
    tries.ended()
    stopped = stop(tries, tries.begins[-1] + dice.randint(1, 6))
    tries.ended()
    assert f"stage pretrain: stopped after step {tries.begins[-1]} of {STEPS}; the state is saved" in str(stopped)
    assert stopped.exit_code == 128 + signal.SIGTERM

    artifact, alone = tries.build(Watcher()), tmp_path / "alone"
    stage_home.pretrain(tries.settings, alone)
    assert tries.begins == sorted({*tries.begins}), "every try got further"
    assert artifact.result["resumed_from_step"] == tries.begins[-1] < STEPS
    for begin, lines in zip(tries.begins, tries.lines, strict=True):
        assert any(f"training from step {begin} to {STEPS}" in line for line in lines)
    for file in (WEIGHTS, Path("checkpoints") / f"step-{STEPS:08d}" / "optimizer.safetensors"):
        assert sha256_file(artifact.path / file) == sha256_file(alone / file)
    assert artifact.manifest["files"][str(WEIGHTS)]["sha256"] == sha256_file(alone / WEIGHTS)
    ours = curve(artifact.path / "run" / "metrics.jsonl")
    assert logged_steps(ours, "loss") == [*range(1, STEPS + 1)] and logged_steps(ours, "validation_loss") == [STEPS]
    quick = logged_steps(ours, QUICK)
    assert quick == sorted({*quick}) and quick[0] == 0, "one each, and one before the first step"
    assert ours == curve(alone / "run" / "metrics.jsonl")
    kept, expected = (sorted(path.name for path in (place / "checkpoints").iterdir()) for place in (artifact.path, alone))
    assert kept == expected and not tries.work.exists(), "nothing of the tries is left behind"


# --- extending a finished run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("short", "long", "begins"),
    [
        ({"tokens": 8 * 256, "schedule": {"warmup_steps": 2}}, {"tokens": 10 * 256, "schedule": {"warmup_steps": 2}}, 4),
        # the run ends within a step, which a longer run fills up: the checkpoint after it is of another run
        ({"epochs": 0.2, "tokens": None, "schedule": {"kind": "constant"}},
         {"epochs": 0.3, "tokens": None, "schedule": {"kind": "constant"}}, None),
        ({"tokens": 1000, "packing": "none", "schedule": {"warmup_steps": 2}},
         {"tokens": 2000, "packing": "none", "schedule": {"warmup_steps": 2}}, 3),
    ],
    ids=["before the decay", "a last step cut short", "rows that are not packed"],
)  # fmt: skip
def test_an_extended_stage_gives_the_bytes_of_one_from_the_start(
    stage_home: Home, tmp_path: Path, short: dict[str, Any], long: dict[str, Any], begins: int | None
) -> None:
    inputs = stage_home.pretrain_inputs()
    first, second = (stage_settings(pretrain=budget, keep_checkpoints=9) for budget in (short, long))
    planned = plan_stage(PRETRAIN, first, stage_home.store, inputs)
    assert planned.key is not None
    result = stage_home.pretrain(first, tmp_path / "short")
    if begins is None:
        assert result["steps"] * 256 > result["tokens"], "the last step is a part of one"
        begins = 4 * ((result["steps"] - 1) // 4)
    manifest = {"result": result, "ingredients": planned.ingredients, "inputs": {}}
    stage_home.store.publish("pretrain", planned.key, tmp_path / "short", manifest)
    extension = plan_stage(PRETRAIN, second, stage_home.store, inputs, Rerun(extend=True))
    assert extension.start_from is not None
    assert extension.start_from.name == f"step-{begins:08d}"
    extended = stage_home.pretrain(second, tmp_path / "extended", start_from=extension.start_from)
    straight = stage_home.pretrain(second, tmp_path / "straight")
    assert (extended["resumed_from_step"], extended["extended_from_step"]) == (begins, begins)
    assert extended["steps"] == straight["steps"] > result["steps"]
    assert sha256_file(tmp_path / "extended" / WEIGHTS) == sha256_file(tmp_path / "straight" / WEIGHTS)
