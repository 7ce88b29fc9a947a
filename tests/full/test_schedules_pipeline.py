"""Schedules on a real Prefect server, served by the real command: a cron fires, slots run once, a stop leaves no process."""

import contextlib
import json
import signal
import sqlite3
import time
from collections import Counter
from datetime import datetime

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


@pytest.mark.soak
def test_a_cron_really_fires_and_a_stop_leaves_the_schedule_and_no_process(fresh: Cli) -> None:
    """On the versions that are pinned: with other ones of what Prefect stands on, its scheduler never schedules."""
    with serving(fresh) as served:
        assert "scheduled: full/tiny-test" in fresh(
            "pipeline", "schedule", "full", "--cron", "0 2 1 1 *", MISSING
        )
        served.wait_for("scheduled: full/tiny-test")
        assert "is served already, by process" in fresh("pipeline", "serve", code=2, settings=False)
        [deployment] = call(fresh.home, "deployments/filter", {})
        assert len(deployment["schedules"]) == 1, (
            "what serves, and sees it in the home, makes no second one"
        )
        every_five_seconds(fresh)
        [first, *_] = wait_until(lambda: flow_runs(fresh.home, "Failed"), 90, lambda: served.said)
        assert "missing.jsonl" in first["state"]["message"] and first["auto_scheduled"]
        assert served.stop() == 0
    wait_until(
        lambda: not processes_of(fresh.home), 10
    )  # neither a run nor the server outlives what serves
    database = f"file:{fresh.home / 'prefect' / 'prefect.db'}?mode=ro"
    with contextlib.closing(sqlite3.connect(database, uri=True)) as db:
        paused, active = db.execute(
            "SELECT paused, active FROM deployment JOIN deployment_schedule ON deployment.id = deployment_id"
        ).fetchone()
    assert (paused, active) == (0, 1)


@pytest.mark.soak
def test_the_server_of_one_that_served_and_was_killed_ends_with_the_next_one(fresh: Cli) -> None:
    with serving(fresh) as served:
        served.wait_for("stop with Ctrl-C")
        served.process.kill()
        served.process.wait()
    assert server_records.live_server(fresh.home, "prefect")
    with serving(fresh) as served:
        served.wait_for("stop with Ctrl-C")
        assert served.stop() == 0, served.said  # at once: whatever it still imports or asks
    wait_until(lambda: not processes_of(fresh.home), 10)


@pytest.mark.long
@pytest.mark.soak
def test_late_slots_run_once_and_a_schedule_is_listed_paused_changed_resumed_and_removed(
    fresh: Cli,
) -> None:
    with serving(fresh):
        fresh("pipeline", "schedule", "full", "--cron", "0 2 1 1 *", MISSING)
        every_five_seconds(fresh)
        # Prefect's scheduler makes the slots to come some seconds later
        wait_until(
            lambda: any(slot(run) < time.time() + 10 for run in flow_runs(fresh.home, "Scheduled")),
            60,
        )
    stopped = time.time()
    time.sleep(11)  # slots pass: two, or three

    with serving(fresh) as served:
        began = time.time()
        wait_until(
            lambda: [run for run in flow_runs(fresh.home, "Failed") if slot(run) > began],
            90,
            lambda: served.said,
        )
        late = [run for run in flow_runs(fresh.home, *FINAL_STATES) if stopped < slot(run) < began]
        assert max(Counter(map(slot, late)).values(), default=1) == 1, "late slots run, each once"
        wait_until(
            lambda: json.loads(fresh("pipeline", "schedule", "list", "--json", settings=False))[0][
                "last"
            ],
            30,
        )

        [listed] = json.loads(fresh("pipeline", "schedule", "list", "--json", settings=False))
        assert (listed["schedule"], listed["paused"]) == ("full/tiny-test", False)
        assert listed["served_by"] == served.process.pid and listed["last"]["outcome"] == "Failed"
        assert datetime.fromisoformat(listed["next"]).timestamp() > began
        fresh("pipeline", "schedule", "pause", settings=False)
        wait_until(
            lambda: not flow_runs(fresh.home, "Scheduled"), 30
        )  # no slot is to come while it is paused
        fresh("pipeline", "schedule", "full", "--cron", "0 3 1 1 *", "--timezone", "UTC", MISSING)
        [listed] = json.loads(fresh("pipeline", "schedule", "list", "--json", settings=False))
        assert listed["paused"] and listed["next"].endswith("-01-01T03:00:00+00:00"), (
            "what changes it leaves it paused"
        )
        fresh("pipeline", "schedule", "pause", "full", "--resume", settings=False)
        wait_until(lambda: flow_runs(fresh.home, "Scheduled"), 30)
        fresh("pipeline", "schedule", "remove", settings=False)
        wait_until(lambda: not call(fresh.home, "deployments/filter", {}), 30)
        assert not flow_runs(fresh.home, "Scheduled")
        assert "nothing is scheduled" in fresh("pipeline", "schedule", "list", settings=False)
        assert served.stop(signal.SIGINT) == 130
