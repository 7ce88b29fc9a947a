"""A stage that is killed, stopped or extended comes to the bytes of one that is left alone."""

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
OPTIMIZER = Path("checkpoints") / f"step-{STEPS:08d}" / "optimizer.safetensors"


def test_a_stage_that_was_killed_and_stopped_gives_the_bytes_of_one_that_never_was(
    stage_home: Home, tmp_path: Path
) -> None:
    """Whose launching process is killed: soak/test_pipeline_kills."""
    steps = {"tokens": STEPS * 1024, "tokens_per_step": 1024}
    settings = stage_settings(STEPS, steps, rows_per_device=8, checkpoint_every_steps=4)
    store, inputs = stage_home.store, stage_home.pretrain_inputs()
    begins, logs = [0], list[list[str]]()
    work = store.work("pretrain", str(plan_stage(PRETRAIN, settings, store, inputs).key))
    checkpoints = work / "output" / "checkpoints"

    def build(watcher: Watcher) -> Artifact:
        logs.append(watcher.lines)
        return build_stage(PRETRAIN, settings, store, inputs, watcher).artifact

    def newest() -> int:
        """The newest step; every checkpoint verifies."""
        paths = checkpoint_format.list_checkpoints(checkpoints)
        return max((checkpoint_format.read(path).step for path in paths), default=0)

    def kill(line: str) -> None:
        # The line is logged before its checkpoint is written, so an older one must be there.
        if "checkpoint of step" in line and [*checkpoints.glob("step-*")]:
            killed.act = lambda line: None
            children = psutil.Process(os.getpid()).children(recursive=True)
            next(child for child in children if child.name() == PROCESS_NAME).kill()

    killed, stopped = Watcher(kill), Watcher()
    with pytest.raises(StageFailed, match=r"SIGKILL.*log\.txt"):
        build(killed)
    begins.append(newest())
    stopped.act = lambda line: stopped.stop() if f"step {begins[-1] + 3}/" in line else None
    with pytest.raises(Interrupted) as interruption:
        build(stopped)
    begins.append(newest())
    assert f"step {begins[-1]} of {STEPS}" in str(interruption.value)
    assert interruption.value.exit_code == 128 + signal.SIGTERM

    artifact, alone = build(Watcher()), tmp_path / "alone"
    stage_home.pretrain(settings, alone)
    assert begins == sorted({*begins}), "every attempt got further"
    assert artifact.result["resumed_from_step"] == begins[-1] < STEPS
    for begin, lines in zip(begins, logs, strict=True):
        assert any(f"training from step {begin} to {STEPS}" in line for line in lines)
    for file in (WEIGHTS, OPTIMIZER):
        assert sha256_file(artifact.path / file) == sha256_file(alone / file)
    assert artifact.manifest["files"][str(WEIGHTS)]["sha256"] == sha256_file(alone / WEIGHTS)
    lines, expected = (curve(path / "run" / "metrics.jsonl") for path in (artifact.path, alone))
    assert lines == expected
    assert logged_steps(lines, "loss") == [*range(1, STEPS + 1)]
    assert logged_steps(lines, "validation_loss") == [STEPS]
    quick = logged_steps(lines, QUICK)
    assert quick == sorted({*quick}) and quick[0] == 0, "one each, and one before the first step"
    names = [{p.name for p in (path / "checkpoints").iterdir()} for path in (artifact.path, alone)]
    assert names[0] == names[1] and not work.exists(), "nothing of the attempts is left"


WARM = {"schedule": {"warmup_steps": 2}}
EPOCHS = {"tokens": None, "schedule": {"kind": "constant"}}


@pytest.mark.parametrize(
    ("common", "short", "long", "begins"),
    [
        (WARM, {"tokens": 8 * 256}, {"tokens": 10 * 256}, 4),  # before the decay
        # The run ends within a step, which a longer run fills up: it begins one checkpoint before.
        (EPOCHS, {"epochs": 0.2}, {"epochs": 0.3}, None),
        ({**WARM, "packing": "none"}, {"tokens": 1000}, {"tokens": 2000}, 3),
    ],
    ids=["before the decay", "a last step cut short", "rows that are not packed"],
)
def test_an_extended_stage_gives_the_bytes_of_one_from_the_start(
    stage_home: Home,
    tmp_path: Path,
    common: dict[str, Any],
    short: dict[str, Any],
    long: dict[str, Any],
    begins: int | None,
) -> None:
    store, inputs = stage_home.store, stage_home.pretrain_inputs()
    first, second = (
        stage_settings(pretrain=common | budget, keep_checkpoints=9) for budget in (short, long)
    )
    planned = plan_stage(PRETRAIN, first, store, inputs)
    assert planned.key is not None
    result = stage_home.pretrain(first, tmp_path / "short")
    if begins is None:
        assert result["steps"] * 256 > result["tokens"], "the last step is a part of one"
        begins = 4 * ((result["steps"] - 1) // 4)
    manifest = {"result": result, "ingredients": planned.ingredients, "inputs": {}}
    store.publish("pretrain", planned.key, tmp_path / "short", manifest)
    extension = plan_stage(PRETRAIN, second, store, inputs, Rerun(extend=True))
    assert extension.start_from is not None
    assert extension.start_from.name == f"step-{begins:08d}"
    start = extension.start_from.parents[1]
    output = begun_at(store, extension, start, extension.first_step) / "output"
    extended = stage_home.pretrain(second, output)
    straight = stage_home.pretrain(second, tmp_path / "straight")
    assert extended["resumed_from_step"] == begins
    assert extended["steps"] == straight["steps"] > result["steps"]
    assert sha256_file(output / WEIGHTS) == sha256_file(tmp_path / "straight" / WEIGHTS)
