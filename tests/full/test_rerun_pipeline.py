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


@pytest.mark.long
@pytest.mark.soak
def test_work_that_older_code_began_goes_on_under_the_new(
    copy_of: Callable[..., Any], tmp_path: Path
) -> None:
    cli = copy_of()
    process = cli.start("stage", "run", "pretrain", LONGER)
    wait_until(cli.checkpoints, 240)
    kill_at_work(process)
    [work] = [path.parent for path in cli.home.glob("work/pretrain/*/ingredients.json")]
    code = tmp_path / "code"
    for package in ("ttrain", "flows", "tasks", "configs"):
        shutil.copytree(
            ROOT / package, code / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    with (code / "ttrain" / "train" / "schedules.py").open("a") as file:
        file.write("\nA_CONSTANT_THAT_NOTHING_READS = 1\n")
    cli.environment["PYTHONPATH"] = str(code)

    why = cli.plan(LONGER)["pretrain"]["why"]
    assert (
        f"unfinished work {work.name[:12]} at step" in why[0]
        and f"--continue {work.name[:12]} resumes it" in why[0]
    )
    part = (
        "pipeline",
        "run",
        "full",
        "--only",
        "pretrain",
        "--continue",
        work.name[:12],
        "--engine",
        "none",
    )
    said = cli(*part, LONGER)
    manifest = cli.manifest("pretrain", LONGER)
    [continued] = manifest["continued"]
    assert continued["key"] == work.name and continued["differences"] == [
        "module ttrain.train.schedules changed"
    ]
    assert (
        0 < continued["step"] <= manifest["result"]["resumed_from_step"]
        and manifest["result"]["steps"] == 120
    )
    assert f"continues the unfinished work {work.name[:12]}" in said and not work.exists()
    assert {stage["name"] for stage in cli.runs()[0]["stages"]} == {
        "tokenizer",
        "shards-pretrain",
        "pretrain",
    }

    never_killed = copy_of("never-killed")
    never_killed("stage", "run", "pretrain", LONGER)
    weights = "model/model.safetensors"
    assert (
        manifest["files"][weights]["sha256"]
        == never_killed.manifest("pretrain", LONGER)["files"][weights]["sha256"]
    )
    assert "everything is cached" in cli(*part, LONGER)
