"""Run a plan without Prefect."""

from __future__ import annotations

from ttrain.errors import Interrupted
from ttrain.pipeline.execution import PipelineRun


def run_plain(execution: PipelineRun) -> None:
    """Build the stages of the plan one after the other, in this thread."""
    for planned in execution.planned:
        if planned.reused:
            continue
        execution.run_stage(planned, lambda line: None)
        if execution.signum:
            raise Interrupted(f"stopped after stage {planned.stage.name}", execution.signum)
