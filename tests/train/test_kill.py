"""A stage that is killed and stopped comes to the same bytes as one that is left alone; an extended one too."""

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.comparing import curve, logged_steps
from support.tiny_stages import Home, Watcher, build_stage, stage_settings

from ttrain.core.hashing import sha256_file
from ttrain.engine.graph import Rerun
from ttrain.engine.planner import plan_stage
from ttrain.engine.resume import begun_at
from ttrain.engine.stage_worker import PROCESS_NAME
from ttrain.errors import Interrupted, StageFailed
from ttrain.store.layout import Artifact
from ttrain.tasks import PRETRAIN
from ttrain.train import checkpoint_format
from ttrain.train.trainer import QUICK

STEPS = 40
WEIGHTS = Path("model") / "model.safetensors"


def kill_worker() -> None:
    children = psutil.Process(os.getpid()).children(recursive=True)
    next(child for child in children if child.name() == PROCESS_NAME).kill()


def test_a_stage_that_was_killed_and_stopped_gives_the_bytes_of_one_that_never_was(
    stage_home: Home, tmp_path: Path
) -> None:
    """Whose launching process is killed: soak/test_pipeline_kills."""
    steps = {"tokens": STEPS * 1024, "tokens_per_step": 1024}
    settings = stage_settings(STEPS, steps, rows_per_device=8, checkpoint_every_steps=4)
    inputs, begins, logs = stage_home.pretrain_inputs(), [0], list[list[str]]()
    work = stage_home.store.work(
        "pretrain", str(plan_stage(PRETRAIN, settings, stage_home.store, inputs).key)
    )

    def build(watcher: Watcher) -> Artifact:
        logs.append(watcher.lines)
        return build_stage(PRETRAIN, settings, stage_home.store, inputs, watcher).artifact

    def saved() -> int:
        """The newest step; every checkpoint verifies."""
        found = checkpoint_format.list_checkpoints(work / "output" / "checkpoints")
        return max((checkpoint_format.read(path).step for path in found), default=0)

    def kill(line: str) -> None:
        published = [*(work / "output" / "checkpoints").glob("step-*")]  # one may be in the writing
        if (
            "checkpoint of step" in line and published
        ):  # the line is written before the checkpoint is
            watcher.act = lambda line: None
            kill_worker()

    watcher = Watcher(kill)
    with pytest.raises(StageFailed, match=r"SIGKILL.*log\.txt"):
        build(watcher)
    begins.append(saved())
    stopper = Watcher()
    stopper.act = lambda line: stopper.stop() if f"step {begins[-1] + 3}/" in line else None
    with pytest.raises(Interrupted) as stopped:
        build(stopper)
    begins.append(saved())
    assert (
        f"step {begins[-1]} of {STEPS}" in str(stopped.value)
        and stopped.value.exit_code == 128 + signal.SIGTERM
    )

    artifact, alone = build(Watcher()), tmp_path / "alone"
    stage_home.pretrain(settings, alone)
    assert begins == sorted({*begins}), "every try got further"
    assert artifact.result["resumed_from_step"] == begins[-1] < STEPS
    for begin, lines in zip(begins, logs, strict=True):
        assert any(f"training from step {begin} to {STEPS}" in line for line in lines)
    for file in (WEIGHTS, Path("checkpoints") / f"step-{STEPS:08d}" / "optimizer.safetensors"):
        assert sha256_file(artifact.path / file) == sha256_file(alone / file)
    assert artifact.manifest["files"][str(WEIGHTS)]["sha256"] == sha256_file(alone / WEIGHTS)
    ours = curve(artifact.path / "run" / "metrics.jsonl")
    assert logged_steps(ours, "loss") == [*range(1, STEPS + 1)] and logged_steps(
        ours, "validation_loss"
    ) == [STEPS]
    quick = logged_steps(ours, QUICK)
    assert quick == sorted({*quick}) and quick[0] == 0, "one each, and one before the first step"
    assert ours == curve(alone / "run" / "metrics.jsonl")
    kept, expected = (
        sorted(path.name for path in (place / "checkpoints").iterdir())
        for place in (artifact.path, alone)
    )
    assert kept == expected and not work.exists(), "nothing of the tries is left behind"


@pytest.mark.parametrize(
    ("short", "long", "begins"),
    [
        (
            {"tokens": 8 * 256, "schedule": {"warmup_steps": 2}},
            {"tokens": 10 * 256, "schedule": {"warmup_steps": 2}},
            4,
        ),
        # the run ends within a step, which a longer run fills up: the checkpoint after it is of another run
        (
            {"epochs": 0.2, "tokens": None, "schedule": {"kind": "constant"}},
            {"epochs": 0.3, "tokens": None, "schedule": {"kind": "constant"}},
            None,
        ),
        (
            {"tokens": 1000, "packing": "none", "schedule": {"warmup_steps": 2}},
            {"tokens": 2000, "packing": "none", "schedule": {"warmup_steps": 2}},
            3,
        ),
    ],
    ids=["before the decay", "a last step cut short", "rows that are not packed"],
)
def test_an_extended_stage_gives_the_bytes_of_one_from_the_start(
    stage_home: Home,
    tmp_path: Path,
    short: dict[str, Any],
    long: dict[str, Any],
    begins: int | None,
) -> None:
    inputs = stage_home.pretrain_inputs()
    first, second = (
        stage_settings(pretrain=budget, keep_checkpoints=9) for budget in (short, long)
    )
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
    work = begun_at(
        stage_home.store, extension, extension.start_from.parents[1], extension.first_step
    )
    extended = stage_home.pretrain(second, work / "output")
    straight = stage_home.pretrain(second, tmp_path / "straight")
    assert extended["resumed_from_step"] == begins
    assert extended["steps"] == straight["steps"] > result["steps"]
    assert sha256_file(work / "output" / WEIGHTS) == sha256_file(tmp_path / "straight" / WEIGHTS)
