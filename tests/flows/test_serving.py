"""The process that serves the schedules of a home, and the deployments that it makes."""

import asyncio
import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ttrain.errors import UsageError
from ttrain.flows import deploy, serve
from ttrain.flows.deploy import Schedule

MINE = Schedule("nightly", "mine", "0 2 * * *", "UTC", {})


def test_a_second_server_is_refused_with_the_first_ones_process(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()

    def hold() -> None:
        with serve.serve_lock(tmp_path):
            theirs.send(os.getpid())
            theirs.recv()

    first = multiprocessing.get_context("fork").Process(target=hold)
    first.start()
    pid = ours.recv()
    assert deploy.served_by(tmp_path) == pid == first.pid
    with pytest.raises(UsageError, match=f"process {pid}"), serve.serve_lock(tmp_path):
        pass
    ours.send("end")
    first.join()
    assert deploy.served_by(tmp_path) is None


class Server:
    """A double of Prefect's client and runner, with the schedules that are served on it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.deployments: dict[str, Any] = {}
        self.added: list[str] = []
        self.messages: list[str] = []
        self.schedules = serve.ScheduleServer(home, self.messages.append)

    def update(self, times: int = 1) -> None:
        for _ in range(times):
            asyncio.run(self.schedules.make_deployments(self, self))  # type: ignore[arg-type]

    async def read_deployments(self, **filters: Any) -> list[Any]:
        tags = set(filters["deployment_filter"].tags.all_)
        return [each for each in self.deployments.values() if tags <= set(each.tags)]

    async def delete_deployment(self, number: str) -> None:
        del self.deployments[number]

    async def aadd_flow(self, flow: Any, name: str, paused: bool, **options: Any) -> str:
        number = f"{flow.name}/{name}"
        self.add(number, paused=paused)
        self.added.append(number)
        return number

    def add(self, number: str, home: Path | None = None, paused: bool = False) -> None:
        kind, name = number.split("/")
        self.deployments[number] = SimpleNamespace(
            id=number,
            name=name,
            entrypoint=f"ttrain.flows.serve.{kind}",
            tags=["ttrain", f"home:{home or self.home}"],
            paused=paused,
        )


def test_deployments_follow_the_files_and_a_pause_in_the_ui_is_kept(tmp_path: Path) -> None:
    server = Server(tmp_path)
    deploy.write(server.home, MINE)
    server.update(2)
    assert server.added == ["nightly/mine"] and server.messages == ["scheduled: nightly/mine"]
    server.deployments["nightly/mine"].paused = True
    server.update(2)
    assert deploy.read_all(server.home)["nightly/mine"].paused
    deploy.pause(server.home, "mine", paused=False)
    server.update(2)
    assert not server.deployments["nightly/mine"].paused
    assert len(server.added) == 2, "a resumed one is made again"
    server.deployments.clear()
    server.update()
    assert len(server.added) == 3, "the server had lost it"
    server.add("nightly/of-another-home", Path("/"))
    server.add("full/removed")
    server.update()
    assert set(server.deployments) == {"nightly/mine", "nightly/of-another-home"}
