"""Run a recipe, with or without Prefect, or one stage alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from rich.console import Console

from ttrain.config import Settings
from ttrain.core.signals import catching_signals, handling_signals
from ttrain.core.terminal import print_plain, showing_logs, table
from ttrain.core.text import format_duration
from ttrain.engine.plain import run_plain
from ttrain.errors import Interrupted, UsageError
from ttrain.flows import recipe
from ttrain.nightly import notify
from ttrain.pipeline.execution import PipelineRun
from ttrain.pipeline.labels import NO_LABELS, Labels
from ttrain.pipeline.plan import no_stage
from ttrain.pipeline.progress_display import Display, StageDisplay
from ttrain.pipeline.recipe import NOTHING_AGAIN, Planned, Recipe, Rerun, planned_part, with_dependencies
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.store.runs import NIGHTLY, NOTHING_NEW


def run_pipeline(
    pipeline: str,
    settings: Settings,
    store: ArtifactStore,
    stages: list[Planned],
    console: Console,
    rerun: Rerun = NOTHING_AGAIN,
    *,
    engine: str = "prefect",
    own_recipe: Recipe | None = None,
    on_begin: Callable[[PipelineRun], object] = lambda execution: None,
    night: str = "",
    labels: Labels = NO_LABELS,
    in_flow: bool = False,
    stop_at: float | None = None,
    display: StageDisplay | None = None,
) -> PipelineRun:
    """Run the plan `stages`, then print the evaluation; returns the execution.

    `own_recipe`: instead of that of the pipeline's name; the plan must be of it. `on_begin` gets the run before its
    first stage. `night`: of which it is a part. The user's `labels` go to its record. `in_flow`: the stages join the Prefect
    flow run that this is called in. `display` shows the stages, instead of the console. At `stop_at`, in seconds since the
    epoch, the stages are asked to save and stop.
    Raises what the first failed stage raised, or Interrupted.
    """
    if settings.runtime.sharding == "dask" and engine != "prefect":
        raise UsageError(
            f"runtime.sharding is dask, which goes through Prefect, but --engine is {engine}; try --engine prefect"
        )
    if settings.runtime.device in ("cuda", "mps") and any(p.state == "run" and p.stage.loads_torch for p in stages):
        from ttrain.train.precision import resolve_device  # loads torch, so only where a device is named

        resolve_device(settings.runtime.device)  # not after minutes, at the first training
    chosen = planned_part(own_recipe or recipe(pipeline), stages)
    with _screen(console, settings.runtime.log_level, display) as shown_on:
        if engine == "prefect":
            from ttrain.flows import prefect_run

            wait_for_server = (lambda: None) if in_flow else prefect_run.begin(store.root, settings.servers.auth)
        part_of = {"night": night} if night else {}
        execution = _begin(pipeline, settings, store, shown_on, stages, rerun, part_of=part_of, labels=labels)
        try:
            with _recorded(execution):
                for planned in stages:
                    if planned.reused:
                        execution.note_reused(planned)
                execution.check_reused()
                on_begin(execution)
                execution.raise_if_signalled()
                with execution.stopping_at(stop_at):
                    if engine == "prefect":
                        prefect_run.run(execution, chosen, wait_for_server, in_flow=in_flow, night=night)
                    else:
                        with execution.catching_signals():
                            run_plain(execution, chosen)
        finally:
            _print_summary(execution, execution.outcome, console)
            if pipeline != NIGHTLY:  # a night sends its own
                notify.send_end_of_run(settings.notify, settings.name, execution.record.snapshot())
    return execution


@contextlib.contextmanager
def _screen(console: Console, log_level: str, display: StageDisplay | None = None) -> Iterator[StageDisplay]:
    """A display that ends with the block, as the block does on a signal that no execution handles."""
    try:
        drawn = contextlib.nullcontext(display) if display else contextlib.closing(Display(console, log_level))
        with drawn as shown_on, handling_signals(_interrupt), showing_logs(log_level):
            yield shown_on
    except _EarlySignal as early:
        raise Interrupted(str(early), early.args[0]) from None


def _begin(
    pipeline: str,
    settings: Settings,
    store: ArtifactStore,
    display: StageDisplay,
    stages: Sequence[Planned],
    rerun: Rerun,
    **options: Any,
) -> PipelineRun:
    """Create the execution. A signal meanwhile waits for it, so that its record is closed; a second one does not."""
    signums: list[int] = []

    def on_signal(signum: int) -> None:
        signums.append(signum)
        display.say("stopping before a stage begins (again to end at once)")

    with catching_signals(on_signal, _EarlySignal):
        execution = PipelineRun(pipeline, settings, store, display, stages, rerun, **options)
    execution.signum = signums[0] if signums else 0
    return execution


def _recorded(execution: PipelineRun) -> contextlib.AbstractContextManager[None]:
    """Close the record after the block. A first signal is too late to change the outcome of the run; a second one ends it at
    once."""
    return execution.recorded(
        lambda: contextlib.nullcontext() if execution.signum else catching_signals(lambda signum: None, _EarlySignal)
    )


class _EarlySignal(KeyboardInterrupt):
    """Not an Exception, so that no library's or tracker's `except Exception` takes it for an error of its own."""

    def __str__(self) -> str:
        return "interrupted while no stage was running"


def _interrupt(signum: int) -> None:
    raise _EarlySignal(signum)


def run_one_stage(
    name: str,
    settings: Settings,
    store: ArtifactStore,
    stages: list[Planned],
    console: Console,
    rerun: Rerun,
) -> tuple[Artifact, str]:
    """Build one stage of the plan alone; returns its artifact and state. Raises UsageError where it is unknown or an
    input is missing."""
    planned = {p.stage.name: p for p in stages}
    if name not in planned:
        raise no_stage(name, planned, settings)
    if planned[name].key is None:
        needed = with_dependencies(name, {p.stage.name: frozenset(p.waits_for) for p in stages}) - {name}
        commands = ", ".join(f"`ttrain stage run {p}`" for p in planned if p in needed)
        raise UsageError(
            f"stage {name} {planned[name].why[0]}; run first, with the same settings: {commands}; "
            f"or all at once: `ttrain pipeline run full`"
        )
    stage = planned[name].stage
    with _screen(console, settings.runtime.log_level) as display:
        execution = _begin(f"stage-{name}", settings, store, display, [planned[name]], rerun)
        with _recorded(execution):
            execution.raise_if_signalled()
            with execution.catching_signals():
                artifact, state = execution.run_stage(stage, planned[name].inputs, lambda line: None)
            artifact = store.complete(artifact, report=lambda line: display.say(f"  {name}: {line}"))
            print_plain(console, f"artifact: {artifact.path}")
    return artifact, state


def _print_summary(execution: PipelineRun, outcome: str, console: Console) -> None:
    """Print the evaluation, or how to continue."""
    rows = execution.evaluation_table() if outcome == "completed" else []
    if rows:
        console.print()
        table(("evaluation", "value", ""), rows, console)
        console.print()
    took, say = format_duration(execution.seconds), partial(print_plain, console)
    if outcome == "completed":
        say(f"done in {took}; run {execution.record.run}")
        return
    if outcome == NOTHING_NEW:  # the night says why
        return
    next_step = ", and the same command continues there"
    if any(getattr(error, "is_mistake", False) for error in execution.failures.values()):
        next_step = ", and the command continues there once the mistake is fixed"
    if execution.pipeline == NIGHTLY:  # which says its own
        next_step = ""
    say(
        f"{outcome} after {took}; finished stages are kept{next_step} "
        f"(`ttrain pipeline status` shows the stages and their logs)"
    )
