"""Run a recipe without Prefect."""

from __future__ import annotations

from ttrain.errors import Interrupted
from ttrain.pipeline.execution import PipelineRun
from ttrain.pipeline.recipe import Recipe
from ttrain.stages import Stage
from ttrain.store.layout import Artifact


def run_plain(execution: PipelineRun, recipe: Recipe) -> None:
    """Build the stages of the recipe one after the other, in this thread."""

    def build(stage: Stage, **inputs: Artifact | None) -> Artifact:
        artifacts = {name: artifact for name, artifact in inputs.items() if artifact is not None}
        artifact, _ = execution.run_stage(stage, artifacts, lambda line: None)
        if execution.signum:
            raise Interrupted(f"stopped after stage {stage.name}", execution.signum)
        return artifact

    recipe(build, execution.settings)
