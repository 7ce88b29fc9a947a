"""`ttrain pipeline serve`: runs what is due, each flow run in a process of its own, until it is stopped.

Prefect's scheduler says what is due, and Prefect's own parts start, watch and cancel the processes; this is the loop that
asks. Prefect's `Runner`, made of the same parts, is not used: it gives up when its server is away for half a minute, passes
Ctrl-C on to the runs twice, starts a process for each slot that passed while nothing served, knows no deployment made
after it began, and kills a run that saves for over 30 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from ttrain.config import Auth
from ttrain.core.files import PRIVATE_FILE, private_directory, write_json
from ttrain.core.signals import heeded_signals, ignore_hangup
from ttrain.errors import Interrupted, TTrainError, UsageError
from ttrain.flows import flow_runs, prefect_api, prefect_run, schedule_files, schedules, servers, slots
from ttrain.store import server_records
from ttrain.tasks.best_effort import best_effort

POLL_SECONDS = 5.0
LOOK_SECONDS = 0.2  # whether a process that was asked to stop has ended
GRACE_SECONDS = 600.0  # for a checkpoint to be written, before a run that is cancelled or stopped is killed
RUNS_AT_ONCE = 4  # one of them trains; a slot that comes meanwhile needs seconds to see that
PREFECT_PORT = 4200
STOPPED = "stopped serving; schedules stay, `ttrain pipeline serve` goes on with them"
LOCK_SECONDS = 2.0  # `served_by` takes the lock for a moment, too

OWNER = "serve"  # of a server that is started to serve
ENTRY_POINTS = {f"ttrain.flows.deployments.{kind}": kind for kind in schedule_files.KINDS}

log = logging.getLogger("ttrain")


def serve(home: Path, say: Callable[[str], None], auth: Auth = "token") -> None:
    """Run what is due until SIGTERM, SIGHUP or SIGINT; running ones then save their state. Raises Interrupted after SIGINT.

    Raises UsageError where this home is served already, or the server that PREFECT_API_URL names does not answer.
    """
    with serve_lock(home), _told_by(say):
        is_named = bool(os.environ.get("PREFECT_API_URL"))
        try:
            with _ending_at_once() as signums:
                url = _server(home, auth)
                signums.append(asyncio.run(ScheduleServer(home, url, say, auth, owns_server=not is_named).run()))
        finally:
            _stop_server(home)


@contextlib.contextmanager
def _told_by(say: Callable[[str], None]) -> Iterator[None]:
    """Say that a signal has ended the block, with the time as all lines have it."""
    try:
        yield
    except Interrupted as stopped:
        say(str(stopped))
        stopped.shown = True
        raise
    say(STOPPED)


@contextlib.contextmanager
def _ending_at_once() -> Iterator[list[int]]:
    """Collect signals; until the loop handles them, one ends the block. Raises Interrupted after SIGINT.

    Any exception of the block after a signal counts as its end: pydantic makes a PydanticSerializationError of a SystemExit
    that comes while it calls Python.
    """
    signums: list[int] = []

    def end(number: int, frame: object) -> None:
        signums.append(number)
        ignore_hangup()
        sys.exit(0)

    for number in heeded_signals():
        signal.signal(number, end)
    try:
        yield signums
    except BaseException:
        if not signums:
            raise
    if signal.SIGINT in signums:
        raise Interrupted(STOPPED, signal.SIGINT)


@contextlib.contextmanager
def serve_lock(home: Path) -> Iterator[None]:
    """The lock of the one process that serves a home; the system releases it when the process dies."""
    from filelock import FileLock, Timeout

    folder = private_directory(schedule_files.folder_of(home))
    lock = FileLock(folder / "serve.lock", timeout=LOCK_SECONDS, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        raise UsageError(
            f"{home.resolve()} is served already, by process {schedule_files.served_by(home)}; stop that one first, or "
            f"leave it: it also serves schedules that are added later"
        ) from None
    try:
        write_json(folder / schedule_files.SERVING, {"pid": os.getpid()}, PRIVATE_FILE)
        yield
    finally:
        lock.release()


def _server(home: Path, auth: Auth) -> str:
    """The API address of the server that is named or runs, else of one that is started."""
    prefect_api.check_prefect_server(home)
    if not os.environ.get("PREFECT_API_URL") and not server_records.live_server(home, "prefect"):
        servers.start(home, {"prefect": PREFECT_PORT}, auth, OWNER)
    prefect_run.begin(home)()
    flow_runs.mark_crashed_runs(home)
    with best_effort():
        flow_runs.create_automation()
    return os.environ["PREFECT_API_URL"]


def _stop_server(home: Path) -> None:
    """End the server that was started to serve, by this process or one that was killed; that of `up` stays."""
    server = server_records.read(home, "prefect")
    if server and server.owner == OWNER and not server_records.live_server(home, "mlflow"):  # else `up` has taken it over
        with servers.start_lock(home):
            servers.stop(home, "prefect")


class ScheduleServer:
    """The loop that serves a home: starts due flow runs, watches and stops them."""

    def __init__(self, home: Path, url: str, say: Callable[[str], None], auth: Auth = "token", *, owns_server: bool) -> None:
        self._home, self._url, self._say, self._auth = home.resolve(), url, say, auth
        self._owns_server = owns_server
        self._stop = asyncio.Event()
        self._signum = 0
        self._running: dict[Any, str] = {}  # names by id of flow runs in progress
        self._stopping_ids: set[Any] = set()  # ids of flow runs that have been asked to stop
        self._is_away = False
        self._error: TTrainError | None = None
        self._known: set[str] = set()
        self._refused: set[str] = set()  # schedules whose deployment the server refuses

    async def run(self) -> int:
        """Serve until a signal; returns its number when all runs have ended. Raises TTrainError where the server is lost."""
        import anyio
        from prefect.runner._flow_run_executor import FlowRunExecutorContext

        for number in heeded_signals():
            asyncio.get_running_loop().add_signal_handler(number, self._signalled, number)
        self._looking = anyio.CancelScope()  # so that a stop does not wait for a server that is away
        zone = schedule_files.local_timezone()
        self._say(f"serving the schedules of {self._home}; times are of {zone}")  # only now: its reader may stop it at once
        hint = ""  # how a browser gets access; not the token, since this message goes to the log of a service
        if server_records.token_for(self._home, "prefect", self._url) is not None:
            hint = f"/?token=...  (the text of {server_records.token_file(self._home)}; a browser keeps it)"
        self._say(f"Prefect  {self._url.removesuffix('/api')}{hint}\nstop with Ctrl-C or SIGTERM")
        async with FlowRunExecutorContext() as self._context:
            self._context.process_manager.kill = self._kill_patiently
            proposer = self._context._state_proposer
            proposer.propose_cancelled = partial(self._propose_cancelled, proposer.propose_cancelled)
            proposer.propose_crashed = partial(self._propose_crashed, proposer.propose_crashed)
            logging.getLogger("prefect.runner.flow_run_executor").setLevel(logging.CRITICAL)  # the end is told here, once
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._keep_server)
                with self._looking:
                    while not self._stop.is_set():
                        await self.try_start_due_runs()
                        await self._wait()
                while self._running:  # also those whose process is just being started
                    for flow_run_id in self._context.process_manager.flow_run_ids() - self._stopping_ids:
                        self._tasks.start_soon(self._kill_patiently, flow_run_id)
                    await asyncio.sleep(LOOK_SECONDS)
        if self._error:
            raise self._error
        return self._signum

    async def try_start_due_runs(self) -> None:
        """Start what is due; a server that is away is waited for, and no other error ends the runs in progress."""
        import httpx
        from prefect.exceptions import PrefectHTTPStatusError

        try:
            await self.start_due_runs()
        except (httpx.TransportError, PrefectHTTPStatusError, TTrainError) as error:
            if not self._is_away:
                self._say(f"the Prefect server does not answer ({type(error).__name__}); waiting for it")
            self._is_away = True
        except Exception as error:  # such as a flow run that somebody deletes meanwhile
            if not self._is_away:
                log.warning("the look for due runs failed: %s; trying again", error, exc_info=True)
            self._is_away = True
        else:
            if self._is_away:
                self._say("the Prefect server answers again")
            self._is_away = False

    async def _keep_server(self) -> None:
        """Start our own server again where it died: Prefect's clients, also those of the runs, ask for a minute and more."""
        port = int(self._url.rpartition(":")[2].partition("/")[0])
        while not self._stop.is_set():
            if self._owns_server and not await asyncio.to_thread(server_records.live_server, self._home, "prefect"):
                self._say("the Prefect server is gone; starting it again")
                try:
                    await asyncio.to_thread(servers.start, self._home, {"prefect": port}, self._auth, OWNER)
                except TTrainError as error:
                    self._say(f"the Prefect server does not start: {error}")
                server = server_records.live_server(self._home, "prefect")
                if server and server.port != port:
                    self._error = TTrainError(f"the Prefect server had port {port}, which another program took; serve again")
                    self._end()
            await self._wait()

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), POLL_SECONDS)

    async def start_due_runs(self) -> None:
        """Start the flow runs that are due, after making missing deployments and cancelling what was asked for."""
        client = self._context.client
        home_deployments = await client.read_deployments(deployment_filter=schedules.home_filter(self._home))
        # What an API says of an entry point is not run: it may name any code
        known = {
            f"{ENTRY_POINTS[deployment.entrypoint]}/{deployment.name}": deployment
            for deployment in home_deployments
            if deployment.entrypoint in ENTRY_POINTS
        }
        paused = {name: bool(deployment.paused) for name, deployment in known.items()}
        await asyncio.to_thread(schedule_files.record_paused, self._home, paused)
        served = {name: d for name, d in known.items() if d.work_pool_name is None}  # those of pools have workers
        await self.make_missing_deployments(set(served))
        deployments = {deployment.id: deployment for deployment in served.values()}
        await self._cancel_asked()
        if not deployments:
            return
        await self._name_slots(list(deployments))
        from prefect.states import Completed
        from prefect.types._datetime import now

        due = await client.get_scheduled_flow_runs_for_deployments(list(deployments), scheduled_before=now("UTC"))
        due = [run for run in due if run.id not in self._running]
        due = [run for run in due if not await self._is_postponed(run, deployments[run.deployment_id])]
        for run, newer in missed_slots(due):
            message = f"nothing served at this slot; {slot_name(newer.next_scheduled_start_time)} covers it"
            await client.set_flow_run_state(run.id, Completed(name="Skipped", message=message), force=True)
            self._say(f"{run.name}: Skipped, {message}")
            due.remove(run)
        for run in due[: max(0, RUNS_AT_ONCE - len(self._running))]:
            self._running[run.id] = run.name
            deployment = deployments[run.deployment_id]
            self._tasks.start_soon(self._run, run, deployment.name, deployment.entrypoint)

    async def _is_postponed(self, run: Any, deployment: Any) -> bool:
        """Schedule a slot that is due on the date before its own for its date; returns whether it was one."""
        from prefect.states import Scheduled

        crons = [entry.schedule for entry in deployment.schedules if hasattr(entry.schedule, "cron")]
        if not run.auto_scheduled or run.run_count or len(crons) != len(deployment.schedules):
            return False
        slot = run.next_scheduled_start_time
        due = [await slots.on_its_date(slot, cron.cron, cron.timezone or "UTC") for cron in crons]
        moved = min(due, default=slot)
        if moved <= datetime.now(UTC):
            return False
        await self._context.client.set_flow_run_state(run.id, Scheduled(scheduled_time=moved), force=True)
        return True

    async def make_missing_deployments(self, existing: set[str]) -> None:
        """Make the deployments that the server has lost, or never had: its database is another one, or was removed."""
        names = [name for name, schedule in schedule_files.read_all(self._home).items() if not schedule.pool]
        if set(names) != self._known:
            self._known = set(names)
            nothing = "nothing is scheduled yet: ttrain pipeline schedule nightly"
            self._say(f"scheduled: {', '.join(names)}" if names else nothing)
        missing = self._known - existing
        self._refused &= missing
        for name in missing:
            try:
                await asyncio.to_thread(schedules.make_missing, self._home, name)
            except schedules.RefusedError as error:  # other schedules are served
                if name not in self._refused:
                    self._say(str(error))
                self._refused.add(name)

    async def _cancel_asked(self) -> None:
        """Cancel what the UI wants cancelled, also where Prefect's own observer lost the server for good."""
        running = [flow_run_id for flow_run_id in self._running if flow_run_id not in self._stopping_ids]
        if not running:
            return
        only = flow_runs.flow_runs_where(id={"any_": running})
        for run in await self._context.client.read_flow_runs(flow_run_filter=only):
            if run.id in self._running:
                self._running[run.id] = run.name  # of its night, once that has begun
            if run.state and run.state.is_cancelling():
                self._tasks.start_soon(self._context._cancellation_manager.cancel, run)

    async def _run(self, run: Any, deployment: str, entry_point: str) -> None:
        """Run one flow run in its process, to its end; an error of it ends no other run."""
        from prefect.runner._starter_engine import EngineCommandStarter

        from ttrain.flows import deployments as deployed

        async def flow_of(run: Any) -> Any:
            return getattr(deployed, ENTRY_POINTS[entry_point])

        starter = EngineCommandStarter(
            cwd=schedule_files.folder_of(self._home),  # Python looks for modules where it is, and Prefect for settings
            env={"TTRAIN_HOME": str(self._home)},
            deployment_name=deployment,
            entrypoint=entry_point,
            heartbeat_seconds=flow_runs.HEARTBEAT_SECONDS,
            control_channel=self._context.control_channel,
            isolate_process_group=True,  # Ctrl-C goes to this process only, which stops the others once
        )
        try:
            if not self._stop.is_set() and await self._context._state_proposer.propose_pending(run):
                self._say(f"{run.name} of {ENTRY_POINTS[entry_point]}/{deployment}: started")
                await self._context.create_executor(run, starter, resolve_flow=flow_of).submit()
                await self._say_how_it_ended(run)
        except Exception as error:
            log.warning("%s: %s", run.name, error, exc_info=True)
        finally:
            self._running.pop(run.id, None)
            self._stopping_ids.discard(run.id)

    async def _say_how_it_ended(self, run: Any) -> None:
        import httpx

        with contextlib.suppress(httpx.TransportError):
            ended = await self._context.client.read_flow_run(run.id)  # which has the name of its night by now
            if state := ended.state:
                is_shown = ended.labels.get(flow_runs.LABEL_SHOWN) and state.is_failed()
                self._say(f"{ended.name}: {state.name}" + (f", {state.message}" if state.message and not is_shown else ""))

    async def _name_slots(self, deployments: list[Any]) -> None:
        """Name the slots to come by their time, where Prefect draws a name from a list; a night gets its own name later."""
        client = self._context.client
        slots = await client.read_flow_runs(
            flow_run_filter=flow_runs.flow_runs_where(
                deployment_id={"any_": deployments}, state={"type": {"any_": ["SCHEDULED"]}}
            ),
        )
        for run in slots:
            if run.auto_scheduled and run.run_count == 0 and run.name != (name := slot_name(run.next_scheduled_start_time)):
                await client.set_flow_run_name(run.id, name)

    async def _propose_cancelled(
        self, propose: Callable[..., Awaitable[bool]], run: Any, updates: dict[str, Any] | None = None
    ) -> bool:
        """Propose Cancelled, unless the run itself has set it, with the reason, and a retry is already requested."""
        state = (await self._context.client.read_flow_run(run.id)).state
        return True if state and not state.is_cancelling() else await propose(run, updates)

    async def _propose_crashed(self, propose: Callable[..., Awaitable[Any]], run: Any, message: str) -> Any:
        """Propose Crashed, or Cancelled where the process was asked to stop before it could handle that itself."""
        from prefect.states import Cancelled

        if run.id not in self._stopping_ids:
            return await propose(run, message=message)
        state = (await self._context.client.read_flow_run(run.id)).state
        if state and (not state.is_final() or state.is_crashed()):
            stopped = Cancelled(message="stopped before it began; the next slot runs")
            await self._context.client.set_flow_run_state(run.id, stopped, force=True)
        return None

    async def _kill_patiently(self, flow_run_id: Any, grace_seconds: float = 0, *, force: bool = False) -> None:
        """Send SIGTERM once, however often a stop is requested: a second one ends the run before its state is saved."""
        handle = self._context.process_manager.get(flow_run_id)
        if handle is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if not force and flow_run_id not in self._stopping_ids:
                self._stopping_ids.add(flow_run_id)
                handle.graceful_kill()
            for _ in range(0 if force else round(GRACE_SECONDS / LOOK_SECONDS)):
                if not handle.is_alive():
                    return
                await asyncio.sleep(LOOK_SECONDS)
            handle.hard_kill()

    def _signalled(self, signum: int) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        ignore_hangup()
        if self._signum and self._running:
            for flow_run_id in self._context.process_manager.flow_run_ids():
                self._tasks.start_soon(partial(self._kill_patiently, flow_run_id, force=True))
        elif self._running:
            self._say(f"stopping: {', '.join(self._running.values())} saves its state (again to end at once)")
        self._signum = signum
        self._end()

    def _end(self) -> None:
        self._stop.set()
        self._looking.cancel()


def slot_name(when: datetime) -> str:
    """The name of a slot, by this machine's clock, until it has the name of its night."""
    return f"slot {when.astimezone():%Y-%m-%d %H:%M}"


def missed_slots(due: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Missed slots of crons, each with the newest due one of its deployment, which covers it.

    Runs that somebody started, and retries, are not covered.
    """
    slots = [run for run in due if run.auto_scheduled and run.run_count == 0 and run.state_name in ("Scheduled", "Late")]
    newest: dict[Any, Any] = {}
    for run in sorted(slots, key=lambda run: run.next_scheduled_start_time):
        newest[run.deployment_id] = run
    return [(run, newest[run.deployment_id]) for run in slots if run is not newest[run.deployment_id]]
