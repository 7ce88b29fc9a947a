"""What surrounds the stages of a run, whichever engine runs them: display, signals, the record's end, the summary; and the
run of one stage alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from rich.console import Console

from ttrain.core.signals import handling_signals
from ttrain.core.terminal import print_plain, showing_logs, table
from ttrain.core.text import format_duration
from ttrain.engine.execution import PipelineRun
from ttrain.engine.plan import Plan
from ttrain.engine.planner import no_stage
from ttrain.engine.progress_display import Display, StageDisplay
from ttrain.errors import Interrupted, UsageError
from ttrain.store.layout import Artifact
from ttrain.store.runs import NIGHTLY, NOTHING_NEW


@contextlib.contextmanager
def screen(console: Console, log_level: str, display: StageDisplay | None = None) -> Iterator[StageDisplay]:
    """A display that ends with the block, as the block does on a signal that no execution handles."""
    try:
        drawn = contextlib.nullcontext(display) if display else contextlib.closing(Display(console, log_level))
        with drawn as shown_on, handling_signals(_interrupt), showing_logs(log_level):
            yield shown_on
    except EarlySignal as early:
        raise Interrupted(str(early), early.args[0]) from None


class EarlySignal(KeyboardInterrupt):
    """Not an Exception, so that no library's or tracker's `except Exception` takes it for an error of its own."""

    def __str__(self) -> str:
        return "interrupted while no stage was running"


def _interrupt(signum: int) -> None:
    raise EarlySignal(signum)


def run_one_stage(
    name: str, plan: Plan, console: Console, on_begin: Callable[[PipelineRun], object]
) -> tuple[Artifact, str]:
    """Build one stage of the plan alone; returns its artifact and state. `on_begin` gets the run before the stage begins.

    Raises UsageError where it is unknown or an input is missing.
    """
    planned = {each.stage.name: each for each in plan.stages}
    if name not in planned:
        raise no_stage(name, planned, plan.settings)
    chosen = planned[name]
    if chosen.key is None:
        needed = plan.graph.needed_by(name) - {name}
        missing = [each for each in planned if each in needed and not planned[each].artifact]
        commands = ", ".join(f"`ttrain stage run {each}`" for each in missing)
        raise UsageError(
            f"stage {name} {chosen.why[0]}; run first, with the same settings: {commands}; "
            f"or all at once: `ttrain pipeline run full`"
        )
    chosen = replace(chosen, sources=chosen.inputs)  # the artifacts that are there
    with screen(console, plan.settings.runtime.log_level) as display:
        execution = PipelineRun(replace(plan, pipeline=f"stage-{name}", stages=[chosen]), display)
        on_begin(execution)
        with execution.recorded():
            execution.raise_if_signalled()
            with execution.catching_signals():
                artifact, state = execution.run_stage(chosen, lambda line: None)
            artifact = plan.store.complete(artifact, report=lambda line: display.say(f"  {name}: {line}"))
            print_plain(console, f"artifact: {artifact.path}")
    return artifact, state


def print_summary(execution: PipelineRun, outcome: str, console: Console) -> None:
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
    if execution.plan.pipeline == NIGHTLY:  # which says its own
        next_step = ""
    say(
        f"{outcome} after {took}; finished stages are kept{next_step} "
        f"(`ttrain pipeline status` shows the stages and their logs)"
    )
