"""Flow runs and their processes: labels a flow run with its process, and marks as Crashed those
whose process is gone.

Two checks mark them, since either may be missing: the next run on this machine, and the server
itself, by an automation that listens for heartbeats
(docs.prefect.io/v3/advanced/detect-zombie-flows).
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import signal
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrain.engine.execution import PipelineRun
from ttrain.engine.stop_request import SIGNALLED
from ttrain.store.runs import is_alive, process_started

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

TAG = "ttrain"
LABEL_HOME = "ttrain.home"
LABEL_HOST = "ttrain.host"
LABEL_PID = "ttrain.pid"
LABEL_STARTED = "ttrain.process-started"
LABEL_TRY = "ttrain.run-count"
AUTOMATION = "ttrain: flow runs without a heartbeat have crashed"
HEARTBEAT_SECONDS = 30  # the minimum of Prefect
SILENCE_SECONDS = 80  # two heartbeats are missed by then, and less than two minutes have passed
PENDING_SECONDS = 600.0  # a started process reports within seconds
WATCH_SECONDS = 3.0
CANCELLED = "cancelled in Prefect"
PROCESS_GONE = "its process is gone"
# Names of the states in which our flow runs end: Prefect's own, and those of nights (deployed.py)
NIGHT_STATES = {
    "promoted": "Promoted",
    "kept": "Kept",
    "nothing-new": "NothingNew",
    "skipped": "Skipped",
}
UNFINISHED = "Unfinished"
FINAL_STATES = (
    *("Completed", "Failed", "TimedOut", "Cancelled", "Crashed"),
    UNFINISHED,
    *NIGHT_STATES.values(),
)

log = logging.getLogger("ttrain")


@contextlib.contextmanager
def best_effort() -> Iterator[None]:
    """Log and swallow any exception: labels, tables and links of Prefect cannot fail a run."""
    try:
        yield
    except Exception as error:
        log.warning("an optional call of Prefect failed: %s: %s", type(error).__name__, error)


def sync_client() -> SyncPrefectClient:
    """A client of the Prefect server that the environment names."""
    from prefect.client.orchestration import get_client

    return get_client(sync_client=True)


def flow_runs_where(**conditions: Any) -> Any:
    """A filter of flow runs, such as `id={"any_": [...]}`."""
    from prefect.client.schemas.filters import FlowRunFilter

    return FlowRunFilter.model_validate(conditions)


def label_with_process(home: Path) -> None:
    """Label the current flow run with its process and machine.

    Task runs that an earlier attempt left running have ended, whatever ended it: this attempt has
    begun no task yet.
    """
    run, pid = current_flow_run(), os.getpid()
    process = {
        LABEL_PID: pid,
        LABEL_STARTED: process_started(pid) or 0.0,
        LABEL_TRY: run.run_count,
    }
    with sync_client() as client:
        client.update_flow_run_labels(run.id, {**machine_labels(home), **process})
        if run.run_count > 1:
            _end_tasks(client, flow_runs_where(id={"any_": [run.id]}))


def current_flow_run() -> FlowRun:
    """The flow run in which this is called."""
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None, "called inside a flow"
    return context.flow_run


def mark_crashed_runs(home: Path) -> None:
    """Mark as Crashed the flow runs that Prefect takes for running though their process is gone.

    Also marks the task runs of flow runs that the runner or the server marked, which leave task
    runs as they are. Best effort, never a reason to fail.
    """
    from prefect.states import Crashed

    def of_ours(*states: str) -> Any:
        return flow_runs_where(tags={"all_": [TAG]}, state={"type": {"any_": states}})

    with contextlib.suppress(Exception), sync_client() as client:
        unfinished = of_ours("RUNNING", "PENDING", "CANCELLING")
        for run in client.read_flow_runs(flow_run_filter=unfinished):
            if is_process_gone(run.labels, run.run_count, home) or never_began(run, home):
                client.set_flow_run_state(run.id, Crashed(message=PROCESS_GONE), force=True)
        _end_tasks(client, of_ours("CRASHED"))


def _end_tasks(client: Any, flow_runs: Any) -> None:
    """Mark as Crashed the task runs of these flow runs that Prefect takes for unfinished."""
    from prefect.client.schemas.filters import TaskRunFilter
    from prefect.states import Crashed

    unfinished = {"state": {"type": {"any_": ["RUNNING", "PENDING", "SCHEDULED"]}}}
    tasks = TaskRunFilter.model_validate(unfinished)
    for task_run in client.read_task_runs(flow_run_filter=flow_runs, task_run_filter=tasks):
        client.set_task_run_state(task_run.id, Crashed(message=PROCESS_GONE), force=True)


def never_began(run: FlowRun, home: Path) -> bool:
    """Whether `serve` has taken the run, and died with it before the run's process reported.

    One of a work pool may wait much longer for its image, or for a node.
    """
    is_ours = home_tag(home) in run.tags and not run.work_pool_name
    if not is_ours or run.state is None or not run.state.is_pending():
        return False
    since: datetime = run.state.timestamp
    return (datetime.now(UTC) - since).total_seconds() > PENDING_SECONDS


def is_process_gone(labels: Mapping[str, Any], run_count: int, home: Path) -> bool:
    """Whether the process in a flow run's labels was on this machine and of this home, and is gone.

    A retried run has not yet named its new process while the run counts differ.
    """
    expected = {**machine_labels(home), LABEL_TRY: run_count}
    if any(labels.get(name) != value for name, value in expected.items()):
        return False
    return not is_alive({"pid": labels.get(LABEL_PID, 0), "started": labels.get(LABEL_STARTED)})


def home_tag(home: Path) -> str:
    """The tag of a home's deployments, where several homes share a server."""
    return f"home:{home.resolve()}"


def machine_labels(home: Path) -> dict[str, str]:
    """Labels of the home and the machine of a flow run."""
    return {LABEL_HOME: str(home.resolve()), LABEL_HOST: platform.node()}


def create_automation() -> None:
    """Have the server mark as Crashed every flow run of ours whose heartbeats stop.

    Heartbeats come from runs of deployments, and from those that use a server which outlives them.
    """
    from prefect.automations import Automation
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import EventTrigger, Posture
    from prefect.events.schemas.events import ResourceSpecification

    heartbeat = "prefect.flow-run.heartbeat"
    ours = {"prefect.resource.id": f"prefect.tag.{TAG}", "prefect.resource.role": "tag"}
    trigger = EventTrigger(
        after={heartbeat},
        expect={heartbeat, *(f"prefect.flow-run.{name}" for name in FINAL_STATES)},
        match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
        match_related=ResourceSpecification(ours),
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=SILENCE_SECONDS),
    )
    message = f"no heartbeat for {SILENCE_SECONDS} s: {PROCESS_GONE}"
    action = ChangeFlowRunState(state=StateType.CRASHED, message=message)
    try:
        Automation.read(name=AUTOMATION)
    except ValueError:
        Automation(name=AUTOMATION, trigger=trigger, actions=[action]).create()


@contextlib.contextmanager
def watching_for_cancellation(execution: PipelineRun) -> Iterator[None]:
    """Ask the stages to stop where the current flow run was cancelled; looks every few seconds.

    Prefect's runner sends SIGTERM to the runs that it started; this handles the others, and sets
    the reason of all.
    """
    run, done = current_flow_run(), threading.Event()

    def is_cancelled(client: Any) -> bool:
        state = client.read_flow_run(run.id).state
        return state is not None and (state.is_cancelling() or state.is_cancelled())

    def watch() -> None:
        while not done.wait(WATCH_SECONDS):
            # Opening a client costs ten times as much as a request; it ends when the server is away
            with contextlib.suppress(Exception), sync_client() as client:
                while not is_cancelled(client):
                    if done.wait(WATCH_SECONDS):
                        return
                execution.ask_to_stop(signal.SIGTERM, CANCELLED)
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()
        # The runner's signal may have come before the look
        if execution.signum and execution.stop_reason == SIGNALLED:
            with contextlib.suppress(Exception), sync_client() as client:
                if is_cancelled(client):
                    execution.stop_reason = CANCELLED
