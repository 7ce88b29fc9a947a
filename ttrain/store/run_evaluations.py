"""Evaluations that a user made of the models of a run afterwards, `ttrain eval --track`: a file each, beside the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ttrain.core.files import PRIVATE_FILE, JsonDict, private_directory, read_object, write_json
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
