"""The plan of a pipeline, as it is shown and run."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ttrain.config import Settings
from ttrain.core.html_table import html_table
from ttrain.engine.graph import EVERYTHING, NOTHING_AGAIN, Graph, Planned, Rerun, Selection
from ttrain.errors import UsageError
from ttrain.store.artifacts import ArtifactStore

if TYPE_CHECKING:
    from ttrain.engine.estimate import Estimate


@dataclass(frozen=True)
class PlannedStage:
    """What a run would do with one stage.

    state    "cached" or "run"
    key      digest of its settings, inputs and code; None while an input has yet to be built
    reasons  why it runs, or what it was found by
    """

    name: str
    state: str
    key: str | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Plan(Sequence[PlannedStage]):
    """The stages of a pipeline in order, each with its state, key and reasons."""

    pipeline: str
    settings: Settings
    store: ArtifactStore
    graph: Graph
    stages: list[Planned]
    selection: Selection = EVERYTHING
    rerun: Rerun = NOTHING_AGAIN
    compared_with: str = ""  # the run that the reasons compare with; empty: the most similar artifacts

    def __len__(self) -> int:
        return len(self.stages)

    def __getitem__(self, index: Any) -> Any:
        """The stage of a number or a name."""
        if isinstance(index, str):
            return {stage.name: stage for stage in self}[index]
        return list(self)[index]

    def __iter__(self) -> Iterator[PlannedStage]:
        return (PlannedStage(each.stage.name, each.state, each.key, tuple(each.why)) for each in self.stages)

    def __str__(self) -> str:
        rows = [("stage", "state", "key", "why"), *self.rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join("  ".join([*map(str.ljust, row, widths), row[3]]).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        """The plan in a notebook."""
        waiting = sum(stage.state == "run" for stage in self)
        caption = f"{self.pipeline}: {waiting} of {len(self)} stages will run"
        return html_table(("stage", "state", "key", "why"), self.rows(), caption)

    @property
    def is_cached(self) -> bool:
        """Whether nothing would run."""
        return all(stage.state == "cached" for stage in self.stages)

    @property
    def left_out(self) -> list[str]:
        """The stages of the pipeline that the selection leaves out."""
        planned = {each.stage.name for each in self.stages}
        return [name for name in self.graph if name not in planned]

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(stage, state, key, why) for a table."""
        from ttrain.engine.planner import plan_rows

        return plan_rows(self.stages)

    def to_json(self) -> dict[str, Any]:
        """What `ttrain pipeline plan --json` prints."""
        from ttrain.engine.planner import plan_json

        planned = plan_json(self.pipeline, self.stages)
        return {**planned, "compared_with": self.compared_with or None, "estimate": self.estimate.to_json()}

    @functools.cached_property
    def estimate(self) -> Estimate:
        """About how long it takes on this machine, and how often it passes over its data."""
        from ttrain.engine.estimate import estimate

        return estimate(self.stages, self.settings, self.store)


def alone(name: str, plan: Plan) -> Plan:
    """The plan of one stage, with the artifacts that are there.

    Raises UsageError if it is unknown or an input is missing.
    """
    from ttrain.engine.planner import no_stage

    planned = {each.stage.name: each for each in plan.stages}
    if name not in planned:
        raise no_stage(name, planned, plan.settings)
    needed = plan.graph.needed_by(name) - {name}
    if missing := [each for each in planned if each in needed and not planned[each].artifact]:
        commands = ", ".join(f"`ttrain stage run {each}`" for each in missing)
        raise UsageError(
            f"stage {name} waits for {', '.join(missing)}; run first, with the same settings: {commands}, "
            f"or all at once: `ttrain pipeline run full --until {name}`"
        )
    chosen = replace(planned[name], sources=planned[name].inputs)
    return replace(plan, pipeline=f"stage-{name}", stages=[chosen])
