"""The generic stage task: find the artifact, else launch the stage, publish and register what it leaves.

One task run a stage, named after it. The store is the only cache: Prefect caches nothing and persists no results.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect import Task, task
from prefect.artifacts import create_link_artifact
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.runtime import task_run
from prefect.states import Cancelled, Completed, Failed, State

from tasks.best_effort import courtesy
from ttrain.errors import Interrupted, TTrainError
from ttrain.pipeline.execution import Execution
from ttrain.stages import Stage
from ttrain.store.layout import Artifact

TRAINS = "trains"  # the tag by which Prefect can limit how many stages train at once


def stage_task(stage: Stage, execution: Execution, *, is_limited: bool = False) -> Task[..., Any]:
    """A Prefect task for one stage of one run; its retries continue where the try before was killed or failed.

    Where `is_limited`, the stages that train bear a tag. Else none does: for every tag, Prefect asks its server for a slot
    before the task begins, limit or not, and the task fails where the server is away.

    A mistake of settings or data fails at once. The delay before a retry is waited for here and not by Prefect, whose
    sleep no signal ends.
    """
    attempts = execution.settings.runtime.attempts_of(stage.name)
    retries, first_delay = attempts.retries or 0, attempts.retry_delay_seconds or 0.0

    def body(inputs: Mapping[str, Artifact]) -> State[Any]:
        logger = get_run_logger()
        if done := (task_run.run_count or 1) - 1:
            delay = first_delay * 2 ** (done - 1)
            logger.info("waiting %.1f s before retry %d of %d", delay, done, retries)
            execution.wait(delay)
        if execution.signum:
            return Cancelled(message=f"{execution.stop_reason} before this stage began")
        try:
            artifact, state = execution.run_stage(stage, inputs, logger.info)
        except Interrupted as error:
            return Cancelled(message=str(error))
        except TTrainError as error:
            # Returned, not raised: Prefect pickles what is raised, and prints its traceback, which tells a user nothing.
            logger.error("%s", error)
            return Failed(message=str(error), data=error)
        finally:
            with courtesy():
                if page := execution.page_of(stage.name):
                    create_link_artifact(page, key=f"mlflow-{stage.name}", link_text=f"{stage.name} in MLflow")
        if state == "cached":
            return Completed(name="Cached", message="same settings, inputs and code", data=artifact)
        return Completed(message=f"{state}: {artifact.path}", data=artifact)

    return task(
        body,
        name=stage.name,
        task_run_name=stage.name,
        description=f"stage {stage.name}, module {stage.module}",
        tags={TRAINS} if is_limited and stage.uses_ranks else None,
        retries=retries,
        retry_condition_fn=lambda task, run, state: not execution.signum and not _is_mistake(state),
        persist_result=False,
        cache_policy=NO_CACHE,
    )


def _is_mistake(state: State[Any]) -> bool:
    """Whether trying again gives the same: what failed is in the state, as `body` puts it there."""
    return isinstance(state.data, TTrainError) and state.data.is_mistake
