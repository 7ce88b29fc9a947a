"""Run a plan without Prefect."""

from __future__ import annotations

from ttrain.engine.execution import PipelineRun
from ttrain.errors import Interrupted


def run_plain(execution: PipelineRun) -> None:
    """Build the stages of the plan one after the other, in this thread."""
    for planned in execution.plan.stages:
        if planned.reused:
            continue
        execution.run_stage(planned, lambda line: None)
        if execution.signum:
            raise Interrupted(f"stopped after stage {planned.stage.name}", execution.signum)
