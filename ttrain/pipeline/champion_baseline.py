"""The champion as a baseline of a run that is no night: what it scored on the same held-out records."""

from __future__ import annotations

from typing import Any

from ttrain import tracking
from ttrain.core.files import read_object
from ttrain.evaluate.scores import FILE, sums_in
from ttrain.store.artifacts import Store
from ttrain.store.layout import Artifact

STAGE = "evaluate-champion"  # the stage of a night whose results these stand for


def of(evaluation: Artifact, name: str, store: Store) -> dict[str, dict[str, Any]]:
    """{STAGE: what the champion of this name scored when it was made}, of the same records and in suites, without computing.

    A night scores its champion on its own held-out data instead. {} where the champion is what was evaluated, is in an
    MLflow that has to be asked over the network, or where its evaluation is in no store here.
    """
    key = tracking.champion_keys_here(store.root, name).get("evaluate")
    champion = store.read(store.path("evaluate", key)) if key and key != evaluation.key else None
    return {} if champion is None else {STAGE: _of_same_records(evaluation, champion)}


def _of_same_records(own: Artifact, champion: Artifact) -> dict[str, Any]:
    """What of the champion's evaluation can stand beside the other: figures of the same records, counted alike: a loss per
    token of another tokenizer tells nothing."""
    mine, other = (read_object(one.path / FILE) for one in (own, champion))

    def counts(metric: str) -> tuple[bool, bool]:
        """Whether both scored the same records, and counted them alike."""
        first, second = sums_in(mine, metric), sums_in(other, metric)
        if first is None or second is None:
            return False, False
        return first[2] == second[2], first[1] == second[1]

    result = champion.result
    same = [metric for metric in result.get("metrics", {}) if all(counts(metric))]
    found: dict[str, Any] = {
        group: {name: result[group][name] for name in same if name in result.get(group, {})}
        for group in ("metrics", "intervals")
    }
    if suites := result.get("suites"):
        tasks = [
            task
            for task in suites["tasks"]
            if not any(counts(f"{task['task']}/{task['figure']}/{model}") == (True, False) for model in task["models"])
        ]
        found["suites"] = {**suites, "tasks": tasks}
    return found
