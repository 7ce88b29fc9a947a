"""The generic stage task: find the artifact, else launch the stage, publish and register what it leaves.

One task run a stage, named after it. The store is the only cache: Prefect caches nothing and persists no results.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.states import Cancelled, Completed, Failed, State

from ttrain.errors import Interrupted, TTrainError
from ttrain.execute import Execution
from ttrain.stages import Stage
from ttrain.store import Artifact


def stage_task(stage: Stage, execution: Execution) -> Task[..., Any]:
    """A Prefect task for one stage of one run; its retries continue where the try before was killed or failed."""
    runtime = execution.settings.runtime

    def body(inputs: Mapping[str, Artifact]) -> State[Any]:
        logger = get_run_logger()
        if execution.signum:
            return Cancelled(message="the run was asked to stop before this stage began")
        try:
            artifact, state = execution.run_stage(stage, inputs, logger.info)
        except Interrupted as error:
            return Cancelled(message=str(error))
        except TTrainError as error:
            # Returned, not raised: Prefect pickles what is raised, and prints its traceback, which tells a user nothing.
            logger.error("%s", error)
            return Failed(message=str(error), data=error)
        if state == "cached":
            return Completed(name="Cached", message="same settings, inputs and code", data=artifact)
        return Completed(message=f"{state}: {artifact.path}", data=artifact)

    return task(
        body,
        name=stage.name,
        task_run_name=stage.name,
        description=f"stage {stage.name}, module {stage.module}",
        retries=runtime.retries,
        retry_delay_seconds=runtime.retry_delay_seconds,
        persist_result=False,
        cache_policy=NO_CACHE,
    )
