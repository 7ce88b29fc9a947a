"""Schedules of a home, the process that serves them, and the systemd unit of it."""

import asyncio
import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ttrain.config.loading import load
from ttrain.engine.provenance import with_absolute_paths
from ttrain.errors import UsageError
from ttrain.flows import deploy, serve
from ttrain.flows.deploy import Schedule


def test_paths_become_absolute_and_all_else_stays(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("base", "mine", "sft"):  # a folder with a stage's name is not the stage
        (tmp_path / name).mkdir()
    overrides = [
        "data.pretrain=[docs/*.jsonl, 'https://example.org/a.jsonl', {path: more, weight: 2}]",
        "data.sft=~/chats.jsonl",
        "data.lora=hf://owner/name",
        "tokenizer.existing=base",
        "notify.command=[bin/tell, me/too]",
        "sft.start_from=./mine",
        "lora.start_from=sft",
    ]
    settings = with_absolute_paths(load(overrides, environment={}).settings)
    files = f"{tmp_path}/docs/*.jsonl", "https://example.org/a.jsonl", f"{tmp_path}/more"
    assert settings.data.paths("pretrain") == files
    assert settings.data.weights("pretrain") == (1.0, 1.0, 2.0)
    assert settings.data.paths("sft") == (str(Path.home() / "chats.jsonl"),)
    assert settings.data.paths("lora") == ("hf://owner/name",)
    assert settings.tokenizer.existing == str(tmp_path / "base")
    assert settings.notify.command == (str(tmp_path / "bin/tell"), "me/too")
    assert (settings.sft.start_from, settings.lora.start_from) == (str(tmp_path / "mine"), "sft")


def test_what_never_fires_is_refused() -> None:
    deploy.check_cron("*/5 1-3 * * mon,fri", "America/New_York")
    for cron, timezone, rule in (
        ("0 2 * *", "UTC", "five fields"),
        ("0 0 30 2 *", "UTC", "never fires"),
        ("0 2 * * *", "Mars/Base", "Mars/Base"),
    ):
        with pytest.raises(UsageError, match=rf"(?s){rule}.*(0 2 \* \* \*|Europe/Berlin)"):
            deploy.check_cron(cron, timezone)


def test_a_systemd_unit_names_any_home(tmp_path: Path) -> None:
    """Also one whose name holds what shells and systemd each take for something else."""
    home = tmp_path / "a home $HOME 50% 'of' \"it\" \\n"
    escaped = str(home).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    options = {"KillMode=mixed", "EnvironmentFile=-%h/.config/ttrain/environment"}
    lines = {*deploy.unit(home).splitlines()}
    assert options | {f'Environment="TTRAIN_HOME={escaped}"'} <= lines


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
        self.messages: list[str] = []
        self.schedules = serve.ScheduleServer(home, self.messages.append)

    def update(self) -> None:
        for _ in range(2):
            asyncio.run(self.schedules.make_deployments(self, self))  # type: ignore[arg-type]

    async def read_deployments(self, **filters: Any) -> list[Any]:
        tags = set(filters["deployment_filter"].tags.all_)
        return [each for each in self.deployments.values() if tags <= set(each.tags)]

    async def delete_deployment(self, number: str) -> None:
        del self.deployments[number]

    async def aadd_flow(self, flow: Any, name: str, paused: bool, **options: Any) -> str:
        self.add(f"{flow.name}/{name}", paused=paused)
        return f"{flow.name}/{name}"

    def add(self, number: str, home: Path | None = None, paused: bool = False) -> None:
        tags = ["ttrain", f"home:{home or self.home}"]
        self.deployments[number] = SimpleNamespace(id=number, tags=tags, paused=paused)


def test_deployments_follow_the_files_and_a_pause_in_the_ui_is_kept(tmp_path: Path) -> None:
    server = Server(tmp_path)
    deploy.write(server.home, Schedule("nightly", "mine", "0 2 * * *", "UTC", {}))
    server.update()
    assert server.messages == ["scheduled: nightly/mine"]
    server.deployments["nightly/mine"].paused = True
    server.update()
    assert deploy.read_all(server.home)["nightly/mine"].paused
    deploy.pause(server.home, "mine", paused=False)
    server.update()
    assert not server.deployments["nightly/mine"].paused
    server.deployments.clear()  # as a server that has lost it
    server.add("nightly/of-another-home", Path("/"))
    server.add("full/removed")
    server.update()
    assert set(server.deployments) == {"nightly/mine", "nightly/of-another-home"}
    assert len(server.messages) == 3, "it was made again where it was resumed, and where lost"
