"""A plan as a Prefect flow: a task run for each stage, or each block of shards on Dask.

Prefect shows runs, runs independent stages side by side and retries them; it caches nothing. A
killed run is shown as running until the home's next run marks it (`mark_crashed_runs`). *Cancel*
stops runs of `ttrain pipeline serve`, to which Prefect's runner sends SIGTERM.
"""

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import Task, flow, tags, task
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.context import TagsContext
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger
from prefect.runtime import flow_run, task_run
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.states import Cancelled, Completed, Crashed, Failed, State
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.urls import url_for

from ttrain.config import Runtime
from ttrain.core.files import JsonDict
from ttrain.engine.execution import PipelineRun
from ttrain.engine.graph import Planned
from ttrain.errors import Interrupted, NothingNew, TTrainError, UsageError
from ttrain.flows import servers
from ttrain.store.runs import newest_first
from ttrain.tasks import Stage
from ttrain.tracking import run_summary

log = logging.getLogger("ttrain")

MAX_CONCURRENT_STAGES = 4  # the most stages of a graph that are independent, and one to spare
TAG = "ttrain"
PROCESS_GONE = "its process is gone"
FIRST_DELAY_SECONDS = 10.0  # each further one is twice as long
CLUSTER_AHEAD = 256  # blocks that a cluster of unknown size is given at a time
LOOK_SECONDS = 1.0  # while a block is waited for, between two looks at the signals
IMPORT_HINT = "runtime.sharding is dask, which needs prefect-dask; try: pip install 'ttrain[dask]'"


def run_in_prefect(execution: PipelineRun, *, in_flow: bool, night: str) -> None:
    """Run the plan as a flow named after its night, or `in_flow` within the caller's flow run.

    Raises the first stage's error or Interrupted.
    """
    settings = execution.settings
    run = execution.record.run
    if settings.runtime.sharding == "dask":
        execution.make_parts_elsewhere = partial(make_on_dask, execution)
    mark_crashed_runs(execution.store.root)

    def pipeline(settings: JsonDict) -> Any:
        with execution.catching_signals():  # inside: Prefect sets a handler of its own
            if in_flow:
                rename(night or run)
            states = _run_stages(execution)
        error = failure_of(execution)
        incomplete = (state for state in states if not state.is_completed())
        return state_of(error) if error else next(incomplete, None)

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
        with (
            temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
            tags(*tags_of(execution)),
        ):
            final = as_flow(values, return_state=True)
    if error := failure_of(execution):
        raise error
    if final and not final.is_completed():
        raise TTrainError(
            f"Prefect ended the run, or a stage of it, as {final.name}: {final.message}"
        )


def link_to_page(execution: PipelineRun, stage: str | None = None) -> None:
    """Link the task or flow run to its page in MLflow, if a server shows it."""
    with best_effort():
        if page := execution.page(stage):
            create_link_artifact(
                page,
                key=f"mlflow-{stage}" if stage else "mlflow",
                link_text=f"{stage or execution.record.run} in MLflow",
            )


def tags_of(execution: PipelineRun) -> list[str]:
    """The tags of the flow run: ttrain's own, the setting `name`, and the user's."""
    tags = {"name": execution.settings.name, **execution.record.snapshot().get("tags", {})}
    return [TAG, *(f"{key}={value}" for key, value in tags.items())]


def _run_stages(execution: PipelineRun) -> list[State[Any]]:
    # Submit every stage of the plan to the current flow run, report the results; returns their
    # states.
    futures: dict[str, PrefectFuture[Any]] = {}
    stages = {planned.name: planned for planned in execution.plan.stages}
    shards = {name for name, planned in stages.items() if planned.stage.reuses_parts}
    url = None if servers.is_own() else url_for("flow-run", obj_id=flow_run.id)
    execution.record.note(prefect={"flow_run_id": str(flow_run.id), "url": url})
    link_to_page(execution)
    with contextlib.suppress(Interrupted):
        with TagsContext(current_tags=set()):  # for each tag of a task Prefect asks for a slot
            for name, planned in stages.items():
                # All shards: a stage with too few rows ends the run before it trains
                needed = execution.plan.graph[name].reads | (
                    shards if planned.stage.uses_ranks else frozenset()
                )
                futures[name] = stage_task(planned, execution).submit(
                    wait_for=[future for of, future in futures.items() if of in needed]
                )
        for future in futures.values():
            future.wait()
    with best_effort():  # what the run measured, on its page in Prefect
        text = run_summary.description(
            execution.store.root,
            execution.record.snapshot(),
            execution.metrics(),
            execution.evaluation_table(),
        )
        create_markdown_artifact(
            text, key="report", description=f"report of {execution.record.run}"
        )
    return [future.state for future in futures.values()]


def failure_of(execution: PipelineRun) -> BaseException | None:
    """The error that ended the run: a stop first, then a stage's error, NothingNew last."""
    if execution.signum:
        did = "were ended where they stood" if execution.at_once else "saved their state"
        stopped = Interrupted(
            f"{execution.stop_reason}; the stages {did}, and the next run continues",
            execution.signum,
        )
        stopped.shown = True  # the run's last line says it
        return stopped
    return min(
        execution.failures.values(), key=lambda error: isinstance(error, NothingNew), default=None
    )


@contextlib.contextmanager
def best_effort() -> Iterator[None]:
    """Log and swallow any exception: names and texts of Prefect cannot fail a run."""
    try:
        yield
    except Exception as error:
        log.warning("an optional call of Prefect failed: %s: %s", type(error).__name__, error)


def rename(name: str) -> None:
    """Give the current flow run the name of its night or run."""
    with best_effort(), get_client(sync_client=True) as client:
        client.set_flow_run_name(UUID(flow_run.id), name)


def mark_crashed_runs(home: Path) -> None:
    """Mark flow runs as Crashed that the home's records know to have ended."""
    unfinished = FlowRunFilter.model_validate(
        {"tags": {"all_": [TAG]}, "state": {"type": {"any_": ["RUNNING", "CANCELLING"]}}}
    )
    with best_effort(), get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=unfinished):
            outcomes = (
                each["outcome"]
                for each in newest_first(home)
                if each.get("prefect", {}).get("flow_run_id") == str(run.id)
            )
            # our own may be the second try of one that ended
            if next(outcomes, "running") != "running" and str(run.id) != flow_run.id:
                client.set_flow_run_state(run.id, Crashed(message=PROCESS_GONE), force=True)


def stage_task(planned: Planned, execution: PipelineRun) -> Task[..., Any]:
    """A Prefect task for one stage: its artifact from the store, or built.

    A retry continues; a mistake of settings or data fails at once. The delay is waited for here,
    since a signal cannot interrupt Prefect's sleep.
    """
    stage = planned.stage
    retries = execution.settings.runtime.retries

    def body() -> State[Any]:
        logger = get_run_logger()
        if done := (task_run.run_count or 1) - 1:
            delay = FIRST_DELAY_SECONDS * 2 ** (done - 1)
            logger.info("waiting %.1f s before retry %d of %d", delay, done, retries)
            execution.wait(delay)
        if execution.signum:
            return Cancelled(message=f"{execution.stop_reason} before this stage began")
        try:
            artifact, state = execution.run_stage(planned, logger.info)
        except TTrainError as error:
            # Returned, not raised: Prefect pickles what is raised, and prints its traceback, which
            # tells a user nothing.
            logger.log(
                logging.INFO if isinstance(error, Interrupted | NothingNew) else logging.ERROR,
                "%s",
                error,
            )
            return state_of(error)
        finally:
            link_to_page(execution, stage.name)
        if state == "cached":
            return Completed(name="Cached", message="same settings, inputs and code", data=artifact)
        return Completed(message=f"{state}: {artifact.path}", data=artifact)

    return task(
        body,
        name=stage.name,
        task_run_name=stage.name,
        description=f"stage {stage.name}, module {stage.module}",
        retries=retries,
        retry_condition_fn=lambda task, run, state: (
            not execution.signum and not getattr(state.data, "is_mistake", False)
        ),
        persist_result=False,
        cache_policy=NO_CACHE,
    )


def state_of(error: BaseException) -> State[Any]:
    """The state in which a stage or a run ends that raised this, without a traceback."""
    if isinstance(error, NothingNew):
        return Cancelled(name="NothingNew", message=str(error), data=error)
    state = Cancelled if isinstance(error, Interrupted) else Failed
    return state(message=str(error), data=error)


@task(name="block", persist_result=False, cache_policy=NO_CACHE)  # type: ignore[untyped-decorator]
def block_task(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Make one block on the worker that Dask chooses."""
    return function(*arguments)


@dataclass
class DaskPool:
    """Submits to the Dask cluster of the running flow; results in order, a bounded number ahead."""

    _ahead: int
    _run: PipelineRun

    def map(self, function: Callable[..., Any], tasks: Iterator[tuple[Any, ...]]) -> Generator[Any]:
        """The results of the function for each of the tasks."""
        waiting: deque[Any] = deque()
        try:
            for arguments in tasks:
                waiting.append(block_task.submit(function, arguments))
                if len(waiting) >= self._ahead:
                    yield self._result(waiting)
            while waiting:
                yield self._result(waiting)
        finally:  # none may still write when the caller goes on
            for future in waiting:
                future.wait()

    def _result(self, waiting: deque[Any]) -> Any:
        while not waiting[0].wrapped_future.done():
            if self._run.signum:
                raise Interrupted(
                    "stopped while Dask made its blocks; the next run continues there",
                    self._run.signum,
                )
            waiting[0].wait(LOOK_SECONDS)
        return waiting.popleft().result()


def make_on_dask(run: PipelineRun, stage: Stage, work: Path) -> None:
    """Make the blocks of a prepared shards stage. Raises a block's error or Interrupted."""
    from ttrain.engine.stage_worker import job_of
    from ttrain.tasks import shards

    runner, ahead = task_runner(run.settings.runtime)

    @flow(
        name=f"{stage.name}-blocks",
        task_runner=runner,
        persist_result=False,
        validate_parameters=False,
    )  # type: ignore[untyped-decorator]
    def blocks() -> None:
        config, job = job_of(work, progress=False)
        shards.make_blocks(config, job, DaskPool(ahead, run))

    blocks()


def task_runner(runtime: Runtime) -> tuple[Any, int]:
    """The Dask task runner and its number of tasks ahead. Raises UsageError without Dask."""
    from ttrain.data.pool import ENVIRONMENT, TASKS_AHEAD

    try:
        from prefect_dask import DaskTaskRunner
    except ImportError:
        raise UsageError(IMPORT_HINT) from None
    workers = runtime.workers or os.cpu_count() or 1
    if runtime.dask_address:
        return DaskTaskRunner(address=runtime.dask_address), CLUSTER_AHEAD
    import dask

    dask.config.set(
        {"distributed.nanny.pre-spawn-environ": {**ENVIRONMENT, "MALLOC_TRIM_THRESHOLD_": "65536"}}
    )
    # With TLS and a key of its own: its scheduler runs the code of whoever connects, and all
    # accounts reach 127.0.0.1
    cluster = {
        "n_workers": workers,
        "threads_per_worker": 1,
        "dashboard_address": None,
        "host": "127.0.0.1",
        "security": True,
    }
    return DaskTaskRunner(cluster_kwargs=cluster), workers * TASKS_AHEAD
