"""Run a plan under Prefect: a flow run per pipeline run, a task run per stage, independent stages in parallel."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ttrain.config import Auth
from ttrain.engine import planner as plan_table
from ttrain.engine.execution import PipelineRun
from ttrain.errors import Interrupted, NothingNew, TTrainError, UsageError
from ttrain.flows import flow_runs, prefect_api, servers
from ttrain.flows.flow_runs import (
    TAG,
    best_effort,
    current_flow_run,
    mark_crashed_runs,
    sync_client,
    watching_for_cancellation,
)
from ttrain.flows.prefect_api import AUTH_STRING, token_environment
from ttrain.flows.servers import PORT, prefect_app, token_of, uvicorn_command
from ttrain.reports import summary
from ttrain.store import server_records
from ttrain.store.runs import NOTHING_NEW
from ttrain.store.server_records import HOST
from ttrain.tracking import run_summary

log = logging.getLogger("ttrain")

MAX_CONCURRENT_STAGES = 4  # the most stages of a graph that are independent, and one to spare


def begin(home: Path, auth: Auth = "token") -> Callable[[], None]:
    """Choose or start the server, before Prefect is imported; returns a function that waits for it."""
    if importlib.util.find_spec("prefect") is None:
        raise UsageError("Prefect is not installed; try: pip install prefect, or run without it: --engine none")
    prefect_api.check_prefect_server(home)
    os.environ.update(prefect_api.prefect_environment(home))
    # The API gets these logs, the terminal does not: the user sees ttrain's own progress.
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).propagate = False
    wait_for_server = start_temporary_server(home, auth)
    reread_environment()
    return wait_for_server


def reread_environment() -> None:
    """Let Prefect, where a program has imported it already, see the variables as they are now."""
    if "prefect" in sys.modules:
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()


def run(execution: PipelineRun, wait_for_server: Callable[[], None], *, in_flow: bool = False, night: str = "") -> None:
    """Run the plan as a flow, or `in_flow` as a part of the flow run of a deployment that calls this. The flow run has the
    name of the `night`, else those of the settings and the run, and the user's tags.

    Raises what the first failed stage raised, or Interrupted.
    """
    import httpx
    from prefect import flow, tags
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
    from prefect.states import Cancelled, Completed, Failed, State
    from prefect.task_runners import ThreadPoolTaskRunner

    if execution.settings.runtime.sharding == "dask":
        from ttrain.flows.stage_task import make_on_dask

        runtime = execution.settings.runtime
        execution.make_parts_elsewhere = lambda stage, work: make_on_dask(stage, work, runtime, lambda: execution.signum)
    wait_for_server()
    mark_crashed_runs(execution.store.root)
    if not is_own():
        with best_effort():
            flow_runs.create_automation()
    if in_flow:
        with execution.catching_signals():
            rename(night or execution.record.run)
            _run_stages(execution)
        _raise_failure(execution, "a retry or the next run continues")
        return

    have_ended: list[bool] = []  # true once the stages have

    @flow(  # type: ignore[untyped-decorator]  # mypy does not follow Prefect
        name=execution.plan.pipeline,
        flow_run_name=f"{execution.settings.name}: {execution.record.run}",
        persist_result=False,
        validate_parameters=False,
        task_runner=ThreadPoolTaskRunner(max_workers=MAX_CONCURRENT_STAGES),
    )
    def pipeline(settings: dict[str, Any]) -> State[Any] | None:
        with execution.catching_signals():  # inside: Prefect sets a handler of its own around the flow
            with best_effort():
                flow_runs.label_with_process(execution.store.root)
            if night:
                rename(night)
            _run_stages(execution)
        have_ended.append(True)
        if execution.signum:
            did = "were ended where they stood" if execution.at_once else "saved their state"
            return Cancelled(message=f"{execution.stop_reason}; the stages {did}")
        for error in _worst_first(execution):
            if isinstance(error, NothingNew):
                return Completed(name=flow_runs.NIGHT_STATES[NOTHING_NEW], message=str(error))
            return Failed(message=str(error))
        return None

    # The thread of the heartbeats sleeps a second at the end of each flow, for a server that ends with this process anyhow
    heartbeat = None if is_own() else flow_runs.HEARTBEAT_SECONDS
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: heartbeat}), tags(*tags_of(execution)):
        try:
            final = pipeline(execution.settings.model_dump(mode="json"), return_state=True)
        except httpx.TransportError as error:
            if not have_ended:  # the stages have not all run
                raise
            log.warning("the Prefect server is gone and does not know how the run ended: %s", error)
            final = Completed()
    _raise_failure(execution)
    if not final.is_completed():
        raise TTrainError(f"Prefect ended the run as {final.name}: {final.message}")


def tags_of(execution: PipelineRun) -> list[str]:
    """The tags of the flow run: ttrain's own, the setting `name`, and the user's, as they are written in commands."""
    own = {"name": execution.settings.name, **execution.labels.tags}
    return [TAG, *(f"{key}={value}" for key, value in own.items())]


def _run_stages(execution: PipelineRun) -> None:
    """Submit every stage of the plan to the current flow run, wait for them, and report the results to Prefect."""
    from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
    from prefect.context import TagsContext
    from prefect.futures import PrefectFuture
    from prefect.utilities.urls import url_for

    from ttrain.flows.stage_task import stage_task

    futures: dict[str, PrefectFuture[Any]] = {}
    graph = execution.plan.graph
    stages = {planned.stage.name: planned for planned in execution.plan.stages if not planned.reused}
    shards = {name for name, planned in stages.items() if planned.stage.reuses_parts}
    is_limited = _trainings_are_limited()
    run = execution.record.run
    flow_run_id = str(current_flow_run().id)
    execution.note_prefect(flow_run_id, None if is_own() else url_for("flow-run", obj_id=flow_run_id))
    with best_effort():
        names = ("stage", "state", "key", "why")
        plan = [dict(zip(names, row, strict=True)) for row in plan_table.plan_rows(execution.plan.stages)]
        create_table_artifact(plan, key="plan", description=f"plan of {run}")
        if page := execution.page_of():
            create_link_artifact(page, key="mlflow", link_text=f"{run} in MLflow")
    with contextlib.suppress(Interrupted), watching_for_cancellation(execution):
        with TagsContext(current_tags=set()):  # the flow run's tags are not for its tasks (see `stage_task`)
            for name, planned in stages.items():
                # All shards: a stage with too few rows ends the run before it trains
                needed = graph[name].reads | (shards if planned.stage.uses_ranks else frozenset())
                before = [future for of, future in futures.items() if of in needed]
                futures[name] = stage_task(planned, execution, is_limited=is_limited).submit(wait_for=before)
        for future in futures.values():
            future.wait()
        check_all_completed(execution, [*futures.values()])
    with best_effort():
        page = execution.page_of()
        link = f"[The whole report]({page}/artifacts/{run_summary.REPORT}), with curves.\n\n" if page else ""
        record, rows = execution.record.snapshot(), execution.evaluation_table()
        text = run_summary.description(execution.store.root, record, execution.metrics(), rows)
        create_markdown_artifact(link + text, key="report", description=f"report of {run}")
    rows = execution.evaluation_table()
    if rows and not execution.signum and not execution.failures:
        with best_effort():
            table = summary.markdown(rows, ("metric", "value", ""))
            create_markdown_artifact(table, key="evaluation", description=f"evaluation of {run}")


def show_decision(table: str, night: str, *, in_flow: bool) -> None:
    """Create a Prefect artifact of a night's decision, a markdown table: of the current flow run of a deployment, else of no
    run, since that of the night's stages has ended."""
    from prefect.client.schemas.actions import ArtifactCreate

    run = current_flow_run().id if in_flow else None
    # `create_markdown_artifact` warns where there is no run
    artifact = ArtifactCreate(
        type="markdown", key="decision", description=f"decision of {night}", data=table, flow_run_id=run
    )
    with best_effort(), sync_client() as client:
        client.create_artifact(artifact)


def check_all_completed(execution: PipelineRun, futures: Sequence[Any]) -> None:
    """Raise TTrainError where a stage did not complete though none failed and no stop was requested."""
    if execution.signum or execution.failures:
        return
    for future in futures:
        if not future.state.is_completed():
            raise TTrainError(f"Prefect ended a stage as {future.state.name}: {future.state.message}")


def _trainings_are_limited() -> bool:
    """Whether somebody has set a limit on the tag of the stages that train."""
    from prefect.exceptions import ObjectNotFound

    from ttrain.flows.stage_task import TRAINS

    with best_effort(), sync_client() as client:
        with contextlib.suppress(ObjectNotFound):
            client.read_concurrency_limit_by_tag(TRAINS)
            return True
    return False


def rename(name: str) -> None:
    """Give the flow run of a deployment the name of its night or run."""
    with best_effort(), sync_client() as client:
        client.set_flow_run_name(current_flow_run().id, name)


def _raise_failure(execution: PipelineRun, next_step: str = "the same command continues") -> None:
    if execution.signum:
        raise Interrupted(f"{execution.stop_reason}; {next_step}", execution.signum)
    for error in _worst_first(execution):
        raise error


def _worst_first(execution: PipelineRun) -> list[BaseException]:
    """What stages raised; that nothing is new comes last, since it is no failure."""
    return sorted(execution.failures.values(), key=lambda error: isinstance(error, NothingNew))


OWNER = "TTRAIN_SERVER_OWNER"
RESTARTS = 5  # of a server that keeps dying
WATCH_SECONDS = 0.2  # between two looks of the server for its owner
END_SECONDS = 8.0  # for its last events to be written; 2 s on an idle machine


_own: _TemporaryServer | None = None  # the server that this process started


def is_own() -> bool:
    """Whether this process started the Prefect server that it uses."""
    return _own is not None and os.environ.get("PREFECT_API_URL") == _own.url


def start_temporary_server(home: Path, auth: Auth = "token") -> Callable[[], None]:
    """Start a Prefect server for this process alone, unless one is named or running; returns a function that waits for it.

    Call it with `prefect_environment` applied, then import prefect, then wait: the import goes on meanwhile (0.9 s),
    and prefect need not import its own server to start it (1.3 s). Prefect's ephemeral server dies of the Ctrl-C that
    its run still has to report, and outlives a run that is killed; this one does neither. Raises TTrainError like `up`.
    """
    global _own
    if _own and _own.home == home and not os.environ.get("PREFECT_API_URL"):  # a second run of this process
        os.environ.update({"PREFECT_API_URL": _own.url, AUTH_STRING: _own.token})
        return lambda: None
    lock = servers.start_lock(home)
    lock.acquire()
    if running := server_records.live_server(home, "prefect"):
        os.environ.setdefault("PREFECT_API_URL", f"{running.url}/api")
    if os.environ.get("PREFECT_API_URL"):
        os.environ.update(token_environment(home, os.environ["PREFECT_API_URL"]))
        lock.release()
        return lambda: None
    servers.prepare_database(home)
    # Below 32768, where ports of outgoing connections begin: a client of an unserved port there may connect to itself
    port = servers.free_port(10_000 + secrets.randbelow(10_000))
    token = token_of(auth, server_records.new_token)  # known to this process and its children alone
    server = _own = _TemporaryServer(port, home, token)
    os.environ["PREFECT_API_URL"] = server.url
    os.environ[AUTH_STRING] = token  # in place of a password for another server

    def wait() -> None:
        try:
            server.wait()
        finally:
            lock.release()

    return wait


class _TemporaryServer:
    """The Prefect server of this process; started at once, and again on its port and its database should it die.

    The kernel kills what takes memory when that runs out. A run whose server is gone goes on, but Prefect's client asks
    at each state for minutes before it gives up: eight stages that took 20 s had not ended after five minutes.
    """

    def __init__(self, port: int, home: Path, token: str) -> None:
        self.url, self.home, self.token = f"http://{HOST}:{port}/api", home, token
        self._port, self._owner = port, os.getpid()
        self._log_file = server_records.folder_of(home) / "own.log"
        self._process = self._spawn()

    def wait(self) -> None:
        """Wait until the server answers, and restart it from then on if it dies. Raises TTrainError."""
        try:
            servers.wait("prefect", self._port, self._process, self._log_file)
        except TTrainError as error:
            if not servers.set_database_aside(self.home, str(error)):
                raise
            self._process.kill()
            self._process = self._spawn()
            servers.wait("prefect", self._port, self._process, self._log_file)
        threading.Thread(target=self._keep, name="own-server", daemon=True).start()

    def _keep(self) -> None:
        for _ in range(RESTARTS):
            code = self._process.wait()
            log.warning("the Prefect server of this run ended with code %d; it is started again", code)
            self._process = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [*uvicorn_command(owned_app, self._port, "error"), "--timeout-graceful-shutdown", "2"]
        ephemeral = {"PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1", "PREFECT_SERVER_UI_ENABLED": "false"}
        ephemeral |= servers.SLOTS_AHEAD
        token_variables = {PORT: str(self._port), server_records.ACCESS: self.token, AUTH_STRING: self.token}
        environment = {**ephemeral, **token_variables, OWNER: str(self._owner)}
        return servers.spawn(command, environment, self._log_file)


def owned_app() -> Any:
    """Prefect's server application, in the server's process; ends that process when its owner is gone.

    The owner does not wait for it: writing the last events takes 2 s. SIGTERM and SIGHUP do not end it: who stops all
    processes at once, as systemd does, stops the owner too, which still has to report to it.
    """
    owner = int(os.environ[OWNER])
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == owner:
            time.sleep(WATCH_SECONDS)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(END_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return prefect_app(final=False)
