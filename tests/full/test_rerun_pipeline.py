"""What was killed is run again under other code. A failed stage: test_pipeline.py."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.served import kill_at_work
from support.waiting import wait_until

LONGER = "pretrain.tokens=61440"  # 120 steps
WEIGHTS = "model/model.safetensors"


@pytest.mark.long
@pytest.mark.soak
def test_work_of_older_code_goes_on_under_new(copy_of: Callable[..., Any], tmp_path: Path) -> None:
    cli = copy_of()
    process = cli.start("stage", "run", "pretrain", LONGER)
    wait_until(cli.checkpoints, 240)
    kill_at_work(process)
    [work] = [path.parent for path in cli.home.glob("work/pretrain/*/ingredients.json")]
    code = tmp_path / "code"
    for package in ("ttrain", "flows", "tasks", "configs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, code / package, ignore=ignored)
    with (code / "ttrain" / "train" / "schedules.py").open("a") as file:
        file.write("\nA_CONSTANT_THAT_NOTHING_READS = 1\n")
    cli.environment["PYTHONPATH"] = str(code)

    key = work.name[:12]
    why = cli.plan(LONGER)["pretrain"]["why"]
    assert f"unfinished work {key} at step" in why[0] and f"--continue {key} resumes it" in why[0]
    part = ("pipeline", "run", "full", "--only", "pretrain", "--continue", key, "--engine", "none")
    said = cli(*part, LONGER)
    manifest = cli.manifest("pretrain", LONGER)
    result = manifest["result"]
    [continued] = manifest["continued"]
    assert continued["key"] == work.name
    assert continued["differences"] == ["module ttrain.train.schedules changed"]
    assert 0 < continued["step"] <= result["resumed_from_step"] and result["steps"] == 120
    assert f"continues the unfinished work {key}" in said and not work.exists()
    assert cli.outcomes().keys() == {"tokenizer", "shards-pretrain", "pretrain"}

    never_killed = copy_of("never-killed")
    never_killed("stage", "run", "pretrain", LONGER)
    expected = never_killed.manifest("pretrain", LONGER)["files"][WEIGHTS]
    assert manifest["files"][WEIGHTS]["sha256"] == expected["sha256"]
    assert "everything is cached" in cli(*part, LONGER)
