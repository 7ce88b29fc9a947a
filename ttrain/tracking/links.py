"""Which artifact and which run each stage of a pipeline's run stands for: one tag of that run, `ttrain.stages`, as JSON.

{"sft": {"key": "3f1c...", "run": "0a1b..."}, ...}    the artifact's key, and MLflow's id of the run with its curves
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ttrain.core.files import exclusive, parse_json
from ttrain.tracking import published
from ttrain.tracking.journal import Entry
from ttrain.tracking.runs import Run

STAGES: Final = "ttrain.stages"
OLDER: Final = {"ttrain.key.": "key", "ttrain.child.": "run"}  # followed by the stage: a tag for each, until 2026-11
LOCK: Final = Path("mlflow", "links.lock")  # in the home: stages, also of other processes, add to the one tag


def stages_of(tags: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """What the tags of a pipeline's run say of its stages, by the stage's name; also those of older runs."""
    found: dict[str, dict[str, str]] = {}
    for tag, value in tags.items():
        for prefix, what in OLDER.items():
            if tag.startswith(prefix):
                found.setdefault(tag.removeprefix(prefix), {})[what] = value
    try:
        noted = parse_json(tags.get(STAGES, "{}"))
    except ValueError:
        noted = {}
    for stage, about in noted.items() if isinstance(noted, dict) else ():
        if isinstance(about, dict):
            found.setdefault(stage, {}).update({str(name): str(value) for name, value in about.items()})
    return found


def stages(run: Run, entry: Entry) -> None:
    """The run notes the artifacts of its stages."""
    _add(run, str(run.id), entry.data["values"])


def to_parent(run: Run, entry: Entry) -> None:
    """The pipeline's run names the one that holds this stage's curves."""
    if parent := run.store.parent_id(run):
        _add(run, parent, {entry.data["stage"]: {"run": str(run.id)}})


def made_by(run: Run, entry: Entry) -> str | None:
    """The pipeline's run names the run that made a stage which it took from the cache."""
    stage, key = entry.data["stage"], entry.data["key"]
    experiment = run.store.experiment_id(run.box.about.get("experiment"))
    wanted = f"tags.`ttrain.key` = '{key}' AND tags.`ttrain.stage` = '{stage}' AND attributes.status = 'FINISHED'"
    found = run.call("search_runs", [experiment], wanted, max_results=1, order_by=["attributes.end_time DESC"])
    found = found or _killed_after_publishing(run, experiment, wanted)
    if not found:
        return None
    _add(run, str(run.id), {stage: {"run": found[0].info.run_id}})
    return str(found[0].info.run_id)


def _killed_after_publishing(run: Run, experiment: str, wanted: str) -> list[Any]:
    """The run that made a whole artifact, but was noted as killed before it could say so: from now on it is finished."""
    killed = run.call("search_runs", [experiment], wanted.replace(published.FINISHED, "KILLED"))
    found = [other for other in killed if published.artifact_of(run.store.home, other.data.tags)][:1]
    for other in found:
        run.call("set_terminated", other.info.run_id, published.FINISHED, other.info.end_time)
    return found


def _add(run: Run, parent: str, noted: Mapping[str, Mapping[str, str]]) -> None:
    """Adds to the tag of `parent`. Read and written in one turn: stages side by side would lose each other's words."""
    with exclusive(run.store.home / LOCK):
        known = stages_of(run.call("get_run", parent).data.tags)
        for stage, about in noted.items():
            known[stage] = {**known.get(stage, {}), **about}
        run.call("set_tag", parent, STAGES, json.dumps(known))
