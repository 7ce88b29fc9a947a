"""Run a plan, with or without Prefect."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console

from ttrain.config import Settings
from ttrain.engine.plain import run_plain
from ttrain.engine.run import begin, print_summary, recorded, screen
from ttrain.errors import UsageError
from ttrain.nightly import notify
from ttrain.pipeline.execution import PipelineRun
from ttrain.pipeline.graph import NOTHING_AGAIN, Planned, Rerun
from ttrain.pipeline.labels import NO_LABELS, Labels
from ttrain.pipeline.progress_display import StageDisplay
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.runs import NIGHTLY


def run_pipeline(
    pipeline: str,
    settings: Settings,
    store: ArtifactStore,
    stages: list[Planned],
    console: Console,
    rerun: Rerun = NOTHING_AGAIN,
    *,
    engine: str = "prefect",
    on_begin: Callable[[PipelineRun], object] = lambda execution: None,
    night: str = "",
    labels: Labels = NO_LABELS,
    in_flow: bool = False,
    stop_at: float | None = None,
    display: StageDisplay | None = None,
) -> PipelineRun:
    """Run the plan `stages`, then print the evaluation; returns the execution.

    `on_begin` gets the run before its first stage. `night`: of which it is a part. The user's `labels` go to its record.
    `in_flow`: the stages join the Prefect flow run that this is called in. `display` shows the stages, instead of the
    console. At `stop_at`, in seconds since the epoch, the stages are asked to save and stop.

    Raises what the first failed stage raised, or Interrupted.
    """
    if settings.runtime.sharding == "dask" and engine != "prefect":
        raise UsageError(
            f"runtime.sharding is dask, which goes through Prefect, but --engine is {engine}; try --engine prefect"
        )
    if settings.runtime.device in ("cuda", "mps") and any(p.state == "run" and p.stage.loads_torch for p in stages):
        from ttrain.train.precision import resolve_device  # loads torch, so only where a device is named

        resolve_device(settings.runtime.device)  # not after minutes, at the first training
    with screen(console, settings.runtime.log_level, display) as shown_on:
        if engine == "prefect":
            from ttrain.flows import prefect_run

            wait_for_server = (lambda: None) if in_flow else prefect_run.begin(store.root, settings.servers.auth)
        part_of = {"night": night} if night else {}
        execution = begin(pipeline, settings, store, shown_on, stages, rerun, part_of=part_of, labels=labels)
        try:
            with recorded(execution):
                for planned in stages:
                    if planned.reused:
                        execution.note_reused(planned)
                execution.check_reused()
                on_begin(execution)
                execution.raise_if_signalled()
                with execution.stopping_at(stop_at):
                    if engine == "prefect":
                        prefect_run.run(execution, wait_for_server, in_flow=in_flow, night=night)
                    else:
                        with execution.catching_signals():
                            run_plain(execution)
        finally:
            print_summary(execution, execution.outcome, console)
            if pipeline != NIGHTLY:  # a night sends its own
                notify.send_end_of_run(settings.notify, settings.name, execution.record.snapshot())
    return execution
