"""The generic stage task: find the artifact, else launch the stage, publish and register what it leaves.

One task run a stage, named after it. The store is the only cache: Prefect caches nothing and persists no results.
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.runtime import task_run
from prefect.states import Cancelled, Completed, Failed, State

from ttrain.config import Runtime
from ttrain.engine.execution import PipelineRun
from ttrain.engine.graph import Planned
from ttrain.errors import Interrupted, NothingNew, TTrainError, UsageError
from ttrain.tasks import Stage

FIRST_DELAY_SECONDS = 10.0  # each further one is twice as long


def stage_task(planned: Planned, execution: PipelineRun, on_end: Callable[[], object] = lambda: None) -> Task[..., Any]:
    """A Prefect task for one stage of a run's plan; `on_end` is called in its task run.

    Its retries continue where the attempt before was killed or failed; a mistake of settings or data
    fails at once. The delay before a retry is waited for here and not by Prefect, whose sleep cannot
    be interrupted by a signal.
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
            # Returned, not raised: Prefect pickles what is raised, and prints its traceback, which tells a user nothing.
            logger.log(logging.INFO if isinstance(error, Interrupted | NothingNew) else logging.ERROR, "%s", error)
            return state_of(error)
        finally:
            on_end()
        if state == "cached":
            return Completed(name="Cached", message="same settings, inputs and code", data=artifact)
        return Completed(message=f"{state}: {artifact.path}", data=artifact)

    return task(
        body,
        name=stage.name,
        task_run_name=stage.name,
        description=f"stage {stage.name}, module {stage.module}",
        retries=retries,
        retry_condition_fn=lambda task, run, state: not execution.signum and not getattr(state.data, "is_mistake", False),
        persist_result=False,
        cache_policy=NO_CACHE,
    )


def state_of(error: BaseException) -> State[Any]:
    """The state in which a stage or a run ends that raised this, without a traceback."""
    if isinstance(error, NothingNew):
        return Cancelled(name="NothingNew", message=str(error), data=error)
    state = Cancelled if isinstance(error, Interrupted) else Failed
    return state(message=str(error), data=error)


CLUSTER_AHEAD = 256  # blocks that a cluster of unknown size is given at a time
LOOK_SECONDS = 1.0  # while a block is waited for, between two looks at the signals

IMPORT_HINT = "runtime.sharding is dask, which needs prefect-dask; try: pip install 'ttrain[dask]'"


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
                raise Interrupted("stopped while Dask made its blocks; the next run continues there", self._run.signum)
            waiting[0].wait(LOOK_SECONDS)
        return waiting.popleft().result()


def make_on_dask(run: PipelineRun, stage: Stage, work: Path) -> None:
    """Make the blocks of a shards stage whose work directory is laid out. Raises what a block raised, or Interrupted."""
    from prefect import flow

    from ttrain.engine.stage_worker import job_of
    from ttrain.tasks import shards

    runner, ahead = task_runner(run.settings.runtime)

    @flow(name=f"{stage.name}-blocks", task_runner=runner, persist_result=False, validate_parameters=False)  # type: ignore[untyped-decorator]
    def blocks() -> None:
        config, job = job_of(work, progress=False)
        shards.make_blocks(config, job, DaskPool(ahead, run))

    blocks()


def task_runner(runtime: Runtime) -> tuple[Any, int]:
    """The Dask task runner, and the number of tasks to submit ahead. Raises UsageError where Dask is missing."""
    from ttrain.data.pool import ENVIRONMENT, TASKS_AHEAD

    try:
        from prefect_dask import DaskTaskRunner
    except ImportError:
        raise UsageError(IMPORT_HINT) from None
    workers = runtime.workers or os.cpu_count() or 1
    if runtime.dask_address:
        return DaskTaskRunner(address=runtime.dask_address), CLUSTER_AHEAD
    import dask

    dask.config.set({"distributed.nanny.pre-spawn-environ": {**ENVIRONMENT, "MALLOC_TRIM_THRESHOLD_": "65536"}})
    # With TLS and a key of its own: its scheduler runs the code of whoever connects, and all accounts reach 127.0.0.1
    cluster = {
        "n_workers": workers,
        "threads_per_worker": 1,
        "dashboard_address": None,
        "host": "127.0.0.1",
        "security": True,
    }
    return DaskTaskRunner(cluster_kwargs=cluster), workers * TASKS_AHEAD
