"""`ttrain pipeline serve`: deployments of a home's schedules, and what runs the due ones.

A deployment's one parameter is a list of changes, so that no server holds secrets or names code.
Prefect's `Runner` starts each due flow run in its own process; nights are kept apart by their lock
(flows/nightly.py). Server and runner are started again when they end, since the runner gives up
after half a minute without a server, and SIGTERM lets the runs save first.
"""

import asyncio
import contextlib
import io
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter
from prefect.deployments.runner import DeploymentApplyError
from prefect.logging import get_run_logger
from prefect.runner import Runner
from prefect.runtime import deployment, flow_run
from prefect.schedules import Cron
from prefect.states import Cancelled, Completed, State
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.types.entrypoint import EntrypointType
from rich.console import Console

from ttrain.config import NAMES_CODE, Settings
from ttrain.config.loading import load
from ttrain.core.files import PRIVATE_FILE, Taken, exclusive, private_directory, refuse, write_json
from ttrain.core.machine import VERSION
from ttrain.core.signals import handling_signals
from ttrain.core.terminal import escaped, guard_streams, outlast_output, show_warnings
from ttrain.core.text import timed_lines
from ttrain.errors import Interrupted, TTrainError, UsageError
from ttrain.flows import deploy, engine, servers
from ttrain.flows.deploy import Schedule
from ttrain.flows.prefect_run import (
    MAX_CONCURRENT_STAGES,
    TAG,
    best_effort,
    mark_crashed_runs,
    rename,
    state_of,
)
from ttrain.lineage.lookup import base_of
from ttrain.store import server_records
from ttrain.store.layout import usable_home
from ttrain.store.runs import this_process
from ttrain.tracking.artifact_source import store_of

QUERY_SECONDS = 5.0  # between two looks for what is due
LOOK_SECONDS = 1.0  # between two looks for a signal, and for schedules that changed
RUNS_AT_ONCE = 4  # one of them trains; a slot that comes meanwhile needs seconds to see that
OWNER = "serve"  # of a server that is started to serve
STOPPED = "stopped serving; schedules stay, `ttrain pipeline serve` goes on with them"
engine.silence_prefect()  # now, not in the flow: a signal before it is logged as a crash


# --- the flows of deployments ---


def run_slot(changes: tuple[str, ...] = ()) -> State[Any] | None:
    """Run one slot of a schedule; unchanged stages come from the store.

    Args:
        changes: settings of this run alone as key=value, such as sft.epochs=3
    """
    guard_streams()
    outlast_output()
    show_warnings()
    home = usable_home()
    schedule = f"{flow_run.flow_name}/{deployment.name}"
    try:
        settings = settings_to_run(home, schedule, changes)
        state = (_run_night if flow_run.flow_name == "nightly" else _run_full)(home, settings)
    except TTrainError as error:
        if not isinstance(error, Interrupted):
            get_run_logger().error("%s", error)
        state = state_of(error)
    ended = f"{state.name}, {state.message}" if state.message else str(state.name)
    print(timed_lines(escaped(f"{schedule}: {ended}")), flush=True)
    last = {
        "outcome": state.name,
        "slot": flow_run.scheduled_start_time.isoformat(),
        "message": state.message,
    }
    with best_effort():
        write_json(deploy.last_run_file(home, schedule), last, PRIVATE_FILE)
    return state


# Prefect retries no flow run: stages have retries of their own, and the next slot continues. The
# function has another name than the flows, as the runner's processes load it by its name.
OPTIONS: Any = {
    # until it is named after its night or run
    "flow_run_name": lambda: f"slot {flow_run.scheduled_start_time.astimezone():%Y-%m-%d %H:%M}",
    "retries": 0,
    "persist_result": False,
    "task_runner": ThreadPoolTaskRunner(max_workers=MAX_CONCURRENT_STAGES),
}
full = flow(run_slot, name="full", **OPTIONS)
nightly = flow(run_slot, name="nightly", **OPTIONS)
FLOWS = {"full": full, "nightly": nightly}


def _run_full(home: Path, settings: Settings) -> State[Any]:
    from ttrain.engine.graph import Plan
    from ttrain.engine.planner import plan
    from ttrain.flows.full import full as full_graph
    from ttrain.flows.teacher import name_teachers, with_teachers

    store = store_of(home, settings)
    settings = name_teachers(settings, store)
    graph = with_teachers(full_graph(settings), settings, store)
    planned = Plan("full", settings, store, graph, plan(graph, settings, store))
    engine.run_pipeline(planned, flow_run_console(), engine.RunOptions(in_flow=True))
    return Completed()


def _run_night(home: Path, settings: Settings) -> State[Any]:
    # The outcome is the name of the state, such as Promoted, NothingNew or Skipped.
    from ttrain.flows.nightly import run_night

    result = run_night(
        settings,
        store_of(home, settings),
        flow_run_console(),
        engine.RunOptions(in_flow=True),
        flow_run.scheduled_start_time,
    )
    if result.night:
        rename(result.night)
    state = Cancelled if result.outcome == "unfinished" else Completed
    return state(name=result.outcome.title().replace("-", ""), message=result.reason)


def settings_to_run(home: Path, full_name: str, changes: Sequence[str]) -> Settings:
    """The schedule's settings with the changes of a flow run, validated.

    Raises UsageError for a setting that names code: anybody on the server could send it.
    """
    schedule = deploy.find(home, full_name)
    base = base_of({"run": f"the schedule {full_name}", "settings": schedule.settings})
    settings = load((), environment={}, base=base).settings
    changed = load(changes, environment={}, base=base).settings
    for key in NAMES_CODE:
        if attrgetter(key)(changed) != attrgetter(key)(settings):
            raise UsageError(
                f"{key} is in the changes of this flow run, but a setting that names code or a "
                f"command comes from {deploy.path_of(home, full_name)} only; leave it out, or "
                f"set it there with `ttrain pipeline schedule {schedule.kind} ... {key}=...`"
            )
    return changed


class RunLog(io.StringIO):
    """Passes the run's messages to the terminal, and line by line to the flow run's log."""

    def __init__(self) -> None:
        super().__init__()
        self._logger = get_run_logger()  # other threads write, too, which have no flow run

    def write(self, text: str) -> int:
        for line in filter(None, map(str.rstrip, text.split("\n"))):
            print(timed_lines(line), flush=True)
            self._logger.info("%s", line)
        return len(text)


def flow_run_console() -> Console:
    """Make the console that prints to the terminal and to the flow run's log."""
    return Console(file=RunLog(), force_terminal=False, width=160)


# --- the process that serves ---


def serve(home: Path, say: Callable[[str], None]) -> None:
    """Run due schedules until SIGTERM, SIGHUP or SIGINT; runs then save their state.

    Raises Interrupted after SIGINT, and UsageError if the home is already served or the named
    server does not answer.
    """
    server = ScheduleServer(home, say)
    with serve_lock(home), handling_signals(server.signums.append):
        try:
            server.start()
            asyncio.run(server.run())
        finally:
            server.stop()
    say(STOPPED)
    if signal.SIGINT in server.signums:
        stopped = Interrupted(STOPPED, signal.SIGINT)
        stopped.shown = True
        raise stopped


@contextlib.contextmanager
def serve_lock(home: Path) -> Iterator[None]:
    """The lock of the process that serves a home; its death releases it."""
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


class ScheduleServer:
    """Makes deployments of the schedules of a home, and has Prefect's runner start what is due."""

    def __init__(self, home: Path, say: Callable[[str], None]) -> None:
        self._home = home.resolve()
        self._say = say
        self._has_own_server = not os.environ.get("PREFECT_API_URL")
        self._environment = {"TTRAIN_HOME": str(self._home)}
        self._tags = [TAG, f"home:{self._home}"]  # where several homes share a server
        self._made: dict[str, tuple[Schedule, UUID | None]] = {}  # None: it was refused
        self.signums: list[int] = []

    def start(self) -> None:
        """Choose the server that is named or runs, or start one."""
        self._keep_server()
        os.environ.update(self._environment)
        engine.begin(self._home)
        mark_crashed_runs(self._home)
        self._say(f"serving the schedules of {self._home}; times are of {deploy.local_timezone()}")
        url = os.environ["PREFECT_API_URL"].removesuffix("/api")
        self._say(f"Prefect  {url}  (`ttrain up` prints its token)\nstop with Ctrl-C or SIGTERM")

    def _keep_server(self) -> None:
        # Again on its port, which runs in progress know.
        if self._has_own_server:
            last = server_records.read(self._home, "prefect")
            servers.start(self._home, {"prefect": last.port if last else 4200}, OWNER)

    def stop(self) -> None:
        """End the server that was started to serve, by this process or one that was killed."""
        server = server_records.read(self._home, "prefect")
        is_ours = server is not None and server.owner == OWNER
        if is_ours and "mlflow" not in servers.running(self._home):  # else `up` has taken it over
            with servers.start_lock(self._home):
                servers.stop(self._home, "prefect")

    async def run(self) -> None:
        """Run what is due until a signal, and until all runs have ended."""
        handler = signal.getsignal(signal.SIGTERM)
        while not self.signums:
            runner = Runner(
                query_seconds=QUERY_SECONDS,
                prefetch_seconds=0,  # else slots start early
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
        while not self.signums:
            try:
                await asyncio.to_thread(self._keep_server)
                async with get_client() as client:
                    await self.make_deployments(runner, client)
            except Exception as error:
                self._say(f"Prefect: {type(error).__name__} {error}; trying again")
            await asyncio.sleep(LOOK_SECONDS)
        self._say("stopping: runs in progress save their state")
        await runner.astop()

    async def make_deployments(self, runner: Runner, client: Any) -> None:
        """Make the deployments match the schedules; a pause in Prefect's UI is kept in the file."""
        mine = DeploymentFilter.model_validate({"tags": {"all_": self._tags}})
        present = {one.id: one for one in await client.read_deployments(deployment_filter=mine)}
        schedules = deploy.read_all(self._home)
        for name, schedule in schedules.items():
            made, number = self._made.get(name, (None, None))
            if made != schedule or (number is not None and number not in present):
                try:
                    number = await self._make(runner, schedule)
                    self._say(f"scheduled: {name}")
                except DeploymentApplyError as error:  # until its file changes
                    number = None
                    self._say(f"{name}: {error}; make the pool, then schedule again")
            elif number is not None and present[number].paused != schedule.paused:
                schedule = replace(schedule, paused=present[number].paused)
                deploy.write(self._home, schedule)
            self._made[name] = (schedule, number)
        for number in present.keys() - {self._made[name][1] for name in schedules}:
            await client.delete_deployment(number)

    async def _make(self, runner: Runner, schedule: Schedule) -> Any:
        cron = (
            Cron(schedule.cron, timezone=schedule.timezone, slug="cron") if schedule.cron else None
        )
        options: dict[str, Any] = {
            "name": schedule.name,
            "schedules": [cron] if cron else [],  # an empty list removes an earlier one
            "paused": schedule.paused,
            "tags": self._tags,
            "version": VERSION,
            "entrypoint_type": EntrypointType.MODULE_PATH,
        }
        own_flow = FLOWS[schedule.kind]
        if not schedule.pool:  # runs this flow itself, whatever entry point the server names
            return await runner.aadd_flow(own_flow, **options)
        options |= {"work_pool_name": schedule.pool, "job_variables": {"env": self._environment}}
        pooled = await own_flow.ato_deployment(**options)
        pooled.entrypoint = f"{__name__}.{schedule.kind}"
        return await pooled.aapply()
