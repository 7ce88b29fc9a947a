"""What serves the schedules of a home: which slots it runs, which process it is, what does not end it."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import threading
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock

from ttrain.errors import Interrupted, UsageError
from ttrain.flows import flow_runs, schedule_files, schedule_status, schedules, servers, serving
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


def test_who_asks_who_serves_does_not_keep_anyone_from_serving(tmp_path: Path) -> None:
    folder = schedule_files.folder_of(tmp_path)
    folder.mkdir(parents=True)
    asking = FileLock(folder / "serve.lock", thread_local=False)
    asking.acquire()  # as `served_by` has it, for much longer
    threading.Timer(0.1, asking.release).start()
    with serving.serve_lock(tmp_path):
        assert json.loads((folder / "serving.txt").read_text()) == {"pid": os.getpid()}
    assert schedule_files.served_by(tmp_path) is None


def test_a_second_one_that_serves_is_told_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "LOCK_SECONDS", 0.1)
    ours, theirs = multiprocessing.Pipe()

    def hold() -> None:
        with serving.serve_lock(tmp_path):
            theirs.send(os.getpid())
            theirs.recv()

    first = multiprocessing.get_context("fork").Process(target=hold)
    first.start()
    pid = ours.recv()
    assert schedule_files.served_by(tmp_path) == pid == first.pid
    with pytest.raises(UsageError, match=f"is served already, by process {pid}"), serving.serve_lock(tmp_path):
        pass
    ours.send("end")
    first.join()
    assert schedule_files.served_by(tmp_path) is None


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


@pytest.mark.parametrize(
    ("zone", "cron", "slot", "now", "postponed"),
    [
        ("America/Santiago", "30 0 * * *", "2026-09-06T03:30", "2026-09-06T03:31", "2026-09-06T04:30"),
        ("America/Santiago", "30 0 * * *", "2026-09-06T03:30", "2026-09-06T09:00", None),  # nothing served before
        ("America/Santiago", "30 0 * * *", "2026-09-06T04:30", "2026-09-06T04:31", None),  # it was postponed before
        ("America/Santiago", "30 23 * * *", "2026-09-06T03:30", "2026-09-06T03:31", None),  # its own time
        ("Europe/Berlin", "30 2 * * *", "2026-03-29T00:30", "2026-03-29T00:31", None),  # its own date
    ],
)
def test_a_slot_that_is_due_on_the_date_before_its_own_waits_for_its_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zone: str, cron: str, slot: str, now: str, postponed: str | None
) -> None:
    moment = datetime.fromisoformat(f"{now}Z")
    monkeypatch.setattr(serving, "datetime", SimpleNamespace(now=lambda zone: moment))
    due = SimpleNamespace(
        id="a", auto_scheduled=True, run_count=0, next_scheduled_start_time=datetime.fromisoformat(f"{slot}Z")
    )
    deployment = SimpleNamespace(schedules=[SimpleNamespace(schedule=SimpleNamespace(cron=cron, timezone=zone))])
    times: list[datetime] = []

    class Server(FakeServer):
        async def set_flow_run_state(self, number: str, state: Any, force: bool = False) -> None:
            times.append(state.state_details.scheduled_time)

    assert asyncio.run(serving_with(tmp_path, Server(), [])._is_postponed(due, deployment)) is (postponed is not None)
    assert times == ([datetime.fromisoformat(f"{postponed}Z")] if postponed else [])


class FakeServer:
    """The flow runs that a Prefect server has, and what is asked of it."""

    def __init__(self, *runs: Any) -> None:
        self.runs, self.renamed, self.states = list(runs), dict[str, str](), list[tuple[str, str, str]]()

    async def read_flow_runs(self, **filters: Any) -> list[Any]:
        return self.runs

    async def read_flow_run(self, number: str) -> Any:
        return next(run for run in self.runs if run.id == number)

    async def set_flow_run_name(self, number: str, name: str) -> None:
        self.renamed[number] = name

    async def set_flow_run_state(self, number: str, state: Any, force: bool = False) -> None:
        self.states.append((number, state.name, state.message))


def serving_with(home: Path, server: FakeServer, said: list[str]) -> serving.ScheduleServer:
    serving_ = serving.ScheduleServer(home, "http://127.0.0.1:4200/api", said.append, owns_server=False)
    serving_._context = SimpleNamespace(client=server)  # type: ignore[assignment]
    return serving_


def ended(name: str, state: Any, **labels: Any) -> Any:
    return SimpleNamespace(id=name, name=name, state=state, labels=labels)


def test_slots_to_come_are_named_by_their_time_and_runs_of_people_keep_their_names(tmp_path: Path) -> None:
    when = datetime(2027, 1, 1, 2, tzinfo=UTC)

    def scheduled(number: str, name: str, *, by_cron: bool = True, tries: int = 0) -> Any:
        return SimpleNamespace(id=number, name=name, auto_scheduled=by_cron, run_count=tries, next_scheduled_start_time=when)

    own = serving.slot_name(when)
    server = FakeServer(
        scheduled("a", "upbeat-giraffe"), scheduled("b", own), scheduled("c", "mine", by_cron=False),
        scheduled("d", "night-000003", tries=1),
    )  # fmt: skip
    asyncio.run(serving_with(tmp_path, server, [])._name_slots([uuid.uuid4()]))
    assert server.renamed == {"a": f"slot {when.astimezone():%Y-%m-%d %H:%M}"}


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_run_that_was_asked_to_stop_before_it_began_is_cancelled_not_crashed(tmp_path: Path, is_asked: bool) -> None:
    from prefect.states import Pending

    run, proposed = ended("slot", Pending()), list[str]()
    server = FakeServer(run)
    serving_ = serving_with(tmp_path, server, [])
    serving_._stopping_ids = {"slot"} if is_asked else set()

    async def propose(run: Any, message: str) -> None:
        proposed.append(message)

    asyncio.run(serving_._propose_crashed(propose, run, "exited with -15"))
    cancelled = [("slot", "Cancelled", "stopped before it began; the next slot runs")]
    assert (server.states, proposed) == ((cancelled, []) if is_asked else ([], ["exited with -15"]))


def test_an_end_is_told_once_with_the_name_of_the_night(tmp_path: Path) -> None:
    from prefect.states import Completed, Crashed, Failed

    server, said = FakeServer(), list[str]()
    for name, state, is_shown in (
        ("night-000001", Completed(name="Promoted", message="better"), False),
        ("night-000002", Failed(message="a bad file"), True),
        ("night-000003", Failed(message="its parameters do not fit"), False),
        ("night-000004", Crashed(message="killed"), True),
    ):
        server.runs = [ended(name, state, **({flow_runs.LABEL_SHOWN: True} if is_shown else {}))]
        asyncio.run(serving_with(tmp_path, server, said)._say_how_it_ended(SimpleNamespace(id=name, name="slot")))
    assert said == [
        "night-000001: Promoted, better", "night-000002: Failed", "night-000003: Failed, its parameters do not fit",
        "night-000004: Crashed, killed",
    ]  # fmt: skip


def test_a_stop_is_told_like_every_line_and_not_again_as_an_error() -> None:
    said: list[str] = []
    with pytest.raises(Interrupted) as stopped, serving._told_by(said.append):
        raise Interrupted(serving.STOPPED)
    with serving._told_by(said.append):
        pass
    assert said == [serving.STOPPED] * 2 and stopped.value.shown


def test_a_table_of_schedules_has_the_times_of_one_zone() -> None:
    slot = datetime(2027, 1, 1, 1, tzinfo=UTC)

    def status(zone: str) -> schedule_status.ScheduleStatus:
        last = schedule_status.EndedRun("night-000007", "Kept", slot, "worse")
        return schedule_status.ScheduleStatus(Schedule("nightly", "mine", "0 2 * * *", zone, {}), True, False, slot, last)

    berlin = status("Europe/Berlin")
    assert schedule_status.common_timezone([berlin, berlin]) == "Europe/Berlin"
    assert schedule_status.common_timezone([berlin, status("Asia/Tokyo")]) == schedule_files.local_timezone()
    assert berlin.to_row("Europe/Berlin") == (
        "nightly/mine", "0 2 * * *", "Fri 2027-01-01 02:00", "night-000007, 2027-01-01 02:00: Kept, worse"
    )  # fmt: skip
    assert berlin.to_row("UTC")[1:3] == ("0 2 * * * (Europe/Berlin)", "Fri 2027-01-01 01:00")
    assert berlin.to_json()["last"] == {
        "name": "night-000007", "outcome": "Kept", "slot": "2027-01-01T01:00:00+00:00", "message": "worse"
    }  # fmt: skip


def test_servers_make_flow_runs_of_two_slots_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.settings.models.server.services import ServerServicesSchedulerSettings

    _, environment = servers.prefect_command(tmp_path, 4200)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = ServerServicesSchedulerSettings()
    assert (settings.min_runs, settings.max_runs, settings.min_scheduled_time) == (2, 2, timedelta(0))


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
