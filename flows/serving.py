"""`ttrain pipeline serve`: runs what is due, each flow run in a process of its own, until it is stopped.

Prefect's scheduler says what is due, and Prefect's own parts start, watch and cancel the processes; here is the loop that
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
from functools import partial
from pathlib import Path
from typing import Any, Final

from flows import flow_runs, orchestrate, schedule_files, schedules, server_processes, servers
from tasks.best_effort import courtesy
from ttrain.config import Auth
from ttrain.core.files import PRIVATE_FILE, private_directory, read_object, write_json
from ttrain.core.parent_process import heeded_signals, ignore_hangup
from ttrain.errors import Interrupted, TTrainError, UsageError
from ttrain.store import server_records

POLL_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 0.2  # whether a process that was asked to stop has ended
GRACE_SECONDS: Final = 600.0  # for a checkpoint to be written, before a run that is cancelled or stopped is killed
RUNS_AT_ONCE: Final = 4  # one that trains; a slot that comes meanwhile takes seconds to find that out
PREFECT_PORT: Final = 4200
LOCK_SECONDS: Final = 2.0  # who only asks who serves (`served_by`) has the lock for a moment, too

SERVING: Final = "serving.txt"  # under the folder of schedules: who serves, and the token of the server started for that
STARTING: Final = "starting"
ENTRY_POINTS: Final = {f"flows.deployments.{kind}": kind for kind in schedule_files.KINDS}

log = logging.getLogger("ttrain")


def serve(home: Path, say: Callable[[str], None], auth: Auth = "token") -> None:
    """Run what is due until SIGTERM, SIGHUP or SIGINT; running ones then save their state. Raises Interrupted after SIGINT.

    Raises UsageError where this home is served already, or the server that PREFECT_API_URL names does not answer.
    """
    with _alone(home):
        is_named = bool(os.environ.get("PREFECT_API_URL"))
        try:
            with _ending_at_once() as came:
                url = _server(home, auth)
                came.append(asyncio.run(_Serving(home, url, say, auth, owns_server=not is_named).run()))
        finally:
            _stop_server(home)


@contextlib.contextmanager
def _ending_at_once() -> Iterator[list[int]]:
    """The signals that came; until the loop handles them, one ends the block. Raises Interrupted after SIGINT.

    Whatever the block raises after one is taken for its end: pydantic makes a PydanticSerializationError of a SystemExit
    that comes while it calls Python.
    """
    came: list[int] = []

    def end(number: int, frame: object) -> None:
        came.append(number)
        ignore_hangup()
        sys.exit(0)

    for number in heeded_signals():
        signal.signal(number, end)
    try:
        yield came
    except BaseException:
        if not came:
            raise
    if signal.SIGINT in came:
        raise Interrupted("stopped serving; schedules stay, `ttrain pipeline serve` goes on with them", signal.SIGINT)


def served_by(home: Path) -> int | None:
    """The process that serves this home, if there is one."""
    from filelock import FileLock, Timeout

    folder = schedule_files.folder_of(home)
    if not folder.exists():
        return None
    with contextlib.suppress(Timeout), FileLock(folder / "serve.lock", timeout=0, thread_local=False):
        return None
    pid = read_object(folder / SERVING).get("pid")
    return int(pid) if pid else None


@contextlib.contextmanager
def _alone(home: Path) -> Iterator[None]:
    """One process serves a home; the system releases the lock when it dies."""
    from filelock import FileLock, Timeout

    folder = private_directory(schedule_files.folder_of(home))
    lock = FileLock(folder / "serve.lock", timeout=LOCK_SECONDS, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        raise UsageError(
            f"{home.resolve()} is served already, by process {served_by(home)}; stop that one first, or leave it: "
            f"it sees what is scheduled later too"
        ) from None
    try:
        write_json(path := folder / SERVING, {**read_object(path), "pid": os.getpid()}, PRIVATE_FILE)
        yield
    finally:
        lock.release()


def _server(home: Path, auth: Auth) -> str:
    """The API of the server that is named or runs, else of one that is started."""
    servers.check_named(home)
    if not os.environ.get("PREFECT_API_URL") and not server_processes.living(home, "prefect"):
        _start_server(home, PREFECT_PORT, auth)
    orchestrate.begin(home)()
    flow_runs.bury_the_dead(home)
    with courtesy():
        flow_runs.create_automation()
    return os.environ["PREFECT_API_URL"]


def _start_server(home: Path, port: int, auth: Auth) -> None:
    """Start one, and note that it is there to serve: where this process is killed, also meanwhile, the next one ends it."""
    note = schedule_files.folder_of(home) / SERVING
    write_json(note, {"pid": os.getpid(), "server": STARTING}, PRIVATE_FILE)
    servers.start(home, {"prefect": port}, auth)
    if server := server_processes.living(home, "prefect"):
        write_json(note, {"pid": os.getpid(), "server": server.token}, PRIVATE_FILE)


def _stop_server(home: Path) -> None:
    """End the server that was started to serve, by this process or one before; that of `up` stays."""
    noted = read_object(schedule_files.folder_of(home) / SERVING).get("server")
    server = server_processes.read(home, "prefect")
    if (
        server and noted in (server.token, STARTING) and not server_processes.living(home, "mlflow")
    ):  # else `up` has been here
        with server_processes.start_lock(home):
            server_processes.stop(home, "prefect")


class _Serving:
    """What is served while it is served."""

    def __init__(self, home: Path, url: str, say: Callable[[str], None], auth: Auth = "token", *, owns_server: bool) -> None:
        self._home, self._url, self._say, self._auth = home.resolve(), url, say, auth
        self._owns_server = owns_server
        self._stop = asyncio.Event()
        self._signum = 0
        self._running: dict[Any, str] = {}  # names by id of flow runs in progress
        self._asked: set[Any] = set()  # ids of those that have been asked to stop
        self._is_away = False
        self._error: TTrainError | None = None
        self._known: frozenset[str] = frozenset()
        self._refused: set[str] = set()  # schedules that the server takes no deployment of

    async def run(self) -> int:
        """Until a signal comes; returns its number when all runs have ended. Raises TTrainError where the server is lost."""
        import anyio
        from prefect.runner._flow_run_executor import FlowRunExecutorContext

        for number in heeded_signals():
            asyncio.get_running_loop().add_signal_handler(number, self._signalled, number)
        self._looking = anyio.CancelScope()  # so that a stop waits for no answer of a server that is away
        self._say(f"serving the schedules of {self._home}")  # only now: who reads that it serves may stop it at once
        self._say(f"Prefect  {self._url.removesuffix('/api')}{self._hint()}\nstop with Ctrl-C or SIGTERM")
        async with FlowRunExecutorContext() as self._context:
            self._context.process_manager.kill = self._kill_patiently
            proposer = self._context._state_proposer
            proposer.propose_cancelled = partial(self._propose_cancelled, proposer.propose_cancelled)
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._keep_server)
                with self._looking:
                    while not self._stop.is_set():
                        await self._look_safely()
                        await self._wait()
                while self._running:  # also those whose process is just being started
                    for flow_run_id in self._context.process_manager.flow_run_ids() - self._asked:
                        self._tasks.start_soon(self._kill_patiently, flow_run_id)
                    await asyncio.sleep(LOOK_SECONDS)
        if self._error:
            raise self._error
        return self._signum

    def _hint(self) -> str:
        """How a browser is let in; not the token, for what is said here goes to the log of a service."""
        if server_records.token_for(self._home, "prefect", self._url) is None:
            return ""
        return f"/?token=...  (the text of {server_records.token_file(self._home)}; a browser keeps it)"

    async def _look_safely(self) -> None:
        """Look what is due; a server that is away is waited for, and no other trouble ends the runs in progress."""
        import httpx
        from prefect.exceptions import PrefectHTTPStatusError

        try:
            await self._look()
        except (httpx.TransportError, PrefectHTTPStatusError, TTrainError) as error:
            if not self._is_away:
                self._say(f"the Prefect server does not answer ({type(error).__name__}); waiting for it")
            self._is_away = True
        except Exception as error:  # such as a flow run that somebody deletes meanwhile
            if not self._is_away:
                log.warning("looking what is due: %s; trying again", error, exc_info=True)
            self._is_away = True
        else:
            if self._is_away:
                self._say("the Prefect server answers again")
            self._is_away = False

    async def _keep_server(self) -> None:
        """Start our own server again where it died: Prefect's clients, also those of the runs, ask for a minute and more."""
        port = int(self._url.rpartition(":")[2].partition("/")[0])
        while not self._stop.is_set():
            if self._owns_server and not await asyncio.to_thread(server_processes.living, self._home, "prefect"):
                self._say("the Prefect server is gone; starting it again")
                try:
                    await asyncio.to_thread(_start_server, self._home, port, self._auth)
                except TTrainError as error:
                    self._say(f"the Prefect server does not start: {error}")
                server = server_processes.living(self._home, "prefect")
                if server and server.port != port:
                    self._error = TTrainError(f"the Prefect server had port {port}, which another program took; serve again")
                    self._end()
            await self._wait()

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), POLL_SECONDS)

    async def _look(self) -> None:
        client = self._context.client
        found = await client.read_deployments(deployment_filter=schedules.ours(self._home))
        # Those of pools have workers. What an API says of an entry point is not run: it may name any code
        deployments = {one.id: one for one in found if one.work_pool_name is None and one.entrypoint in ENTRY_POINTS}
        await self._make_missing({f"{ENTRY_POINTS[one.entrypoint]}/{one.name}" for one in deployments.values()})
        await self._cancel_asked()
        if not deployments:
            return
        from prefect.types._datetime import now

        due = await client.get_scheduled_flow_runs_for_deployments(list(deployments), scheduled_before=now("UTC"))
        due = [run for run in due if run.id not in self._running]
        for run, newer in covered(due):
            await self._skip(run, newer)
            due.remove(run)
        for run in due[: max(0, RUNS_AT_ONCE - len(self._running))]:
            self._running[run.id] = run.name
            deployment = deployments[run.deployment_id]
            self._tasks.start_soon(self._run, run, deployment.name, deployment.entrypoint)

    async def _make_missing(self, there: set[str]) -> None:
        """Make the deployments that the server has lost, or never had: its database is another one, or was removed."""
        wanted = {name: one for name, one in schedule_files.read_all(self._home).items() if not one.pool}
        if frozenset(wanted) != self._known:
            self._known = frozenset(wanted)
            self._say(
                f"scheduled: {', '.join(wanted)}" if wanted else "nothing is scheduled yet: ttrain pipeline schedule nightly"
            )
        self._refused &= wanted.keys() - there
        for name in wanted.keys() - there:
            try:
                await asyncio.to_thread(schedules.make_missing, self._home, name)
            except schedules.RefusedError as error:  # the others are served
                if name not in self._refused:
                    self._say(str(error))
                self._refused.add(name)

    async def _cancel_asked(self) -> None:
        """Cancel what the UI wants cancelled, also where Prefect's own observer lost the server for good."""
        from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

        running = [flow_run_id for flow_run_id in self._running if flow_run_id not in self._asked]
        if not running:
            return
        only = FlowRunFilter(id=FlowRunFilterId(any_=running))
        for run in await self._context.client.read_flow_runs(flow_run_filter=only):
            if run.state and run.state.is_cancelling():
                self._tasks.start_soon(self._context._cancellation_manager.cancel, run)

    async def _run(self, run: Any, deployment: str, entry_point: str) -> None:
        """One flow run, from its process's start to its end; what goes wrong with it ends nothing else."""
        from prefect.runner._starter_engine import EngineCommandStarter

        starter = EngineCommandStarter(
            cwd=schedule_files.folder_of(self._home),  # Python looks for modules where it is, and Prefect for settings
            env={"TTRAIN_HOME": str(self._home)},
            deployment_name=deployment,
            entrypoint=entry_point,
            heartbeat_seconds=flow_runs.HEARTBEAT_SECONDS,
            control_channel=self._context.control_channel,
            isolate_process_group=True,  # Ctrl-C is for this process, which asks the others once
        )
        try:
            if not self._stop.is_set() and await self._context._state_proposer.propose_pending(run):
                self._say(f"{run.name}: started, of {deployment}")
                executor = self._context.create_executor(run, starter, resolve_flow=_flow_of(entry_point))
                await executor.submit()
                await self._say_how_it_ended(run)
        except Exception as error:
            log.warning("%s: %s", run.name, error, exc_info=True)
        finally:
            self._running.pop(run.id, None)
            self._asked.discard(run.id)

    async def _say_how_it_ended(self, run: Any) -> None:
        import httpx

        with contextlib.suppress(httpx.TransportError):
            state = (await self._context.client.read_flow_run(run.id)).state
            if state:
                self._say(f"{run.name}: {state.name}" + (f", {state.message}" if state.message else ""))

    async def _skip(self, run: Any, newer: Any) -> None:
        from prefect.states import Completed

        message = f"nothing served at this slot; the one of {newer.next_scheduled_start_time:%Y-%m-%d %H:%M %Z} covers it"
        await self._context.client.set_flow_run_state(run.id, Completed(name="Skipped", message=message), force=True)
        self._say(f"{run.name}: Skipped, {message}")

    async def _propose_cancelled(
        self, propose: Callable[..., Awaitable[bool]], run: Any, updates: dict[str, Any] | None = None
    ) -> bool:
        """Cancelled, unless the run itself has said so, with the reason, and somebody wants it tried again already."""
        state = (await self._context.client.read_flow_run(run.id)).state
        return True if state and not state.is_cancelling() else await propose(run, updates)

    async def _kill_patiently(self, flow_run_id: Any, grace_seconds: float = 0, *, force: bool = False) -> None:
        """SIGTERM once, however many want the run to stop: a second one ends it before its state is saved."""
        handle = self._context.process_manager.get(flow_run_id)
        if handle is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if not force and flow_run_id not in self._asked:
                self._asked.add(flow_run_id)
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


def _flow_of(entry_point: str) -> Callable[[Any], Awaitable[Any]]:
    """For Prefect, which asks which flow a run is of."""
    from flows import deployments as deployed

    async def flow_of(run: Any) -> Any:
        return getattr(deployed, ENTRY_POINTS[entry_point])

    return flow_of


def covered(due: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Slots of a cron that passed unserved, each with the newest due one of its deployment, which stands for all of them.

    What somebody started, and what is tried again, stands for itself.
    """
    slots = [run for run in due if run.auto_scheduled and run.run_count == 0 and run.state_name in ("Scheduled", "Late")]
    newest: dict[Any, Any] = {}
    for run in sorted(slots, key=lambda run: run.next_scheduled_start_time):
        newest[run.deployment_id] = run
    return [(run, newest[run.deployment_id]) for run in slots if run is not newest[run.deployment_id]]
