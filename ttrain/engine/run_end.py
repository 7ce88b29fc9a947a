"""What a run prints at its end."""

from functools import partial

from rich.console import Console

from ttrain.core.terminal import print_plain, table
from ttrain.core.text import format_duration
from ttrain.engine.execution import PipelineRun
from ttrain.store import runs
from ttrain.store.runs import NIGHTLY


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
    if outcome == runs.NOTHING_NEW:  # the night says why
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
