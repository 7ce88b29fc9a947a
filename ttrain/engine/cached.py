"""A run that found everything cached: its record and its results."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ttrain.engine.plan import Plan
from ttrain.store import runs as run_records
from ttrain.store.runs import RecordedRun

if TYPE_CHECKING:
    from ttrain.engine.labels import Labels


def cached_results(planned: Plan) -> dict[str, Mapping[str, Any]]:
    """The results of the cached stages."""
    return {each.stage.name: each.artifact.result for each in planned.stages if each.artifact}


def record_cached(planned: Plan, labels: Labels) -> RecordedRun | None:
    """Record a run that found everything cached; None where it did not, or has the models to register: where no run of them
    had this name, or the newest that had it was cut short."""
    from ttrain.engine.provenance import with_absolute_paths
    from ttrain.reports import summary

    store = planned.store
    if not planned.is_cached:
        return None
    runs = run_records.equal_runs(store.root, {stage.stage.name: stage.key for stage in planned.stages})
    equals = None
    if any_name := next(runs, None):
        runs = itertools.chain([any_name], runs)
        newest = next((run for run in runs if run["settings"]["name"] == planned.settings.name), None)
        if newest is None or run_records.is_cut_short(newest):
            return None
        equals = next(filter(None, map(run_records.made_by, itertools.chain([newest], runs))), None)
    settings = with_absolute_paths(planned.settings).model_dump(mode="json")
    metrics = summary.metrics_of(cached_results(planned))
    facts = {"metrics": metrics, "equals": equals, **labels.to_json()}
    return run_records.record_cached(store.root, planned.pipeline, planned.stages, settings, facts)
