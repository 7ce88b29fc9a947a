"""Runs a recipe under Prefect: one flow run a pipeline run, one task run a stage, what is independent side by side."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows import servers
from ttrain import report, runs
from ttrain.errors import Interrupted, TTrainError, UsageError
from ttrain.execute import Execution
from ttrain.plan import Recipe
from ttrain.stages import Stage

TAG = "ttrain"
SIDE_BY_SIDE = 4  # the widest place of a recipe, and one to spare


def begin(home: Path) -> Callable[[], None]:
    """Choose the server, and start one where there is none, before Prefect is imported; returns what waits for it."""
    named = os.environ.get("PREFECT_API_URL")
    if named and not servers.answers(named):
        raise UsageError(f"PREFECT_API_URL is {named} but no Prefect server answers there; start it, or unset the variable")
    os.environ.update(servers.prefect_environment(home))
    # The API gets these logs, the terminal does not: the user sees ttrain's own progress.
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).propagate = False
    return servers.own_server(home)


def run(execution: Execution, recipe: Recipe, wait_for_server: Callable[[], None]) -> None:
    """Run the recipe as a flow. Raises what the first failed stage raised, or Interrupted."""
    from prefect import flow, tags
    from prefect.artifacts import create_markdown_artifact
    from prefect.futures import PrefectFuture
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
    from prefect.states import Cancelled, Failed, State
    from prefect.task_runners import ThreadPoolTaskRunner

    from tasks.stage import stage_task

    if execution.settings.runtime.sharding == "dask":
        from tasks.blocks import make_on_dask

        runtime = execution.settings.runtime
        execution.make_parts_elsewhere = lambda stage, work: make_on_dask(stage, work, runtime, lambda: execution.signum)
    wait_for_server()
    bury_the_dead(execution.store.root)

    @flow(  # type: ignore[untyped-decorator]  # mypy does not follow Prefect
        name=execution.pipeline,
        flow_run_name=execution.record.run,
        persist_result=False,
        validate_parameters=False,
        task_runner=ThreadPoolTaskRunner(max_workers=SIDE_BY_SIDE),
    )
    def pipeline(settings: dict[str, Any]) -> State[Any] | None:
        futures: list[PrefectFuture[Any]] = []

        def submit(stage: Stage, **inputs: PrefectFuture[Any] | None) -> PrefectFuture[Any]:
            given = {name: future for name, future in inputs.items() if future is not None}
            futures.append(stage_task(stage, execution).submit(given))
            return futures[-1]

        # inside: Prefect sets a handler of its own around the flow
        with contextlib.suppress(Interrupted), execution.catching_signals():
            recipe(submit, execution.settings)
            for future in futures:
                future.wait()
        if execution.signum:
            did = "were ended where they stood" if execution.at_once else "saved their state"
            return Cancelled(message=f"stopped by a signal; the stages {did}")
        for error in execution.failures.values():
            return Failed(message=str(error))
        table = report.markdown(report.evaluation_table(execution.metrics()), ("what", "value", ""))
        create_markdown_artifact(table, key="evaluation", description=f"evaluation of {execution.record.run}")
        return None

    # Its heartbeat thread sleeps a second at the end of each flow; a run's life is recorded in its own file.
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}), tags(TAG):
        final = pipeline(execution.settings.model_dump(mode="json"), return_state=True)
    if execution.signum:
        raise Interrupted("stopped by a signal; the same command continues", execution.signum)
    for error in execution.failures.values():
        raise error
    if not final.is_completed():
        raise TTrainError(f"Prefect ended the run as {final.name}: {final.message}")


def bury_the_dead(home: Path) -> list[str]:
    """Mark as Crashed what Prefect believes to be running though its process is gone; returns the names of those runs."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas import filters
    from prefect.client.schemas.objects import StateType
    from prefect.states import Crashed

    unfinished = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
    recorded = {run["run"]: run["outcome"] for run in runs.history(home)}
    buried = []
    with contextlib.suppress(Exception), get_client(sync_client=True) as client:  # a courtesy, never a reason to fail
        states = filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=unfinished))
        tagged = filters.FlowRunFilterTags(all_=[TAG])
        for run in client.read_flow_runs(flow_run_filter=filters.FlowRunFilter(tags=tagged, state=states)):
            if recorded.get(run.name, "running") == "running":
                continue
            task_states = filters.TaskRunFilterState(type=filters.TaskRunFilterStateType(any_=unfinished))
            for task_run in client.read_task_runs(
                flow_run_filter=filters.FlowRunFilter(id=filters.FlowRunFilterId(any_=[run.id])),
                task_run_filter=filters.TaskRunFilter(state=task_states),
            ):
                client.set_task_run_state(task_run.id, Crashed(message="its process is gone"), force=True)
            client.set_flow_run_state(run.id, Crashed(message="its process is gone"), force=True)
            buried.append(run.name)
    return buried
