"""What serves the schedules of a home: which process it is, what it makes on a server, what does not end it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ttrain.errors import UsageError
from ttrain.flows import deploy, flow_runs, schedules, serve, servers
from ttrain.flows.schedules import Schedule

SLOT = datetime(2027, 1, 1, 2, tzinfo=UTC)


def test_a_second_one_that_serves_is_told_of_the_first(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()

    def hold() -> None:
        with serve.serve_lock(tmp_path):
            theirs.send(os.getpid())
            theirs.recv()

    first = multiprocessing.get_context("fork").Process(target=hold)
    first.start()
    pid = ours.recv()
    assert schedules.served_by(tmp_path) == pid == first.pid
    with pytest.raises(UsageError, match=f"is served already, by process {pid}"), serve.serve_lock(tmp_path):
        pass
    ours.send("end")
    first.join()
    assert schedules.served_by(tmp_path) is None


class Server:
    """The deployments and flow runs that a Prefect server has, and what is asked of it."""

    def __init__(self, *runs: Any) -> None:
        self.runs = {run.id: run for run in runs}
        self.deployments: list[Any] = []
        self.deleted: list[str] = []
        self.names: dict[str, str] = {}

    def read_deployments(self, **filters: Any) -> list[Any]:
        return self.deployments

    def delete_deployment(self, number: str) -> None:
        self.deleted.append(number)

    def get_scheduled_flow_runs_for_deployments(self, numbers: list[str], before: datetime) -> list[Any]:
        return [run for run in self.runs.values() if run.deployment_id in numbers]

    def set_flow_run_state(self, number: str, state: Any, force: bool = False) -> Any:
        from prefect.client.schemas.responses import SetStateStatus

        self.runs[number].state = state
        return SimpleNamespace(status=SetStateStatus.ACCEPT)

    def set_flow_run_name(self, number: str, name: str) -> None:
        self.names[number] = name

    def read_flow_run(self, number: str) -> Any:
        return self.runs[number]


def deployment(home: Path, name: str = "mine", kind: str = "nightly", **fields: Any) -> Any:
    own = {"id": name, "name": name, "entrypoint": f"ttrain.flows.deployments.{kind}", "paused": False}
    return SimpleNamespace(**{**own, "work_pool_name": None, "tags": ["ttrain", f"home:{home}"], **fields})


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What serves a home, with a list of what it says and one of the deployments that it makes."""
    said: list[str] = []
    applied: list[Schedule] = []
    monkeypatch.setattr(deploy, "apply", lambda home, schedule: applied.append(schedule))
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    monkeypatch.setattr(flow_runs, "mark_crashed_runs", lambda home: [])
    made: Any = serve.ScheduleServer(tmp_path, said.append)
    made.said, made.applied = said, applied
    return made


def test_deployments_are_those_of_the_files_and_a_pause_in_the_ui_is_kept_in_the_file(loop: Any, tmp_path: Path) -> None:
    mine = Schedule("nightly", "mine", "0 2 * * *", "UTC", {})
    schedules.write(tmp_path, mine)
    schedules.write(tmp_path, replace(mine, name="of-a-pool", pool="docker"))
    server = Server()
    loop._look(server)
    assert loop.applied == [mine] and loop.said == ["scheduled: nightly/mine"]
    server.deployments = [deployment(tmp_path)]
    loop._look(server)
    assert loop.applied == [mine], "once"

    server.deployments = [deployment(tmp_path, paused=True)]
    loop._look(server)
    assert schedules.read_all(tmp_path)["nightly/mine"].paused
    loop._look(server)
    schedules.pause(tmp_path, "mine", paused=False)
    loop._look(server)
    assert loop.applied == [mine, mine], "a resumed one is made again"
    server.deployments = []
    loop._look(server)
    assert loop.applied == [mine] * 3, "also where the server has lost it"

    elsewhere = deployment(Path("/"), "of-another-home")
    pooled = deployment(tmp_path, "of-a-pool", work_pool_name="docker")
    server.deployments = [deployment(tmp_path), deployment(tmp_path, "removed"), elsewhere, pooled]
    loop._look(server)
    assert server.deleted == ["removed"]


def test_a_schedule_that_cannot_be_made_is_said_once_and_the_others_are_made(
    loop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bad", "good", "taken"):
        schedules.write(tmp_path, Schedule("nightly", name, None, "UTC", {}))

    def apply(home: Path, schedule: Schedule) -> None:
        if schedule.name == "bad":
            raise UsageError("its settings are of another version")

    monkeypatch.setattr(deploy, "apply", apply)
    server = Server()
    server.deployments = [deployment(Path("/"), "taken")]
    for _ in range(2):
        loop._look(server)
        server.deployments = [deployment(Path("/"), "taken"), deployment(tmp_path, "good")]
    assert loop.said[:2] == ["its settings are of another version", "scheduled: nightly/good"]
    assert "belongs to /; set another name=..." in loop.said[2] and len(loop.said) == 3


@pytest.mark.parametrize(
    ("state", "code", "signums", "outcome"),
    [
        ("Completed", 0, [], "night-000001: Promoted, better"),
        ("Running", -9, [], "night-000001: Crashed, its process ended with exit code -9"),
        ("Pending", -15, [signal.SIGTERM], "night-000001: Cancelled, stopped before it began; the next slot runs"),
        ("Cancelling", 1, [], "night-000001: Cancelled, stopped before it began; the next slot runs"),
    ],
)
def test_a_run_that_could_not_tell_its_end_is_marked_and_every_end_is_kept(
    loop: Any, tmp_path: Path, state: str, code: int, signums: list[int], outcome: str
) -> None:
    from prefect import states

    schedules.folder_of(tmp_path).mkdir()
    began = states.Completed(name="Promoted", message="better") if state == "Completed" else getattr(states, state)()
    run = SimpleNamespace(id="a", name="night-000001", state=began, labels={}, expected_start_time=SLOT)
    loop.signums = signums
    loop._end(Server(run), "a", Schedule("nightly", "mine", None, "UTC", {}), code)
    assert loop.said == [outcome]
    last = schedules.last_runs(tmp_path)["nightly/mine"]
    assert f"{last['name']}: {last['outcome']}, {last['message']}" == outcome and last["slot"] == SLOT.isoformat()


def test_what_is_due_starts_in_a_process_of_its_own_at_most_four_at_once(
    loop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, str]] = []

    def popen(command: list[str], env: dict[str, str], **options: Any) -> Any:
        started.append(env)
        assert command == [sys.executable, "-P", "-m", "prefect.engine"] and options["start_new_session"]
        return SimpleNamespace(poll=lambda: None)

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(serve, "postpone", lambda *_: False)  # tests/flows/test_slots.py
    mine = Schedule("nightly", "mine", "0 2 * * *", "UTC", {})
    schedules.write(tmp_path, mine)
    runs = [
        SimpleNamespace(id=f"r{n}", deployment_id="mine", expected_start_time=SLOT, auto_scheduled=n > 0, run_count=0)
        for n in range(6)
    ]
    server = Server(*runs)
    server.deployments = [deployment(tmp_path)]
    loop._look(server)
    loop._look(server)
    assert [env["PREFECT__FLOW_RUN_ID"] for env in started] == ["r0", "r1", "r2", "r3"]
    assert {env["PREFECT__FLOW_ENTRYPOINT"] for env in started} == {"ttrain.flows.deployments.nightly"}
    slot = f"slot {SLOT.astimezone():%Y-%m-%d %H:%M}"
    assert server.names == {f"r{n}": slot for n in (1, 2, 3)}, "one that a person started keeps its name"


def test_no_trouble_while_looking_ends_what_serves(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise LookupError("a flow run that somebody deleted")

    for _ in range(2):
        loop._try(fail)
    loop._try(lambda: None)
    told = "Prefect: LookupError a flow run that somebody deleted; trying again"
    assert loop.said == [told, "Prefect answers again"]


def test_servers_make_flow_runs_of_two_slots_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.settings.models.server.services import ServerServicesSchedulerSettings

    _, environment = servers.prefect_command(tmp_path, 4200)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = ServerServicesSchedulerSettings()
    assert (settings.min_runs, settings.max_runs, settings.min_scheduled_time) == (2, 2, timedelta(0))


def test_files_of_schedules_are_written_as_json(tmp_path: Path) -> None:
    path = schedules.write(tmp_path, Schedule("full", "mine", None, "UTC", {"name": "mine"}))
    assert json.loads(path.read_bytes())["settings"] == {"name": "mine"}
