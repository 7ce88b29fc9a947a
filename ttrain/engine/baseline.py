"""The champion's results, as a baseline for a run that does not score it itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ttrain.core.files import JsonDict, read_object
from ttrain.evaluate.task_result import FILE, scores_in
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.store.registry import Registry

STAGE = "evaluate-champion"  # the stage of a night whose results these stand for


def champion_results(evaluation: Artifact, name: str, store: ArtifactStore) -> dict[str, JsonDict]:
    """Return {STAGE: recorded scores of the champion of this name} on the same records and in suites; nothing is computed.

    A night scores its champion on its own held-out data instead. Returns {} if the champion is the evaluated model,
    or if the champion's evaluation is not in the local store.
    """
    model_set = Registry(store.root).champion(name)
    key = model_set.keys.get("evaluate") if model_set else None
    champion = store.read(store.path("evaluate", key)) if key and key != evaluation.key else None
    return {} if champion is None else {STAGE: _comparable_results(evaluation, champion)}


def _comparable_results(evaluation: Artifact, champion: Artifact) -> JsonDict:
    """Select the champion's figures that are comparable: of the same records and counted alike. A loss per
    token of another tokenizer is not comparable."""
    scores = [read_object(artifact.path / FILE) for artifact in (evaluation, champion)]

    def same(metric: str) -> tuple[bool, bool]:
        """Return (both scored the same records, both counted them alike)."""
        first, second = (scores_in(contents, metric) for contents in scores)
        if first is None or second is None:
            return False, False
        return first.records == second.records, first.sizes == second.sizes

    result = champion.result
    names = [metric for metric in result.get("metrics", {}) if all(same(metric))]
    comparable: JsonDict = {
        group: {name: result[group][name] for name in names if name in result.get(group, {})}
        for group in ("metrics", "intervals")
    }
    if suites := result.get("suites"):

        def is_comparable(task: Mapping[str, Any]) -> bool:
            metrics = (f"{task['task']}/{task['figure']}/{model}" for model in task["models"])
            return not any(same(metric) == (True, False) for metric in metrics)

        comparable["suites"] = {**suites, "tasks": list(filter(is_comparable, suites["tasks"]))}
    return comparable
