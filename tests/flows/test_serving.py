"""What serves the schedules of a home: which slots it runs, which process it is, what does not end it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock

from ttrain.errors import UsageError
from ttrain.flows import schedule_files, schedules, serving
from ttrain.flows.schedule_files import Schedule


def run(deployment: str, slot: int, state: str = "Late", *, by_cron: bool = True, tries: int = 0) -> Any:
    """A flow run as the server lists what is due."""
    when = datetime(2027, 1, 1, tzinfo=UTC) + timedelta(days=slot)
    return SimpleNamespace(
        deployment_id=deployment, next_scheduled_start_time=when, state_name=state, auto_scheduled=by_cron, run_count=tries
    )


def test_of_slots_that_passed_unserved_the_newest_stands_for_all() -> None:
    late = [run("a", slot) for slot in range(10)]
    other, by_hand, again = run("b", 3, "Scheduled"), run("a", 2, by_cron=False), run("a", 1, "AwaitingRetry", tries=1)
    found = serving.missed_slots([*late, other, by_hand, again])
    assert [older for older, _ in found] == late[:9] and {id(newer) for _, newer in found} == {id(late[9])}
    assert serving.missed_slots([late[0], other]) == []


HOLD = """
import os, sys, time
from pathlib import Path
from ttrain.flows import serving
with serving.serve_lock(Path(sys.argv[1])):
    print(os.getpid(), flush=True)
    sys.stdin.readline()
"""


def test_who_asks_who_serves_does_not_keep_anyone_from_serving(tmp_path: Path) -> None:
    folder = schedule_files.folder_of(tmp_path)
    folder.mkdir(parents=True)
    asking = FileLock(folder / "serve.lock", thread_local=False)
    asking.acquire()  # as `served_by` has it, for much longer
    threading.Timer(0.5, asking.release).start()
    with serving.serve_lock(tmp_path):
        assert json.loads((folder / "serving.txt").read_text()) == {"pid": os.getpid()}
    assert serving.served_by(tmp_path) is None


def test_a_second_one_that_serves_is_told_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "LOCK_SECONDS", 0.1)
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdin is not None and first.stdout is not None
    pid = int(first.stdout.readline())
    assert serving.served_by(tmp_path) == pid
    with pytest.raises(UsageError, match=f"is served already, by process {pid}"), serving.serve_lock(tmp_path):
        pass
    first.communicate("\n")
    assert serving.served_by(tmp_path) is None


def test_a_schedule_that_the_server_refuses_is_said_once_and_the_others_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bad", "good"):
        schedule_files.write(tmp_path, Schedule("nightly", name, "0 2 * * *", "UTC", {}))
    made: list[str] = []
    said: list[str] = []

    def make(where: Path, full_name: str) -> None:
        if full_name == "nightly/bad":
            raise schedules.RefusedError(f"the Prefect server refuses {full_name}")
        made.append(full_name)

    monkeypatch.setattr(schedules, "make_missing", make)
    serving_ = serving.ScheduleServer(tmp_path, "http://127.0.0.1:4200/api", said.append, owns_server=False)
    for _ in range(2):
        asyncio.run(serving_.make_missing_deployments(set()))
    assert made == ["nightly/good"] * 2
    assert said == ["scheduled: nightly/bad, nightly/good", "the Prefect server refuses nightly/bad"]


def test_no_trouble_while_looking_ends_what_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    serving_ = serving.ScheduleServer(tmp_path, "http://127.0.0.1:4200/api", lambda line: None, owns_server=False)

    async def look() -> None:
        raise LookupError("a flow run that somebody deleted")

    monkeypatch.setattr(serving_, "start_due_runs", look)
    for _ in range(2):
        asyncio.run(serving_.try_start_due_runs())
    assert [record.getMessage() for record in caplog.records] == [
        "the look for due runs failed: a flow run that somebody deleted; trying again"
    ]
