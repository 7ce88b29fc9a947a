"""Schedules on a real Prefect server: a cron fires, slots run once, a stop leaves no process."""

import contextlib
import json
import signal
import sqlite3
import time
from collections import Counter
from datetime import datetime
from typing import Any

import pytest
from support.pipeline_home import Cli
from support.served import (
    FINAL_STATES,
    call,
    every_five_seconds,
    flow_runs,
    processes_of,
    serving,
    slot,
)
from support.waiting import wait_until

from ttrain.store import server_records

MISSING = "data.pretrain=missing.jsonl"  # a run that fails as soon as it has begun
YEARLY = ("pipeline", "schedule", "full", "--cron", "0 2 1 1 *", MISSING)
SCHEDULE = """
SELECT paused, active FROM deployment
JOIN deployment_schedule ON deployment.id = deployment_id
"""


def listed(cli: Cli) -> dict[str, Any]:
    [schedule] = json.loads(cli("pipeline", "schedule", "list", "--json", settings=False))
    return dict(schedule)


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


@pytest.mark.soak
def test_the_server_of_one_that_served_and_was_killed_ends_with_the_next_one(fresh: Cli) -> None:
    with serving(fresh) as served:
        served.process.kill()
        served.process.wait()
    assert server_records.live_server(fresh.home, "prefect")
    with serving(fresh) as served:
        assert served.stop() == 0, served.said  # at once: whatever it still imports or asks
    wait_until(lambda: not processes_of(fresh.home), 10)


@pytest.mark.long
@pytest.mark.soak
def test_late_slots_run_once_and_a_schedule_is_listed_paused_changed_resumed_and_removed(
    fresh: Cli,
) -> None:
    def scheduled(*states: str) -> list[float]:
        return [slot(run) for run in flow_runs(fresh.home, *states)]

    with serving(fresh):
        fresh(*YEARLY)
        every_five_seconds(fresh)
        # Prefect's scheduler makes the slots to come some seconds later
        wait_until(lambda: any(at < time.time() + 10 for at in scheduled("Scheduled")), 60)
    stopped = time.time()
    time.sleep(11)  # slots pass: two, or three

    with serving(fresh) as served:
        began = time.time()
        wait_until(lambda: any(at > began for at in scheduled("Failed")), 90, lambda: served.said)
        late = Counter(at for at in scheduled(*FINAL_STATES) if stopped < at < began)
        assert max(late.values(), default=1) == 1, "late slots run, each once"
        schedule = wait_until(lambda: listed(fresh)["last"] and listed(fresh), 30)
        assert (schedule["schedule"], schedule["paused"]) == ("full/tiny-test", False)
        assert schedule["served_by"] == served.process.pid
        assert schedule["last"]["outcome"] == "Failed"
        assert datetime.fromisoformat(schedule["next"]).timestamp() > began
        fresh("pipeline", "schedule", "pause", settings=False)
        wait_until(lambda: not scheduled("Scheduled"), 30)
        fresh("pipeline", "schedule", "full", "--cron", "0 3 1 1 *", "--timezone", "UTC", MISSING)
        schedule = listed(fresh)
        assert schedule["paused"], "what changes it leaves it paused"
        assert schedule["next"].endswith("-01-01T03:00:00+00:00")
        fresh("pipeline", "schedule", "pause", "full", "--resume", settings=False)
        wait_until(lambda: scheduled("Scheduled"), 30)
        fresh("pipeline", "schedule", "remove", settings=False)
        wait_until(lambda: not call(fresh.home, "deployments/filter", {}), 30)
        assert not scheduled("Scheduled")
        assert "nothing" in fresh("pipeline", "schedule", "list", settings=False)
        assert served.stop(signal.SIGINT) == 130
