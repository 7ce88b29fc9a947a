"""Run a plan as a Prefect flow (`prefect_run.py`), or without Prefect."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from ttrain.core.files import JsonObject
from ttrain.core.terminal import print_plain, table
from ttrain.core.text import format_duration
from ttrain.engine.display import StageDisplay
from ttrain.engine.execution import PipelineRun, screen
from ttrain.engine.graph import Plan
from ttrain.errors import UsageError
from ttrain.flows import servers
from ttrain.nightly import notify
from ttrain.store.runs import NIGHTLY, NOTHING_NEW
from ttrain.tracking.pusher import track


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

    `on_begin` gets the run before its first stage. Raises the first stage's error or Interrupted.
    """
    settings = plan.settings
    engine = options.engine
    if settings.runtime.sharding == "dask" and engine != "prefect":
        raise UsageError(
            f"runtime.sharding is dask, which goes through Prefect, but --engine is {engine}; "
            f"try --engine prefect"
        )
    is_on_device = settings.runtime.device in ("cuda", "mps")
    if is_on_device and any(p.state == "run" and p.stage.loads_torch for p in plan.stages):
        from ttrain.train.precision import resolve_device  # torch, where a device is named

        resolve_device(settings.runtime.device)  # not after minutes, at the first training
    with screen(console, settings.runtime.log_level, options.display) as shown_on:
        if engine == "prefect" and not options.in_flow:
            begin(plan.store.root)
        night = {"night": options.night} if options.night else {}
        execution = PipelineRun(plan, shown_on, facts={**options.labels, **night})
        track(execution)
        try:
            with execution.recorded():
                on_begin(execution)
                execution.raise_if_signalled()
                with execution.stopping_at(options.stop_at):
                    if engine == "prefect":
                        from ttrain.flows.prefect_run import (
                            run_in_prefect,
                        )  # after `begin`, which sets what it reads

                        run_in_prefect(execution, in_flow=options.in_flow, night=options.night)
                    else:
                        with execution.catching_signals():
                            execution.run_stages()
        finally:
            print_summary(execution, execution.outcome, console)
            if plan.pipeline != NIGHTLY:  # a night sends its own
                notify.send_end_of_run(settings.notify, settings.name, execution.record.snapshot())
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
    took = format_duration(execution.seconds)
    if outcome == "completed":
        print_plain(console, f"done in {took}; run {execution.record.run}")
        return
    if outcome == NOTHING_NEW:  # the night says why
        return
    next_step = ""
    if execution.plan.pipeline != NIGHTLY:  # which says its own
        is_mistake = any(
            getattr(error, "is_mistake", False) for error in execution.failures.values()
        )
        next_step = (
            ", and the command continues there once the mistake is fixed"
            if is_mistake
            else ", and the same command continues there"
        )
    print_plain(
        console,
        f"{outcome} after {took}; finished stages are kept{next_step} "
        f"(`ttrain pipeline status` shows the stages and their logs)",
    )


def silence_prefect() -> None:
    """Send Prefect's logs to its API and not to the terminal."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).propagate = False


def reread_environment() -> None:
    """Let an imported Prefect read the environment again."""
    if "prefect" in sys.modules:
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()
