"""Runs a recipe under Prefect: one flow run a pipeline run, one task run a stage, what is independent side by side."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flows import flow_runs, server_processes, servers, temporary_server
from flows.flow_runs import TAG, bury_the_dead, current_flow_run, obeying_cancellation
from tasks.best_effort import courtesy
from ttrain.config import Auth
from ttrain.errors import Interrupted, TTrainError, UsageError
from ttrain.pipeline import plan_table
from ttrain.pipeline.execution import REPORT, Execution
from ttrain.pipeline.planned import Recipe
from ttrain.reports import summary
from ttrain.stages import Stage
from ttrain.store.layout import Artifact

log = logging.getLogger("ttrain")

SIDE_BY_SIDE = 4  # the widest place of a recipe, and one to spare


def begin(home: Path, auth: Auth = "token") -> Callable[[], None]:
    """Choose the server, and start one where there is none, before Prefect is imported; returns what waits for it."""
    if importlib.util.find_spec("prefect") is None:
        raise UsageError("Prefect is not installed; try: pip install prefect, or run without it: --engine none")
    servers.check_named(home)
    os.environ.update(servers.prefect_environment(home))
    # The API gets these logs, the terminal does not: the user sees ttrain's own progress.
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).propagate = False
    return temporary_server.own_server(home, auth)


def run(execution: Execution, recipe: Recipe, wait_for_server: Callable[[], None], *, in_flow: bool = False) -> None:
    """Run the recipe as a flow, or `in_flow` as a part of the flow run of a deployment that calls this.

    Raises what the first failed stage raised, or Interrupted.
    """
    import httpx
    from prefect import flow, tags
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
    from prefect.states import Cancelled, Completed, Failed, State
    from prefect.task_runners import ThreadPoolTaskRunner

    if execution.settings.runtime.sharding == "dask":
        from tasks.dask_blocks import make_on_dask

        runtime = execution.settings.runtime
        execution.make_parts_elsewhere = lambda stage, work: make_on_dask(stage, work, runtime, lambda: execution.signum)
    if server := server_processes.living(execution.store.root, "mlflow"):
        execution.mlflow_url = f"http://{server_processes.HOST}:{server.port}"
    wait_for_server()
    bury_the_dead(execution.store.root)
    if not temporary_server.is_own():
        with courtesy():
            flow_runs.create_automation()
    if in_flow:
        with execution.catching_signals():
            _rename(execution.record.run)
            _run_stages(execution, recipe)
        _raise_what_happened(execution, "a retry or the next run continues")
        return

    have_ended: list[bool] = []  # true once the stages have

    @flow(  # type: ignore[untyped-decorator]  # mypy does not follow Prefect
        name=execution.pipeline,
        flow_run_name=execution.record.run,
        persist_result=False,
        validate_parameters=False,
        task_runner=ThreadPoolTaskRunner(max_workers=SIDE_BY_SIDE),
    )
    def pipeline(settings: dict[str, Any]) -> State[Any] | None:
        with execution.catching_signals():  # inside: Prefect sets a handler of its own around the flow
            with courtesy():
                flow_runs.claim(execution.store.root)
            _run_stages(execution, recipe)
        have_ended.append(True)
        if execution.signum:
            did = "were ended where they stood" if execution.at_once else "saved their state"
            return Cancelled(message=f"{execution.stop_reason}; the stages {did}")
        for error in execution.failures.values():
            return Failed(message=str(error))
        return None

    # The thread of the heartbeats sleeps a second at the end of each flow, for a server that ends with this process anyhow
    heartbeat = None if temporary_server.is_own() else flow_runs.HEARTBEAT_SECONDS
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: heartbeat}), tags(TAG):
        try:
            final = pipeline(execution.settings.model_dump(mode="json"), return_state=True)
        except httpx.TransportError as error:
            if not have_ended:  # nothing began, or not all
                raise
            log.warning("the Prefect server is gone and was not told how the run ended: %s", error)
            final = Completed()
    _raise_what_happened(execution)
    if not final.is_completed():
        raise TTrainError(f"Prefect ended the run as {final.name}: {final.message}")


def _run_stages(execution: Execution, recipe: Recipe) -> None:
    """Submit every stage to the flow run that this is called in, and wait for them; tell Prefect what came of it."""
    from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
    from prefect.context import TagsContext
    from prefect.futures import PrefectFuture
    from prefect.utilities.urls import url_for

    from tasks.stage import stage_task

    futures: list[PrefectFuture[Any]] = []
    shards: list[PrefectFuture[Any]] = []
    is_limited = _trainings_are_limited()

    def submit(stage: Stage, **inputs: PrefectFuture[Any] | Artifact | None) -> PrefectFuture[Any]:
        given = {name: future for name, future in inputs.items() if future is not None}
        before = shards if stage.uses_ranks else ()  # all of them: one with too few rows ends the run before it trains
        futures.append(stage_task(stage, execution, is_limited=is_limited).submit(given, wait_for=before))
        if stage.reuses_parts:
            shards.append(futures[-1])
        return futures[-1]

    run = execution.record.run
    flow_run_id = str(current_flow_run().id)
    execution.note_prefect(flow_run_id, None if temporary_server.is_own() else url_for("flow-run", obj_id=flow_run_id))
    with courtesy():
        names = ("stage", "state", "key", "why")
        plan = [dict(zip(names, row, strict=True)) for row in plan_table.plan_rows(execution.planned)]
        create_table_artifact(plan, key="plan", description=f"what {run} was going to do")
        if page := execution.page_of():
            create_link_artifact(page, key="mlflow", link_text=f"{run} in MLflow")
    with contextlib.suppress(Interrupted), obeying_cancellation(execution):
        with TagsContext(current_tags=set()):  # those of the flow run are not for its tasks (see `stage_task`)
            recipe(submit, execution.settings)
        for future in futures:
            future.wait()
        _refuse_other_ends(execution, futures)
    with courtesy():
        page = execution.page_of()
        link = f"[The whole report]({page}/artifacts/{REPORT}), with curves.\n\n" if page else ""
        create_markdown_artifact(link + execution.description(), key="report", description=f"report of {run}")
    rows = execution.evaluation_table()
    if rows and not execution.signum and not execution.failures:
        with courtesy():
            table = summary.markdown(rows, ("what", "value", ""))
            create_markdown_artifact(table, key="evaluation", description=f"evaluation of {run}")


def show_decision(table: str, night: str, *, in_flow: bool) -> None:
    """A night's decision, a markdown table, among the artifacts of the deployment's flow run that this is called in, else
    of no run: that of the night's stages has ended."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import ArtifactCreate

    run = current_flow_run().id if in_flow else None
    # `create_markdown_artifact` warns whoever is in no run
    artifact = ArtifactCreate(
        type="markdown", key="decision", description=f"decision of {night}", data=table, flow_run_id=run
    )
    with courtesy(), get_client(sync_client=True) as client:
        client.create_artifact(artifact)


def _refuse_other_ends(execution: Execution, futures: Sequence[Any]) -> None:
    """Raises TTrainError where a stage did not come to its end though none failed and nobody asked it to stop."""
    if execution.signum or execution.failures:
        return
    for future in futures:
        if not future.state.is_completed():
            raise TTrainError(f"Prefect ended a stage as {future.state.name}: {future.state.message}")


def _trainings_are_limited() -> bool:
    """Whether somebody has set a limit on the tag of the stages that train."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    from tasks.stage import TRAINS

    with courtesy(), get_client(sync_client=True) as client:
        with contextlib.suppress(ObjectNotFound):
            client.read_concurrency_limit_by_tag(TRAINS)
            return True
    return False


def _rename(name: str) -> None:
    """Give the flow run of a deployment the name under which `ttrain pipeline status` lists it."""
    from prefect.client.orchestration import get_client

    with courtesy(), get_client(sync_client=True) as client:
        client.set_flow_run_name(current_flow_run().id, name)


def _raise_what_happened(execution: Execution, cure: str = "the same command continues") -> None:
    if execution.signum:
        raise Interrupted(f"{execution.stop_reason}; {cure}", execution.signum)
    for error in execution.failures.values():
        raise error
