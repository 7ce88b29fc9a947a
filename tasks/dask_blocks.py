"""Blocks of a shards stage as Prefect task runs on a Dask cluster: the same blocks, hence the same digests.

They are made before the stage's own process starts, into its work directory, which the workers must be able to write; the
stage then finds them there and puts them together (a limit makes it read the input once more).
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from ttrain.config import Runtime
from ttrain.data.worker_pools import ENVIRONMENT, TASKS_AHEAD
from ttrain.errors import Interrupted, UsageError
from ttrain.pipeline.stage_worker import job_of
from ttrain.stages import Stage

CLUSTER_AHEAD = 256  # blocks that a cluster of unknown size is given at a time
IMPORT_HINT = "runtime.sharding is dask, which needs prefect-dask; try: pip install 'ttrain[dask]'"


@task(name="block", persist_result=False, cache_policy=NO_CACHE)  # type: ignore[untyped-decorator]
def block_task(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """One block, wherever Dask puts it."""
    return function(*arguments)


class DaskPool:
    """Submits to the Dask cluster of the running flow; results in order, a bounded number ahead."""

    def __init__(self, ahead: int, stop_signal: Callable[[], int]) -> None:
        self._ahead, self._stop_signal = ahead, stop_signal

    def map(self, function: Callable[..., Any], tasks: Iterator[tuple[Any, ...]]) -> Generator[Any]:
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
        if signum := self._stop_signal():
            raise Interrupted("stopped while Dask made its blocks; the next run goes on there", signum)
        return waiting.popleft().result()


def make_on_dask(stage: Stage, work: Path, runtime: Runtime, stop_signal: Callable[[], int] = lambda: 0) -> None:
    """Make the blocks of a shards stage whose work directory is laid out. Raises what a block raised, or Interrupted."""
    from ttrain.stages import shards

    runner, ahead = _runner(runtime)

    @flow(name=f"{stage.name}-blocks", task_runner=runner, persist_result=False, validate_parameters=False)  # type: ignore[untyped-decorator]
    def blocks() -> None:
        config, job = job_of(work, progress=False)
        shards.make_blocks(config, job, DaskPool(ahead, stop_signal))

    blocks()


def _runner(runtime: Runtime) -> tuple[Any, int]:
    try:
        from prefect_dask import DaskTaskRunner
    except ImportError:
        raise UsageError(IMPORT_HINT) from None
    workers = runtime.workers or os.cpu_count() or 1
    if runtime.dask_address:
        return DaskTaskRunner(address=runtime.dask_address), CLUSTER_AHEAD
    with contextlib.suppress(ImportError):
        import dask

        dask.config.set({"distributed.nanny.pre-spawn-environ": {**ENVIRONMENT, "MALLOC_TRIM_THRESHOLD_": "65536"}})
    # With TLS and a key of its own: its scheduler runs the code of whoever connects, and all accounts reach 127.0.0.1
    kwargs = {
        "n_workers": workers,
        "threads_per_worker": 1,
        "dashboard_address": None,
        "host": "127.0.0.1",
        "security": True,
    }
    return DaskTaskRunner(cluster_kwargs=kwargs), workers * TASKS_AHEAD
