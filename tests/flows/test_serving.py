"""What serves the schedules of a home: which process it is, and what it makes on a server."""

import asyncio
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.deployments.runner import DeploymentApplyError, RunnerDeployment
from prefect.flows import load_flow_from_entrypoint

from ttrain.errors import UsageError
from ttrain.flows import deploy, serve
from ttrain.flows.deploy import Schedule


def test_a_second_one_that_serves_is_told_of_the_first(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()

    def hold() -> None:
        with serve.serve_lock(tmp_path):
            theirs.send(os.getpid())
            theirs.recv()

    first = multiprocessing.get_context("fork").Process(target=hold)
    first.start()
    pid = ours.recv()
    assert deploy.served_by(tmp_path) == pid == first.pid
    with (
        pytest.raises(UsageError, match=f"is served already, by process {pid}"),
        serve.serve_lock(tmp_path),
    ):
        pass
    ours.send("end")
    first.join()
    assert deploy.served_by(tmp_path) is None


class Server:
    def __init__(self, home: Path) -> None:
        self.home, self.deployments, self.added = home, dict[str, Any](), list[str]()

    async def read_deployments(self, **filters: Any) -> list[Any]:
        wanted = filters["deployment_filter"].tags.all_
        return [one for one in self.deployments.values() if set(wanted) <= set(one.tags)]

    async def delete_deployment(self, number: str) -> None:
        del self.deployments[number]

    async def aadd_flow(self, flow: Any, name: str, paused: bool, **options: Any) -> str:
        number = f"{flow.name}/{name}"
        self.add(number, paused=paused)
        self.added.append(number)
        return number

    def add(self, number: str, **fields: Any) -> None:
        kind, name = number.split("/")
        own = {"id": number, "name": name, "entrypoint": f"ttrain.flows.serve.{kind}"}
        tags = ["ttrain", f"home:{self.home}"]
        self.deployments[number] = SimpleNamespace(
            **{**own, "paused": False, "tags": tags, **fields}
        )


@pytest.fixture
def said() -> list[str]:
    return []


def test_a_schedule_whose_pool_is_missing_is_said_once_and_the_others_are_made(
    look: Any, server: Server, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(made: RunnerDeployment) -> str:
        raise DeploymentApplyError("there is no such pool")

    monkeypatch.setattr(RunnerDeployment, "aapply", refuse)
    deploy.write(tmp_path, replace(MINE, name="bad", pool="none"))
    deploy.write(tmp_path, replace(MINE, name="good"))
    look()
    look()
    assert server.added == ["nightly/good"] and len(said) == 2
    assert "such pool" in said[0]


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


@pytest.fixture
def look(tmp_path: Path, server: Server, said: list[str]) -> Any:
    served = serve.ScheduleServer(tmp_path, said.append)
    return lambda: asyncio.run(served.make_deployments(server, server))  # type: ignore[arg-type]


MINE = Schedule("nightly", "mine", "0 2 * * *", "UTC", {})


def test_deployments_are_those_of_the_files_and_a_pause_in_the_ui_is_kept_in_the_file(
    look: Any, server: Server, said: list[str], tmp_path: Path
) -> None:
    deploy.write(tmp_path, MINE)
    look()
    look()
    assert server.added == ["nightly/mine"] and said == ["scheduled: nightly/mine"]
    server.deployments["nightly/mine"].paused = True
    look()
    assert deploy.read_all(tmp_path)["nightly/mine"].paused
    look()
    deploy.pause(tmp_path, "mine", paused=False)
    look()
    assert not server.deployments["nightly/mine"].paused and len(server.added) == 2, (
        "a resumed one is made again"
    )
    server.deployments.clear()
    look()
    assert len(server.added) == 3, "also where the server has lost it"
    server.add("nightly/of-another-home", tags=["ttrain", "home:/"])
    server.add("full/removed")
    look()
    assert set(server.deployments) == {"nightly/mine", "nightly/of-another-home"}


def test_a_pool_gets_the_flow_by_its_module_with_the_home(
    look: Any, server: Server, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied: list[Any] = []

    async def apply(made: RunnerDeployment) -> str:
        applied.append(made)
        server.add("nightly/mine")
        return "nightly/mine"

    monkeypatch.setattr(RunnerDeployment, "aapply", apply)
    deploy.write(tmp_path, replace(MINE, pool="docker-pool"))
    look()
    look()
    [made] = applied
    assert (made.work_pool_name, made.entrypoint) == ("docker-pool", "ttrain.flows.serve.nightly")
    assert made.job_variables == {"env": {"TTRAIN_HOME": str(tmp_path)}} and not server.added
    assert [(slot.schedule.cron, slot.schedule.timezone) for slot in made.schedules] == [
        ("0 2 * * *", "UTC")
    ]
    assert load_flow_from_entrypoint(made.entrypoint).name == "nightly"
