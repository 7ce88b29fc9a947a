"""`ttrain pipeline serve`: makes deployments of the schedules of a home, and runs what is due.

Prefect's `Runner` starts what is due, each flow run in a process of its own. That a night never
overlaps itself and never wedges, it need not know: a night holds the lock of its name, and one that
finds it taken ends as `Skipped` (flows/nightly.py); whatever is killed, the next slot continues its
night. One thing the runner lacks for that: it gives up after half a minute without its server, so
that server and runner are started again here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter
from prefect.deployments.runner import DeploymentApplyError
from prefect.runner import Runner
from prefect.schedules import Cron
from prefect.types.entrypoint import EntrypointType

from ttrain.config import Auth
from ttrain.core.files import (
    PRIVATE_FILE,
    Taken,
    exclusive,
    private_directory,
    refuse,
    write_json,
)
from ttrain.core.machine import VERSION
from ttrain.core.signals import handling_signals
from ttrain.errors import Interrupted, UsageError
from ttrain.flows import deploy, deployed, flow_runs, prefect_api, prefect_run, servers
from ttrain.flows.deploy import Schedule
from ttrain.flows.flow_runs import TAG, best_effort, home_tag
from ttrain.store import server_records
from ttrain.store.runs import this_process

LOOK_SECONDS = 5.0  # between two looks for what is due, and for schedules that changed
RUNS_AT_ONCE = 4  # one of them trains; a slot that comes meanwhile needs seconds to see that
OWNER = "serve"  # of a server that is started to serve
STOPPED = "stopped serving; schedules stay, `ttrain pipeline serve` goes on with them"


def serve(home: Path, say: Callable[[str], None], auth: Auth = "token") -> None:
    """Run what is due until SIGTERM, SIGHUP or SIGINT; running ones then save their state.

    Raises Interrupted after SIGINT, and UsageError where this home is served already, or where
    the server that PREFECT_API_URL names does not answer.
    """
    server = ScheduleServer(home, say, auth)
    with serve_lock(home), handling_signals(server.signums.append):
        try:
            server.start()
            asyncio.run(server.run())
        finally:
            _stop_server(home)
    say(STOPPED)
    if signal.SIGINT in server.signums:
        stopped = Interrupted(STOPPED, signal.SIGINT)
        stopped.shown = True
        raise stopped


@contextlib.contextmanager
def serve_lock(home: Path) -> Iterator[None]:
    """The lock of the one process that serves a home; the system releases it when that dies."""
    folder = private_directory(deploy.folder_of(home))
    try:
        with exclusive(folder / "serve.lock", refuse):
            write_json(folder / deploy.SERVING, this_process(), PRIVATE_FILE)
            yield
    except Taken:
        raise UsageError(
            f"{home.resolve()} is served already, by process {deploy.served_by(home)}; stop that "
            f"one first, or leave it: it also serves schedules that are added later"
        ) from None


def _stop_server(home: Path) -> None:
    """End the server that was started to serve, by this process or one that was killed."""
    server = server_records.read(home, "prefect")
    is_ours = server is not None and server.owner == OWNER
    if is_ours and not server_records.live_server(home, "mlflow"):  # else `up` has taken it over
        with servers.start_lock(home):
            servers.stop(home, "prefect")


class ScheduleServer:
    """Makes deployments of the schedules of a home, and has Prefect's runner start what is due."""

    def __init__(self, home: Path, say: Callable[[str], None], auth: Auth = "token") -> None:
        self._home, self._say, self._auth = home.resolve(), say, auth
        self._port = 4200
        self._has_own_server = not os.environ.get("PREFECT_API_URL")
        self._environment = {"TTRAIN_HOME": str(self._home)}
        self._made: dict[str, tuple[Schedule, UUID | None]] = {}  # None: it was refused
        self.signums: list[int] = []

    def start(self) -> None:
        """Choose the server that is named or runs, or start one."""
        prefect_api.check_prefect_server(self._home)
        self._keep_server()
        os.environ.update(self._environment)
        prefect_run.begin(self._home)()
        flow_runs.mark_crashed_runs(self._home)
        with best_effort():
            flow_runs.create_automation()
        self._say(f"serving the schedules of {self._home}; times are of {deploy.local_timezone()}")
        url = os.environ["PREFECT_API_URL"].removesuffix("/api")
        self._say(f"Prefect  {url}  (`ttrain up` prints its token)\nstop with Ctrl-C or SIGTERM")

    def _keep_server(self) -> None:
        """Start our server unless one runs; again on its port, which runs in progress know."""
        if self._has_own_server:
            servers.start(self._home, {"prefect": self._port}, self._auth, OWNER)
            if server := server_records.live_server(self._home, "prefect"):
                self._port = server.port

    async def run(self) -> None:
        """Run what is due until a signal, and until all runs have ended."""
        handler = signal.getsignal(signal.SIGTERM)
        while not self.signums:
            runner = Runner(
                query_seconds=LOOK_SECONDS,
                prefetch_seconds=0,  # else slots start early
                heartbeat_seconds=flow_runs.HEARTBEAT_SECONDS,
                limit=RUNS_AT_ONCE,
                pause_on_shutdown=False,
            )
            self._made = {}
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(runner.start())
                    await asyncio.sleep(0)  # in which it sets a handler of its own
                    signal.signal(signal.SIGTERM, handler)
                    tasks.create_task(self._watch(runner))
            except* Exception as errors:
                self._say(f"Prefect's runner ended, starting it again: {errors.exceptions[0]}")

    async def _watch(self, runner: Runner) -> None:
        """Keep the server and its deployments as they should be, until a signal."""
        next_look = 0.0
        while not self.signums:
            if time.monotonic() > next_look:
                try:
                    await asyncio.to_thread(self._keep_server)
                    async with get_client() as client:
                        await self.make_deployments(runner, client)
                except Exception as error:
                    self._say(f"Prefect: {type(error).__name__} {error}; trying again")
                next_look = time.monotonic() + LOOK_SECONDS
            await asyncio.sleep(0.2)
        self._say("stopping: runs in progress save their state")
        await runner.astop()

    async def make_deployments(self, runner: Runner, client: Any) -> None:
        """Make the server's deployments those of the home.

        A pause on Prefect's page is written into the file of the schedule.
        """
        listing = await client.read_deployments(deployment_filter=DeploymentFilter.model_validate({"tags": {"all_": [TAG]}}))
        present = {one.id: one for one in listing}
        schedules = deploy.read_all(self._home)
        for name, schedule in schedules.items():
            made, number = self._made.get(name, (None, None))
            if made != schedule or (number is not None and number not in present):
                try:
                    number = await self._make(runner, schedule, listing)
                    self._say(f"scheduled: {name}")
                except UsageError as error:  # until its file changes; other schedules are served
                    number = None
                    self._say(f"{name} is not served: {error}")
            elif number is not None and present[number].paused != schedule.paused:
                schedule = replace(schedule, paused=present[number].paused)
                deploy.write(self._home, schedule)
            self._made[name] = (schedule, number)
        kept = {self._made[name][1] for name in schedules}
        for one in listing:
            if home_tag(self._home) in one.tags and one.id not in kept:
                await client.delete_deployment(one.id)

    async def _make(self, runner: Runner, schedule: Schedule, present: Iterable[Any]) -> UUID:
        """Make or change a deployment. Raises UsageError where its file or the server forbids it."""
        for other in present:
            kind = other.entrypoint.rpartition(".")[2].removeprefix("run_")
            is_same = (kind, other.name) == (schedule.kind, schedule.name)
            if is_same and home_tag(self._home) not in other.tags:
                raise UsageError("the server has one of another home by this name; set name=...")
        settings = deploy.settings_of(self._home, schedule)
        options: dict[str, Any] = {
            "name": schedule.name,
            "schedules": [],  # which removes an earlier one
            "paused": schedule.paused,
            "parameters": {"settings": deploy.parameters(settings.model_dump(mode="json"))},
            "tags": [TAG, home_tag(self._home)],
            "version": VERSION,
            "entrypoint_type": EntrypointType.MODULE_PATH,
        }
        if schedule.cron:
            options["schedules"] = [Cron(schedule.cron, timezone=schedule.timezone, slug="cron")]
        own_flow = deployed.FLOWS[schedule.kind]
        if not schedule.pool:  # runs this flow itself, whatever entry point the server names
            number: UUID = await runner.aadd_flow(own_flow, **options)
            return number
        options |= {"work_pool_name": schedule.pool, "job_variables": {"env": self._environment}}
        pooled = await own_flow.ato_deployment(**options)
        pooled.entrypoint = f"{deployed.__name__}.{schedule.kind}"
        try:
            number = await pooled.aapply()
        except DeploymentApplyError as error:
            raise UsageError(f"{error}; make the pool, then schedule again") from None
        return number
