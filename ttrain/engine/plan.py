"""The plan of a pipeline, as it is shown and run; the record of one that found everything cached."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ttrain.config import Settings
from ttrain.core.html_table import html_table
from ttrain.engine.graph import EVERYTHING, NOTHING_AGAIN, Graph, Planned, Rerun, Selection
from ttrain.store import runs
from ttrain.store.artifacts import ArtifactStore

if TYPE_CHECKING:
    from ttrain.engine.estimate import Estimate
    from ttrain.engine.labels import Labels

COLUMNS = ("stage", "state", "key", "why")


@dataclass(frozen=True, eq=False)
class Plan(Sequence[Planned]):
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
            return {stage.name: stage for stage in self.stages}[index]
        return self.stages[index]

    def __iter__(self) -> Iterator[Planned]:
        return iter(self.stages)

    def __str__(self) -> str:
        rows = [COLUMNS, *self.rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join("  ".join([*map(str.ljust, row, widths), row[3]]).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        """The plan in a notebook."""
        waiting = sum(stage.state == "run" for stage in self.stages)
        return html_table(COLUMNS, self.rows(), f"{self.pipeline}: {waiting} of {len(self)} stages will run")

    @property
    def is_cached(self) -> bool:
        """Whether nothing would run."""
        return all(stage.state == "cached" for stage in self.stages)

    @property
    def results(self) -> dict[str, Mapping[str, Any]]:
        """The results of the stages that are in the store."""
        return {stage.name: stage.artifact.result for stage in self.stages if stage.artifact}

    @property
    def left_out(self) -> list[str]:
        """The stages of the pipeline that the selection leaves out."""
        planned = {stage.name for stage in self.stages}
        return [name for name in self.graph if name not in planned]

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(stage, state, key, why) for a table."""
        return [stage.row for stage in self.stages]

    def to_json(self) -> dict[str, Any]:
        """What `ttrain pipeline plan --json` prints."""
        return {
            "pipeline": self.pipeline,
            "stages": [stage.to_json() for stage in self.stages],
            "compared_with": self.compared_with or None,
            "estimate": self.estimate.to_json(),
        }

    @functools.cached_property
    def estimate(self) -> Estimate:
        """About how long it takes on this machine, and how often it passes over its data."""
        from ttrain.engine.estimate import estimate

        return estimate(self.stages, self.settings, self.store)


def record_cached(plan: Plan, labels: Labels) -> runs.RecordedRun | None:
    """Record a run that found everything cached; None where it did not, or has the models to register: where no run of them
    had this name, or the newest that had it was cut short."""
    from ttrain.engine.provenance import with_absolute_paths
    from ttrain.reports import summary

    if not plan.is_cached:
        return None
    home, settings = plan.store.root, plan.settings
    same = runs.equal_runs(home, {stage.name: stage.key for stage in plan})
    newest = next(same, None)
    named = itertools.chain([newest] if newest else [], same)
    own = next((run for run in named if run["settings"]["name"] == settings.name), None)
    if newest and (own is None or runs.is_cut_short(own)):
        return None
    recorded = with_absolute_paths(settings).model_dump(mode="json")
    metrics = summary.metrics_of(plan.results)
    equals = runs.made_by(own) if own else None
    return runs.record_cached(home, plan.pipeline, plan.stages, recorded, metrics, equals, labels.to_json())
