"""Run a plan: as a Prefect flow with a task run for each stage, or without Prefect.

The engine promises what DESIGN.md asks of every run: stages come from the store or are built once, a
failure of one is the failure of the run, and a stop lets stages save. Prefect shows the run, runs
independent stages side by side and retries a stage; it caches nothing and keeps no results.

Prefect's page shows a run whose process was killed as running, until the next run of the home marks
it as crashed (`mark_crashed_runs`, by the home's records). *Cancel* on that page stops the
runs that `ttrain pipeline serve` started, to which Prefect's runner sends SIGTERM.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from rich.console import Console

from ttrain.core.files import JsonObject
from ttrain.core.terminal import print_plain, table
from ttrain.core.text import format_duration
from ttrain.engine.display import StageDisplay
from ttrain.engine.execution import PipelineRun, screen
from ttrain.engine.graph import Plan
from ttrain.errors import Interrupted, NothingNew, TTrainError, UsageError
from ttrain.flows import servers
from ttrain.nightly import notify
from ttrain.store.runs import NIGHTLY, NOTHING_NEW, newest_first
from ttrain.tracking import run_summary
from ttrain.tracking.pusher import track

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

log = logging.getLogger("ttrain")

MAX_CONCURRENT_STAGES = 4  # the most stages of a graph that are independent, and one to spare
TAG = "ttrain"
PROCESS_GONE = "its process is gone"


@dataclass(frozen=True)
class RunOptions:
    """How a plan is run.

    in_flow  the stages join the Prefect flow run of the caller
    night    the name of the night that the run is a part of
    stop_at  when the stages are asked to save and stop, in seconds since the epoch
    display  shows the stages, instead of the console
    """

    engine: str = "prefect"
    in_flow: bool = False
    night: str = ""
    stop_at: float | None = None
    labels: JsonObject = field(default_factory=dict)
    display: StageDisplay | None = None


def run_pipeline(
    plan: Plan,
    console: Console,
    options: RunOptions,
    on_begin: Callable[[PipelineRun], object] = lambda execution: None,
) -> PipelineRun:
    """Run the plan, then print the evaluation; returns the execution.

    `on_begin` gets the run before its first stage. Raises what the first failed stage raised, or
    Interrupted.
    """
    settings, store, engine = plan.settings, plan.store, options.engine
    if settings.runtime.sharding == "dask" and engine != "prefect":
        raise UsageError(
            f"runtime.sharding is dask, which goes through Prefect, but --engine is {engine}; try --engine prefect"
        )
    is_on_device = settings.runtime.device in ("cuda", "mps")
    if is_on_device and any(p.state == "run" and p.stage.loads_torch for p in plan.stages):
        from ttrain.train.precision import resolve_device  # torch, where a device is named

        resolve_device(settings.runtime.device)  # not after minutes, at the first training
    with screen(console, settings.runtime.log_level, options.display) as shown_on:
        if engine == "prefect" and not options.in_flow:
            begin(store.root)
        night = {"night": options.night} if options.night else {}
        execution = PipelineRun(plan, shown_on, facts={**options.labels, **night})
        track(execution)
        try:
            with execution.recorded():
                on_begin(execution)
                execution.raise_if_signalled()
                with execution.stopping_at(options.stop_at):
                    if engine == "prefect":
                        run_in_prefect(execution, in_flow=options.in_flow, night=options.night)
                    else:
                        with execution.catching_signals():
                            execution.run_stages()
        finally:
            print_summary(execution, execution.outcome, console)
            if plan.pipeline != NIGHTLY:  # a night sends its own
                record = execution.record.snapshot()
                notify.send_end_of_run(settings.notify, settings.name, record)
    return execution


def begin(home: Path) -> None:
    """Choose or start the server, before Prefect is imported."""
    os.environ.update(servers.prefect_environment(home))
    silence_prefect()
    servers.start_own_server(home)
    reread_environment()
    if not servers.is_own():
        servers.check_prefect_server()


def print_summary(execution: PipelineRun, outcome: str, console: Console) -> None:
    """Print the evaluation, or how to continue."""
    rows = execution.evaluation_table() if outcome == "completed" else []
    if rows:
        console.print()
        table(("evaluation", "value", ""), rows, console)
        console.print()
    took, say = format_duration(execution.seconds), partial(print_plain, console)
    if outcome == "completed":
        say(f"done in {took}; run {execution.record.run}")
        return
    if outcome == NOTHING_NEW:  # the night says why
        return
    next_step = ", and the same command continues there"
    if any(getattr(error, "is_mistake", False) for error in execution.failures.values()):
        next_step = ", and the command continues there once the mistake is fixed"
    if execution.plan.pipeline == NIGHTLY:  # which says its own
        next_step = ""
    say(
        f"{outcome} after {took}; finished stages are kept{next_step} "
        f"(`ttrain pipeline status` shows the stages and their logs)"
    )


def silence_prefect() -> None:
    """Send Prefect's logs of runs to its API and not to the terminal, which has ttrain's display."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).propagate = False


def reread_environment() -> None:
    """Let Prefect, where a program has imported it already, see the variables as they are now."""
    if "prefect" in sys.modules:
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()


def run_in_prefect(execution: PipelineRun, *, in_flow: bool = False, night: str = "") -> None:
    """Run the plan as a flow, or `in_flow` as a part of the flow run of the caller.

    Raises what the first failed stage raised, or Interrupted.
    """
    from prefect import flow, tags
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
    from prefect.task_runners import ThreadPoolTaskRunner

    from ttrain.flows import stage_task

    settings, home, run = execution.settings, execution.store.root, execution.record.run
    if settings.runtime.sharding == "dask":
        execution.make_parts_elsewhere = partial(stage_task.make_on_dask, execution)
    mark_crashed_runs(home)

    def pipeline(settings: dict[str, Any]) -> Any:
        with execution.catching_signals():  # inside: Prefect sets a handler of its own
            if in_flow:
                rename(night or run)
            states = _run_stages(execution)
        error = failure_of(execution)
        incomplete = (state for state in states if not state.is_completed())
        return stage_task.state_of(error) if error else next(incomplete, None)

    values = settings.model_dump(mode="json")
    if in_flow:
        final = pipeline(values)
    else:
        as_flow = flow(
            pipeline,
            name=execution.plan.pipeline,
            flow_run_name=night or f"{settings.name}: {run}",
            persist_result=False,
            validate_parameters=False,
            task_runner=ThreadPoolTaskRunner(max_workers=MAX_CONCURRENT_STAGES),
        )
        # The thread of the heartbeats would sleep a second at the end of the flow
        no_heartbeats = temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None})
        with no_heartbeats, tags(*tags_of(execution)):
            final = as_flow(values, return_state=True)
    if error := failure_of(execution):
        raise error
    if final and not final.is_completed():
        raise TTrainError(f"Prefect ended the run, or a stage of it, as {final.name}: {final.message}")


def link_to_page(execution: PipelineRun, stage: str | None = None) -> None:
    """Link the task run of a stage, or the flow run, to its page in MLflow, if a server shows it."""
    from prefect.artifacts import create_link_artifact

    with best_effort():
        if page := execution.tracker and execution.tracker.page(stage):
            key = f"mlflow-{stage}" if stage else "mlflow"
            create_link_artifact(page, key=key, link_text=f"{stage or execution.record.run} in MLflow")


def tags_of(execution: PipelineRun) -> list[str]:
    """The tags of the flow run: ttrain's own, the setting `name`, and the user's."""
    tags = {"name": execution.settings.name, **execution.record.snapshot().get("tags", {})}
    return [TAG, *(f"{key}={value}" for key, value in tags.items())]


def _run_stages(execution: PipelineRun) -> list[Any]:
    """Submit every stage of the plan to the current flow run, report the results; returns their states."""
    from prefect.artifacts import create_markdown_artifact
    from prefect.context import TagsContext
    from prefect.futures import PrefectFuture
    from prefect.runtime import flow_run
    from prefect.utilities.urls import url_for

    from ttrain.flows.stage_task import stage_task

    futures: dict[str, PrefectFuture[Any]] = {}
    graph = execution.plan.graph
    stages = {planned.name: planned for planned in execution.plan.stages}
    shards = {name for name, planned in stages.items() if planned.stage.reuses_parts}
    url = None if servers.is_own() else url_for("flow-run", obj_id=flow_run.id)
    execution.record.note(prefect={"flow_run_id": str(flow_run.id), "url": url})
    link_to_page(execution)
    with contextlib.suppress(Interrupted):
        with TagsContext(current_tags=set()):  # for each tag of a task Prefect asks for a slot
            for name, planned in stages.items():
                # All shards: a stage with too few rows ends the run before it trains
                needed = graph[name].reads | (shards if planned.stage.uses_ranks else frozenset())
                before = [future for of, future in futures.items() if of in needed]
                futures[name] = stage_task(planned, execution, partial(link_to_page, execution, name)).submit(
                    wait_for=before
                )
        for future in futures.values():
            future.wait()
    with best_effort():  # what the run measured, on its page in Prefect
        rows, record = execution.evaluation_table(), execution.record.snapshot()
        text = run_summary.description(execution.store.root, record, execution.metrics(), rows)
        create_markdown_artifact(text, key="report", description=f"report of {execution.record.run}")
    return [future.state for future in futures.values()]


def failure_of(execution: PipelineRun) -> BaseException | None:
    """What ended the run: a stop, else what a stage raised; that nothing is new comes last."""
    if execution.signum:
        did = "were ended where they stood" if execution.at_once else "saved their state"
        message = f"{execution.stop_reason}; the stages {did}, and the next run continues"
        stopped = Interrupted(message, execution.signum)
        stopped.shown = True  # the run's last line says it
        return stopped
    failures = execution.failures.values()
    return min(failures, key=lambda error: isinstance(error, NothingNew), default=None)


@contextlib.contextmanager
def best_effort() -> Iterator[None]:
    """Log and swallow any exception: names and texts of Prefect cannot fail a run."""
    try:
        yield
    except Exception as error:
        log.warning("an optional call of Prefect failed: %s: %s", type(error).__name__, error)


def sync_client() -> SyncPrefectClient:
    """A client of the Prefect server that the environment names."""
    from prefect.client.orchestration import get_client

    return get_client(sync_client=True)


def rename(name: str) -> None:
    """Give the current flow run the name of its night or run."""
    from prefect.runtime import flow_run

    with best_effort(), sync_client() as client:
        client.set_flow_run_name(UUID(flow_run.id), name)


def mark_crashed_runs(home: Path) -> None:
    """Mark as Crashed the flow runs that Prefect takes for running though the home's records say that they ended."""
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.runtime import flow_run
    from prefect.states import Crashed

    unfinished = FlowRunFilter.model_validate(
        {"tags": {"all_": [TAG]}, "state": {"type": {"any_": ["RUNNING", "CANCELLING"]}}}
    )
    with best_effort(), sync_client() as client:
        for run in client.read_flow_runs(flow_run_filter=unfinished):
            runs_in_it = (each for each in newest_first(home) if each.get("prefect", {}).get("flow_run_id") == str(run.id))
            record = next(runs_in_it, None)
            has_ended = record is not None and record["outcome"] != "running"
            if has_ended and str(run.id) != flow_run.id:  # our own may be the second try of one that ended
                client.set_flow_run_state(run.id, Crashed(message=PROCESS_GONE), force=True)
