"""Schedules on a real Prefect server: a cron fires, slots run once, a stop leaves no process."""

import contextlib
import sqlite3

import pytest
from support.pipeline_home import Cli
from support.served import (
    call,
    every_five_seconds,
    flow_runs,
    processes_of,
    serving,
)
from support.waiting import wait_until

MISSING = "data.pretrain=missing.jsonl"  # a run that fails as soon as it has begun
YEARLY = ("pipeline", "schedule", "full", "--cron", "0 2 1 1 *", MISSING)
SCHEDULE = """
SELECT paused, active FROM deployment
JOIN deployment_schedule ON deployment.id = deployment_id
"""


@pytest.mark.soak
def test_a_cron_really_fires_and_a_stop_leaves_the_schedule_and_no_process(fresh: Cli) -> None:
    """With other versions than the pinned ones, Prefect's scheduler may never schedule."""
    with serving(fresh) as served:
        assert "scheduled: full/tiny-test" in fresh(*YEARLY)
        served.wait_for("scheduled: full/tiny-test")
        assert "served already" in fresh("pipeline", "serve", code=2, settings=False)
        [deployment] = call(fresh.home, "deployments/filter", {})
        assert len(deployment["schedules"]) == 1, "what serves makes no second one"
        every_five_seconds(fresh)
        [first, *_] = wait_until(lambda: flow_runs(fresh.home, "Failed"), 90, lambda: served.said)
        assert "missing.jsonl" in first["state"]["message"] and first["auto_scheduled"]
        assert served.stop() == 0
    # Neither a run nor the server outlives what serves
    wait_until(lambda: not processes_of(fresh.home), 10)
    database = f"file:{fresh.home / 'prefect' / 'prefect.db'}?mode=ro"
    with contextlib.closing(sqlite3.connect(database, uri=True)) as db:
        assert db.execute(SCHEDULE).fetchone() == (0, 1)
