"""`ttrain sweep` as a user runs it, killed: its verdict, its record and MLflow's points."""

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.pipeline_home import Cli
from support.served import kill_at_work
from support.waiting import wait_until

from ttrain.store import runs

KILLS = int(os.environ.get("TTRAIN_SOAK_KILLS", "10")) // 10 or 1
MUON = ("pretrain.optim.kind=muon", "pretrain.tokens=5120")  # 10 steps
# 2e-2 is the baseline
COMMAND = ("sweep", "pretrain.optim.muon_lr=1e-6,2e-2", *MUON, "--seeds", "3")
DOUBLED = """
SELECT count(*) FROM (
    SELECT 1 FROM metrics GROUP BY run_uuid, key, step HAVING count(*) > 1
)
"""


def shown(cli: Cli) -> Any:
    return json.loads(cli.in_process("sweep", "show", "--json", settings=False))


def trials_of(cli: Cli) -> list[dict[str, Any]]:
    return [record for record in runs.history(cli.home) if "sweep" in record]


def built(cli: Cli) -> Counter[tuple[str, str]]:
    stages = [stage for record in trials_of(cli) for stage in record["stages"]]
    stages = [stage for stage in stages if stage["outcome"] == "completed"]
    return Counter((stage["name"], stage["key"]) for stage in stages)


def results(cli: Cli) -> list[Any]:
    keys = ("setting", "values", "verdict", "over_seeds")
    return [[row[key] for key in keys] for row in shown(cli)["settings"]]


def completed_trials(cli: Cli) -> int:
    files = list(cli.home.glob("sweeps/*/sweep.json"))
    trials = json.loads(files[0].read_bytes())["trials"] if files else []
    return sum(trial["outcome"] == "completed" for trial in trials)


@pytest.mark.soak
def test_a_killed_sweep_has_its_verdict_and_builds_nothing_twice(
    fresh: Cli, tmp_path: Path
) -> None:
    swept = Cli(tmp_path / "swept", fresh.data)
    swept(*COMMAND)
    chance = random.Random(1)
    for _ in range(KILLS):
        process = fresh.start(*COMMAND)
        enough = completed_trials(fresh) + chance.randrange(3)

        def is_time(process: Any = process, enough: int = enough) -> bool:
            has_ended = process.poll() is not None
            return has_ended or (completed_trials(fresh) >= enough and chance.random() < 0.1)

        wait_until(is_time, 480)
        if process.poll() is None:
            kill_at_work(process)
    fresh(*COMMAND)
    assert results(fresh) == results(swept)
    assert results(fresh)[1][2] == "worse"
    assert built(swept).total() == 14
    assert set(built(fresh).values()) == {1}
    assert fresh.rows("mlflow", DOUBLED) == [(0,)]
