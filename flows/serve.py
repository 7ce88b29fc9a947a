"""The flows of deployments, and `ttrain pipeline serve`, which runs what is due.

A deployment's parameters are the tree of settings, typed, so that Prefect's page makes a form of it
and the server refuses what does not fit. A run that is started through the API with `settings` must
give all of them; `{"changes": ["sft.epochs=3"]}` keeps the others of the deployment. Settings that
name code or a command are always the deployment's (`settings_to_run`).

Prefect's `Runner` starts what is due, each flow run in a process of its own. That a night never
overlaps itself and never wedges, it need not know: a night holds the lock of its name, and one that
finds it taken ends as `Skipped` (flows/nightly.py); whatever is killed, the next slot continues its
night. One thing the runner lacks for that: it gives up after half a minute without its server, so
that server and runner are started again here.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter
from prefect.deployments.runner import DeploymentApplyError
from prefect.exceptions import CancelledRun, FailedRun
from prefect.logging import get_run_logger
from prefect.runner import Runner
from prefect.runtime import deployment, flow_run
from prefect.schedules import Cron
from prefect.states import Cancelled, Completed, Failed, State
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.types.entrypoint import EntrypointType
from rich.console import Console

from ttrain.config import NAMES_CODE, Auth, Settings
from ttrain.config.loading import load
from ttrain.core import redact
from ttrain.core.files import (
    PRIVATE_FILE,
    Taken,
    exclusive,
    private_directory,
    read_object,
    refuse,
    write_json,
)
from ttrain.core.machine import VERSION
from ttrain.core.signals import handling_signals
from ttrain.core.terminal import escaped, guard_streams, outlast_output, show_warnings
from ttrain.core.text import timed_lines
from ttrain.errors import Interrupted, TTrainError, UsageError
from ttrain.flows import deploy, flow_runs, prefect_api, prefect_run, servers
from ttrain.flows.best_effort import best_effort
from ttrain.flows.deploy import Schedule
from ttrain.flows.flow_runs import NIGHT_STATES, TAG, UNFINISHED, current_flow_run, home_tag
from ttrain.flows.prefect_run import MAX_CONCURRENT_STAGES
from ttrain.pipeline.artifact_commands import store_of
from ttrain.pipeline.names import base_of
from ttrain.store import server_records
from ttrain.store.layout import usable_home
from ttrain.store.runs import this_process

DEFAULTS = Settings()
LOOK_SECONDS = 5.0  # between two looks for what is due, and for schedules that changed
RUNS_AT_ONCE = 4  # one of them trains; a slot that comes meanwhile needs seconds to see that
OWNER = "serve"  # of a server that is started to serve
STOPPED = "stopped serving; schedules stay, `ttrain pipeline serve` goes on with them"

# The API gets these logs, the terminal does not: it has the run's own messages. Now, not in the
# flow: a signal that comes before it is logged as a crash.
for run_logger in ("prefect.flow_runs", "prefect.task_runs"):
    logging.getLogger(run_logger).propagate = False


def slot_name() -> str:
    """The name of a flow run until it is named after its night or run."""
    return f"slot {flow_run.scheduled_start_time.astimezone():%Y-%m-%d %H:%M}"


def run_full(settings: Settings = DEFAULTS, changes: tuple[str, ...] = ()) -> State[Any] | None:
    """Raw files to tokenizer, shards, base model, SFT model, LoRA adapter and evaluation.

    Stages whose inputs, settings and code did not change come from the store: a retry continues.

    Args:
        settings: of the whole pipeline; what is left out has its default
        changes: settings of this run alone as key=value, such as sft.epochs=3
    """
    return _final_state("full", _run_full, settings, changes)


def run_nightly(settings: Settings = DEFAULTS, changes: tuple[str, ...] = ()) -> State[Any] | None:
    """One night: new data, a challenger trained on it, and the decision which model is champion.

    Args:
        settings: of the whole night; what is left out has its default
        changes: settings of this night alone as key=value, such as pretrain.tokens=2000000
    """
    return _final_state("nightly", _run_night, settings, changes)


# Prefect retries no flow run: stages have retries of their own, and the next slot continues. Names
# differ from those of the functions, which the runner's processes load by their names.
OPTIONS: Any = {
    "flow_run_name": slot_name,
    "retries": 0,
    "persist_result": False,
    "task_runner": ThreadPoolTaskRunner(max_workers=MAX_CONCURRENT_STAGES),
}
full = flow(run_full, name="full", **OPTIONS)
nightly = flow(run_nightly, name="nightly", **OPTIONS)
FLOWS = {"full": full, "nightly": nightly}


def _run_full(home: Path, settings: Settings) -> State[Any] | None:
    """Run the pipeline; a slot that another one covers is skipped."""
    from ttrain.engine.plan import Plan
    from ttrain.flows.full import full as full_graph
    from ttrain.flows.run import RunOptions, run_pipeline
    from ttrain.pipeline.plan import plan

    schedule = f"full/{settings.name}"
    lock = deploy.path_of(home, schedule).with_suffix(".lock")
    is_slot = current_flow_run().auto_scheduled
    try:
        with exclusive(lock, refuse) if is_slot else contextlib.nullcontext():
            if is_slot and (covered := covered_by(home, schedule)):
                return Completed(name=NIGHT_STATES["skipped"], message=covered)
            store = store_of(home, settings)
            graph = full_graph(settings)
            planned = Plan("full", settings, store, graph, plan(graph, settings, store))
            run_pipeline(planned, flow_run_console(), RunOptions(in_flow=True))
    except Taken:
        return Completed(name=NIGHT_STATES["skipped"], message="the slot before is still running")
    return None


def covered_by(home: Path, schedule: str) -> str | None:
    """Why a slot needs no run: one that began after it has ended, as after an outage."""
    last = read_object(deploy.last_run_file(home, schedule))
    if flow_run.run_count > 1 or not last:  # a retry
        return None
    began = datetime.fromisoformat(last["began"])
    is_covered = flow_run.scheduled_start_time < began < datetime.now().astimezone()
    return f"{last['name']} began after this slot" if is_covered else None


def _run_night(home: Path, settings: Settings) -> State[Any]:
    from ttrain.flows.nightly import run_night

    slot, console = flow_run.scheduled_start_time, flow_run_console()
    store = store_of(home, settings)
    result = run_night(settings, store, console, engine="prefect", slot=slot, in_flow=True)
    if result.outcome in NIGHT_STATES:
        return Completed(name=NIGHT_STATES[result.outcome], message=result.reason)
    if result.outcome == "unfinished":
        return Cancelled(name=UNFINISHED, message=result.reason)
    return Failed(message=result.reason)


def _final_state(
    kind: str,
    run: Callable[[Path, Settings], State[Any] | None],
    settings: Settings,
    changes: Sequence[str],
) -> State[Any] | None:
    """The final state of the run, which is printed and kept for `schedule list`.

    ttrain's own errors become states, without a traceback. A retry starts the flow again, which
    takes what is finished from the store and continues the rest.
    """
    set_up_logging()
    try:
        home = usable_home()
        with best_effort():
            flow_runs.label_with_process(home)
        state = run(home, settings_to_run(home, kind, settings, changes))
    except Interrupted as error:
        state = Cancelled(message=str(error))
    except TTrainError as error:
        get_run_logger().error("%s", error)
        state = Failed(message=str(error))
    with best_effort():
        _show_end(home, f"{kind}/{settings.name}", state or Completed())
    return state


def _show_end(home: Path, schedule: str, state: State[Any]) -> None:
    """Print how the flow run ended, and keep it as the schedule's last one."""
    with flow_runs.sync_client() as client:
        run = client.read_flow_run(current_flow_run().id)  # its name is that of its night by now
    message = f", {state.message}" if state.message else ""
    print(timed_lines(escaped(f"{run.name}: {state.name}{message}")), flush=True)
    last = {
        "name": run.name,
        "outcome": state.name,
        "slot": flow_run.scheduled_start_time.isoformat(),
        "began": run.start_time.isoformat(),
        "message": state.message,
    }
    write_json(deploy.last_run_file(home, schedule), last, PRIVATE_FILE)


def settings_to_run(home: Path, kind: str, settings: Settings, changes: Sequence[str]) -> Settings:
    """The settings of the current flow run: its parameters with the secrets of their sources.

    Secrets are those of the schedule, else of the environment. What names code is always what the
    schedule says; a flow that a user's program calls directly runs with its arguments. Raises
    UsageError for a change of such a setting.
    """
    schedule = None
    if deployment.id:
        full_name = f"{kind}/{deployment.name}"
        schedule = deploy.read_all(home).get(full_name)
        for key in (change.partition("=")[0] for change in changes):
            if any(f"{key}.".startswith(f"{name}.") for name in NAMES_CODE):
                raise UsageError(
                    f"{key} is in the changes of this flow run, but a setting that names code or a "
                    f"command comes from {deploy.path_of(home, full_name)} only; leave it out, or "
                    f"set it there with `ttrain pipeline schedule {kind} ... {key}=...`"
                )
    tree = settings_with_changes(settings, changes).model_dump()
    if schedule:
        tree = redact.restored(tree, schedule.settings)
    if redact.has_hidden(tree):
        tree = redact.restored(tree, load().settings.model_dump())
    if deployment.id:
        deployed = (deploy.settings_of(home, schedule) if schedule else Settings()).model_dump()
        for section, _, name in (key.partition(".") for key in NAMES_CODE):
            own = deployed[section]
            tree[section] = {**tree[section], name: own[name]} if name else own
    return Settings.model_validate(tree)


def settings_with_changes(settings: Settings, changes: Sequence[str]) -> Settings:
    """The settings with changes, validated as a whole. Raises UsageError."""
    if not changes:
        return settings
    base = base_of({"run": "deployment", "settings": settings.model_dump()})
    return load(changes, environment={}, base=base).settings


def set_up_logging() -> None:
    """The terminal gets the run's own messages, the API all logs but tracebacks of our states."""
    guard_streams()
    outlast_output()
    show_warnings()
    logging.getLogger("prefect.flow_runs").addFilter(is_not_own_state)


def is_not_own_state(record: logging.LogRecord) -> bool:
    """Logging filter: whether the record is not of a state that ttrain itself returned."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, CancelledRun | FailedRun)


def flow_run_console() -> Console:
    """Make the console that prints to the terminal and to the flow run's log."""
    return Console(file=_RunLog(), force_terminal=False, width=160)


class _RunLog(io.StringIO):
    """Passes the run's messages to the terminal, and line by line to the flow run's log."""

    def __init__(self) -> None:
        super().__init__()
        self._logger = get_run_logger()

    def write(self, text: str) -> int:
        for line in filter(None, map(str.rstrip, text.split("\n"))):
            print(timed_lines(line), flush=True)
            self._logger.info("%s", line)
        return len(text)


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
        zone = deploy.local_timezone()
        self._say(f"serving the schedules of {self._home}; times are of {zone}")
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
        ours = DeploymentFilter.model_validate({"tags": {"all_": [TAG]}})
        listing = await client.read_deployments(deployment_filter=ours)
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
        own_flow = FLOWS[schedule.kind]
        if not schedule.pool:  # runs this flow itself, whatever entry point the server names
            number: UUID = await runner.aadd_flow(own_flow, **options)
            return number
        options |= {"work_pool_name": schedule.pool, "job_variables": {"env": self._environment}}
        pooled = await own_flow.ato_deployment(**options)
        pooled.entrypoint = f"{__name__}.{schedule.kind}"
        try:
            number = await pooled.aapply()
        except DeploymentApplyError as error:
            raise UsageError(f"{error}; make the pool, then schedule again") from None
        return number
