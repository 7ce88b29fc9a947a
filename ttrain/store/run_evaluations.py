"""Evaluations that a user made of the models of a run afterwards, `ttrain eval --track`: a file each, beside the run;
and the shards whose held-out part they read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ttrain.config.training import TRAINING_STAGES
from ttrain.core.files import PRIVATE_FILE, JsonDict, private_directory, read_object, write_json
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.integrity import verify_artifact
from ttrain.store.layout import Artifact
from ttrain.store.runs import new_name


@dataclass(frozen=True)
class RunEvaluation:
    """The results of one model of a run."""

    run: str
    name: str  # as trackers show it
    model: str  # as the user named it
    evaluated: str  # stage and key of its artifact
    metrics: dict[str, float]
    results: JsonDict
    items: list[Any]
    tables: dict[str, JsonDict]  # by file: {"columns": [...], "data": [[...]]}
    time: float = field(default_factory=time.time)  # seconds since 1970
    id: str = ""

    def write(self, home: Path) -> None:
        """Write it to `runs/RUN.evaluations/`."""
        folder = private_directory(folder_of(home, self.run))
        name = new_name("eval", sorted((path.stem for path in folder.glob("*.json")), reverse=True))
        write_json(folder / f"{name}.json", {**asdict(self), "id": name}, PRIVATE_FILE)


def folder_of(home: Path, run: str) -> Path:
    """The folder of a run's evaluations."""
    return home / "runs" / f"{run}.evaluations"


def evaluations_of(home: Path, run: str) -> Iterator[RunEvaluation]:
    """The evaluations of a run, the oldest first."""
    for path in sorted(folder_of(home, run).glob("*.json")):
        if written := read_object(path):
            yield RunEvaluation(**written)


def heldout_shards(artifact: Artifact | None, store: ArtifactStore) -> dict[str, Artifact]:
    """The shards that a model and its base models were trained on, by part."""
    parts = {f"shards-{row.dataset}": row.part for row in TRAINING_STAGES.values()}
    shard_artifacts: dict[str, Artifact] = {}
    visited: set[tuple[str, str]] = set()  # the paths through the inputs of nights double every night
    waiting = [artifact] if artifact else []
    while waiting:
        for used in waiting.pop().manifest["inputs"].values():
            name = (used["stage"], used["key"])
            ancestor = None if name in visited else store.find(*name)
            visited.add(name)
            if ancestor is None:
                continue
            waiting.append(ancestor)
            part_name = parts.get(ancestor.stage)
            if part_name and not any(name.startswith("heldout/") for name in ancestor.absent):
                verify_artifact(ancestor, ("heldout",))
                shard_artifacts.setdefault(part_name, ancestor)
    return shard_artifacts
