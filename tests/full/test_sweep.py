"""`ttrain sweep` as a user runs it, killed: its verdict, its record and MLflow's points."""

import json
from collections import Counter

import pytest
from support.pipeline_home import Cli
from support.served import kill_at_work
from support.waiting import wait_until

from ttrain.store import runs

MUON = ("pretrain.optim.kind=muon", "pretrain.tokens=5120")  # 10 steps
# 2e-2 is the baseline
COMMAND = ("sweep", "pretrain.optim.muon_lr=1e-6,2e-2", *MUON, "--seeds", "3")
DOUBLED = """
SELECT count(*) FROM (
    SELECT 1 FROM metrics GROUP BY run_uuid, key, step HAVING count(*) > 1
)
"""


def completed_trials(cli: Cli) -> int:
    files = list(cli.home.glob("sweeps/*/sweep.json"))
    trials = json.loads(files[0].read_bytes())["trials"] if files else []
    return sum(trial["outcome"] == "completed" for trial in trials)


@pytest.mark.soak
def test_a_killed_sweep_has_its_verdict_and_builds_nothing_twice(fresh: Cli) -> None:
    process = fresh.start(*COMMAND)
    wait_until(lambda: completed_trials(fresh) >= 2, 480)
    kill_at_work(process)
    fresh(*COMMAND)
    rows = json.loads(fresh.in_process("sweep", "show", "--json", settings=False))["settings"]
    assert rows[1]["verdict"] == "worse"
    trials = [record for record in runs.history(fresh.home) if "sweep" in record]
    stages = [stage for record in trials for stage in record["stages"]]
    built = Counter(stage["key"] for stage in stages if stage["outcome"] == "completed")
    assert built.total() == len(built) == 14
    assert fresh.rows("mlflow", DOUBLED) == [(0,)]
