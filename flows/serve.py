"""`ttrain pipeline serve`: make the deployments of a home, and run what is due.

Prefect's scheduler says what is due; each flow run is `python -m prefect.engine` in a process of
its own. Prefect's `Runner` is not used, since with it nights would end without having saved: it
gives up, and kills the runs in progress, when its server is away for half a minute, and a run that
is asked to stop has 30 s. It also knows no deployment that is made after it began.

A night never overlaps itself, whoever starts it: it holds the lock of its name, and one that finds
it taken ends as `Skipped` (flows/nightly.py). Whatever is killed here, the next look goes on: a
run whose process is gone is marked as crashed, and the next slot continues its night.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from ttrain.config import Auth
from ttrain.core.files import PRIVATE_FILE, Taken, exclusive, private_directory, refuse, write_json
from ttrain.core.signals import handling_signals
from ttrain.errors import Interrupted, TTrainError, UsageError
from ttrain.flows import deploy, flow_runs, prefect_api, prefect_run, schedules, servers, slots
from ttrain.flows.schedules import Schedule
from ttrain.store import server_records
from ttrain.store.runs import this_process
from ttrain.tasks.best_effort import best_effort

LOOK_SECONDS = 5.0  # between two looks for what is due
TICK_SECONDS = 0.2  # between two looks at signals and processes
REQUEST_SECONDS = 10.0  # a stop waits for a server that is away so long at most
RUNS_AT_ONCE = 4  # one of them trains; a slot that comes meanwhile needs seconds to see that
PREFECT_PORT = 4200
STOPPED = "stopped serving; schedules stay, `ttrain pipeline serve` goes on with them"

OWNER = "serve"  # of a server that is started to serve
# What an API says of an entry point is not run: it may name any code
ENTRY_POINTS = {f"ttrain.flows.deployments.{kind}": kind for kind in schedules.KINDS}


def serve(home: Path, say: Callable[[str], None], auth: Auth = "token") -> None:
    """Run what is due until SIGTERM, SIGHUP or SIGINT; running ones then save their state.

    Raises Interrupted after SIGINT, and UsageError where this home is served already, or where
    the server that PREFECT_API_URL names does not answer.
    """
    loop = ScheduleServer(home, say)
    with serve_lock(home), handling_signals(loop.on_signal):
        try:
            loop.start(auth)
            loop.run()
        except BaseException:
            # Any: pydantic makes an error of its own of an exit that comes while it calls Python
            if not loop.signums:
                raise
        finally:
            _stop_server(home)
    say(STOPPED)
    if signal.SIGINT in loop.signums:
        stopped = Interrupted(STOPPED, signal.SIGINT)
        stopped.shown = True
        raise stopped


@contextlib.contextmanager
def serve_lock(home: Path) -> Iterator[None]:
    """The lock of the one process that serves a home; the system releases it when that dies."""
    folder = private_directory(schedules.folder_of(home))
    try:
        with exclusive(folder / "serve.lock", refuse):
            write_json(folder / schedules.SERVING, this_process(), PRIVATE_FILE)
            yield
    except Taken:
        pid = schedules.served_by(home)
        raise UsageError(
            f"{home.resolve()} is served already, by process {pid}; stop that one first, "
            f"or leave it: it also serves schedules that are added later"
        ) from None


def _stop_server(home: Path) -> None:
    """End the server that was started to serve, by this process or one that was killed."""
    server = server_records.read(home, "prefect")
    is_ours = server is not None and server.owner == OWNER
    if is_ours and not server_records.live_server(home, "mlflow"):  # else `up` has taken it over
        with servers.start_lock(home):
            servers.stop(home, "prefect")


class ScheduleServer:
    """Makes deployments from the schedules of a home; starts, watches and stops their flow runs."""

    def __init__(self, home: Path, say: Callable[[str], None]) -> None:
        self._home, self._say = home.resolve(), say
        self._auth: Auth = "token"
        self._port = 0  # of our own server; 0 where the user's is used
        self._made: dict[str, Schedule] = {}  # as the server has them
        self._refused: dict[str, Schedule] = {}
        self._running: dict[Any, tuple[subprocess.Popen[bytes], Schedule]] = {}  # by id of flow run
        self._is_away = False
        self._is_looping = False
        self._stops = 0  # how many signals the runs know of
        self.signums: list[int] = []

    def on_signal(self, signum: int) -> None:
        """Note the signal; before the loop begins it ends the process."""
        self.signums.append(signum)
        if not self._is_looping:
            sys.exit(0)

    def start(self, auth: Auth) -> None:
        """Choose the server that is named or runs, or start one."""
        prefect_api.check_prefect_server(self._home)
        if not os.environ.get("PREFECT_API_URL"):
            self._auth = auth
            self._keep_server(PREFECT_PORT)
        prefect_run.begin(self._home)()
        flow_runs.mark_crashed_runs(self._home)
        with best_effort():
            flow_runs.create_automation()
        zone = schedules.local_timezone()
        self._say(f"serving the schedules of {self._home}; times are of {zone}")
        url = os.environ["PREFECT_API_URL"].removesuffix("/api")
        self._say(f"Prefect  {url}  (`ttrain up` prints its token)\nstop with Ctrl-C or SIGTERM")

    def _keep_server(self, port: int) -> None:
        """Start our server unless one runs. Raises TTrainError where runs would not find it."""
        if not server_records.live_server(self._home, "prefect"):
            if self._port:
                self._say("the Prefect server is gone; starting it again")
            servers.start(self._home, {"prefect": port}, self._auth, OWNER)
        server = server_records.live_server(self._home, "prefect")
        if server is None or server.port != (self._port or server.port):
            servers.stop(self._home, "prefect")  # runs in progress know the old port
            raise TTrainError(f"port {port} of the Prefect server is taken; end the other program")
        self._port = server.port

    def run(self) -> None:
        """Look for what is due again and again, until a signal and until all runs have ended."""
        from prefect.settings import (
            PREFECT_API_REQUEST_TIMEOUT,
            PREFECT_CLIENT_MAX_RETRIES,
            temporary_settings,
        )

        self._is_looping = True
        limits = {PREFECT_API_REQUEST_TIMEOUT: REQUEST_SECONDS, PREFECT_CLIENT_MAX_RETRIES: 0}
        with temporary_settings(limits), flow_runs.sync_client() as client:
            next_look = 0.0
            while not self.signums or self._running:
                if len(self.signums) > self._stops:
                    self._stop_runs()
                elif time.monotonic() >= next_look:
                    self._try(partial(self._look, client))
                    next_look = time.monotonic() + LOOK_SECONDS
                for flow_run_id, (process, schedule) in list(self._running.items()):
                    if process.poll() is not None:
                        del self._running[flow_run_id]
                        step = partial(self._end, client, flow_run_id, schedule, process.returncode)
                        self._try(step)
                time.sleep(TICK_SECONDS)

    def _stop_runs(self) -> None:
        """Ask the runs to save and stop; kill them after a second signal."""
        number = signal.SIGKILL if self._stops else signal.SIGTERM
        for process, _ in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)  # its stages end with it
        if self._running and not self._stops:
            self._say("stopping: runs in progress save their state (again to end at once)")
        self._stops = len(self.signums)

    def _try(self, step: Callable[[], None]) -> None:
        """Do a step; a server that is away, or any other error, ends no run in progress."""
        try:
            step()
        except Exception as error:
            if not self._is_away:
                reason = f"{type(error).__name__} {error}".splitlines()[0]
                self._say(f"Prefect: {reason}; trying again")
            self._is_away = True
        else:
            if self._is_away:
                self._say("Prefect answers again")
            self._is_away = False

    def _look(self, client: Any) -> None:
        """Make the server's deployments those of the home, and start what is due."""
        if self._port:
            self._keep_server(self._port)
        served = self._sync(client)
        if not served or self.signums:
            return
        due = client.get_scheduled_flow_runs_for_deployments(list(served), datetime.now(UTC))
        new = [run for run in due if run.id not in self._running]
        new = [run for run in new if not postpone(client, run, served[run.deployment_id])]
        for run in new[: max(0, RUNS_AT_ONCE - len(self._running))]:
            self._start(client, run, served[run.deployment_id])

    def _sync(self, client: Any) -> dict[Any, Schedule]:
        """Make the server's deployments those of the home; returns the schedules by deployment id.

        A pause on Prefect's page is written into the file of the schedule.
        """
        from prefect.client.schemas.filters import DeploymentFilter

        of_ours = DeploymentFilter.model_validate({"tags": {"all_": [flow_runs.TAG]}})
        deployments = {
            f"{ENTRY_POINTS[deployment.entrypoint]}/{deployment.name}": deployment
            for deployment in client.read_deployments(deployment_filter=of_ours)
            if deployment.entrypoint in ENTRY_POINTS and deployment.work_pool_name is None
        }
        served: dict[Any, Schedule] = {}
        for name, schedule in schedules.read_all(self._home).items():
            deployment = None if schedule.pool else deployments.pop(name, None)
            is_made = deployment is not None and self._made.get(name) == schedule
            if schedule.pool or self._refused.get(name) == schedule:
                continue
            if not is_made:
                self._make(schedule, deployment)
            elif deployment and deployment.paused != schedule.paused:
                self._made[name] = replace(schedule, paused=deployment.paused)
                schedules.write(self._home, self._made[name])
            if deployment is not None:  # one that has just been made is served by the next look
                served[deployment.id] = schedule
        for deployment in deployments.values():
            if flow_runs.home_tag(self._home) in deployment.tags:
                client.delete_deployment(deployment.id)
        return served

    def _make(self, schedule: Schedule, deployment: Any) -> None:
        """Make or change a deployment; say so, or why it cannot be made."""
        tags = deployment.tags if deployment else []
        homes = [tag.removeprefix("home:") for tag in tags if tag.startswith("home:")]
        others = [home for home in homes if home != str(self._home) and Path(home).is_dir()]
        try:
            if others:
                raise UsageError(
                    f"the deployment {schedule.full_name} on {os.environ['PREFECT_API_URL']} "
                    f"belongs to {others[0]}; set another name=..., or remove that one"
                )
            deploy.apply(self._home, schedule)
        except UsageError as error:  # until its file changes; other schedules are served
            self._refused[schedule.full_name] = schedule
            self._say(str(error))
        else:
            self._made[schedule.full_name] = schedule
            self._say(f"scheduled: {schedule.full_name}")

    def _start(self, client: Any, run: Any, schedule: Schedule) -> None:
        """Start the process of a flow run, unless the server says that it is not due any more."""
        from prefect.client.schemas.responses import SetStateStatus
        from prefect.states import Pending

        if client.set_flow_run_state(run.id, Pending()).status != SetStateStatus.ACCEPT:
            return
        slot = f"slot {run.expected_start_time.astimezone():%Y-%m-%d %H:%M}"
        if run.auto_scheduled and not run.run_count:  # Prefect draws its name from a list
            client.set_flow_run_name(run.id, slot)
        environment = {
            "TTRAIN_HOME": str(self._home),
            "PREFECT__FLOW_RUN_ID": str(run.id),
            "PREFECT__FLOW_ENTRYPOINT": f"ttrain.flows.deployments.{schedule.kind}",
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(flow_runs.HEARTBEAT_SECONDS),
        }
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "prefect.engine"],
            env={**os.environ, **environment},
            cwd=schedules.folder_of(self._home),  # where Prefect looks for settings of its own
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C goes to this process only, which asks the others once
        )
        self._running[run.id] = process, schedule
        self._say(f"{slot} of {schedule.full_name}: started")

    def _end(self, client: Any, flow_run_id: Any, schedule: Schedule, code: int) -> None:
        """Say and keep how a flow run ended; one that could not tell the server is marked."""
        from prefect.states import Cancelled, Crashed

        run = client.read_flow_run(flow_run_id)  # which has the name of its night by now
        state = run.state
        if state.is_running() or state.is_pending() or state.is_cancelling():
            is_stopped = bool(self.signums) or state.is_cancelling()
            state = Crashed(message=f"its process ended with exit code {code}")
            if is_stopped:
                state = Cancelled(message="stopped before it began; the next slot runs")
            client.set_flow_run_state(run.id, state, force=True)
            flow_runs.mark_crashed_runs(self._home)  # and its tasks
        is_shown = run.labels.get(flow_runs.LABEL_SHOWN) and state.is_failed()
        message = "" if is_shown or not state.message else f", {state.message}"
        self._say(f"{run.name}: {state.name}{message}")
        slot = run.expected_start_time.isoformat()
        last = {"name": run.name, "outcome": state.name, "slot": slot, "message": state.message}
        outcomes = {**schedules.last_runs(self._home), schedule.full_name: last}
        write_json(schedules.folder_of(self._home) / schedules.LAST, outcomes, PRIVATE_FILE)


def postpone(client: Any, run: Any, schedule: Schedule) -> bool:
    """Move a slot that Prefect starts on the date before its own to its date; returns whether it was one."""
    from prefect.states import Scheduled

    if not schedule.cron or not run.auto_scheduled or run.run_count:
        return False
    slot = run.expected_start_time
    moved = asyncio.run(slots.on_its_date(slot, schedule.cron, schedule.timezone))
    if moved <= max(slot, datetime.now(UTC)):
        return False
    client.set_flow_run_state(run.id, Scheduled(scheduled_time=moved), force=True)
    return True
