"""Runs a recipe under Prefect: one flow run a pipeline run, one task run a stage, what is independent side by side."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows import servers
from ttrain import report
from ttrain.errors import Interrupted, TTrainError
from ttrain.execute import Execution
from ttrain.plan import Recipe
from ttrain.stages import Stage

_wait_for_server: Callable[[], None] = lambda: None  # noqa: E731  # set by begin()


def begin(home: Path) -> None:
    """Choose the server and start one where there is none, before Prefect is imported; its start goes on meanwhile."""
    global _wait_for_server
    os.environ.update(servers.prefect_environment(home))
    _wait_for_server = servers.own_server(home)


def run(execution: Execution, recipe: Recipe) -> None:
    """Run the recipe as a flow. Raises what the first failed stage raised, or Interrupted."""
    from prefect import flow
    from prefect.artifacts import create_markdown_artifact
    from prefect.futures import PrefectFuture
    from prefect.states import Cancelled, State
    from prefect.task_runners import ThreadPoolTaskRunner

    from tasks.stage import stage_task

    _wait_for_server()

    @flow(
        name=execution.pipeline, flow_run_name=execution.record.run, persist_result=False, log_prints=False,
        task_runner=ThreadPoolTaskRunner(max_workers=4), validate_parameters=False,
    )  # fmt: skip
    def pipeline(settings: dict[str, Any]) -> State[Any] | None:
        futures: list[PrefectFuture[Any]] = []

        def submit(stage: Stage, **inputs: PrefectFuture[Any] | None) -> PrefectFuture[Any]:
            given = {name: future for name, future in inputs.items() if future is not None}
            future = stage_task(stage, execution).submit(given)
            futures.append(future)
            return future

        recipe(submit, execution.settings)
        for future in futures:
            future.wait()
        if execution.signum:
            return Cancelled(message="stopped by a signal; the stages saved their state")
        for error in execution.failures.values():
            raise error
        table = report.markdown(report.evaluation_table(execution.metrics()), ("what", "value", ""))
        create_markdown_artifact(table, key=f"evaluation-{execution.settings.name}".lower(), description="evaluation")
        return None

    final = pipeline(execution.settings.model_dump(mode="json"), return_state=True)
    if execution.signum:
        raise Interrupted("stopped by a signal; the same command continues", execution.signum)
    for error in execution.failures.values():
        raise error
    if not final.is_completed():
        raise TTrainError(f"Prefect ended the run as {final.name}: {final.message}")
