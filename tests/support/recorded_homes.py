"""Homes with runs on record, made in milliseconds: records, artifacts with curves, MLflow."""

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.night_files import artifact
from support.tracked_stores import pushed

from ttrain.config import Settings
from ttrain.core.files import write_json
from ttrain.core.hashing import digest_of
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.runs import process_started

BEGAN = 1_795_000_000.0  # seconds since 1970, of the first run
TOKENS_PER_STEP = 512
NONE_SUCH = {"pid": 2**22 + 1, "started": 1.0, "host": platform.node()}  # a process that is gone
PROVENANCE = {"ttrain": "0", "python": "3.11.9", "libraries": {"torch": "2.13.0"}}


@dataclass
class Made:
    """A stage of a run to be made: `losses` by step, None where the loss was not finite."""

    stage: str
    losses: Sequence[float | None] = ()
    outcome: str = "completed"
    key: str = ""
    result: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)  # stage, key, content
    files: Mapping[str, str] = field(default_factory=dict)  # name: sha256
    noted: Mapping[str, Any] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)  # files of the artifact

    def __post_init__(self) -> None:
        mappings = map(dict, (self.result, self.files, self.inputs))
        self.key = self.key or digest_of([self.stage, list(self.losses), *mappings])


def rows_of(losses: Sequence[float | None], began: float) -> list[dict[str, Any]]:
    rows = []
    for step, loss in enumerate(losses, start=1):
        metrics: dict[str, float | None] = {"loss": loss, "lr": 0.001 * step, "grad_norm": 1 / step}
        if step % 4 == 0:
            metrics["validation_loss"] = None if loss is None else loss + 0.125
        row = {"step": step, "tokens": TOKENS_PER_STEP * step, "time": began + 2.0 * step}
        rows.append({**row, "metrics": metrics})
    return rows


def make_run(
    home: Path,
    name: str,
    stages: Sequence[Made],
    *,
    number: int = 0,
    outcome: str = "completed",
    settings: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    tracked: bool = False,
    **noted: Any,
) -> str | None:
    """Record a run and its artifacts; if `tracked`, push it to MLflow and return its id there."""
    began = BEGAN + 1000 * number
    listed = []
    for made in stages:
        if made.outcome == "completed":
            _make_artifact(home, name, made, began)
        stage = {"name": made.stage, "outcome": made.outcome, "key": made.key, "seconds": 5.5}
        listed.append({**stage, **made.noted})
    record = {"run": name, "pipeline": name.split("-")[0], "outcome": outcome, "stages": listed}
    record |= {"started": "", "started_unix": began, "seconds": 60.5, "process": NONE_SUCH}
    record["metrics"] = dict(metrics or {})
    record["settings"] = Settings.model_validate(dict(settings or {})).model_dump(mode="json")
    record |= {"tracking": {"run_id": None, "url": None}, **noted}
    path = home / "runs" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record)
    if not tracked:
        return None
    [run_id] = pushed(home, [name])
    write_json(path, {**record, "tracking": {"run_id": run_id, "url": None}})
    return run_id


def _make_artifact(home: Path, run: str, made: Made, began: float) -> None:
    files = dict(made.texts)
    if made.losses:
        lines = (json.dumps(row) + "\n" for row in rows_of(made.losses, began))
        files["run/metrics.jsonl"] = "".join(lines)
    names = ("stage", "key", "content")
    sources = {name: dict(zip(names, source, strict=True)) for name, source in made.inputs.items()}
    read = [{"name": name, "sha256": digest} for name, digest in made.files.items()]
    ingredients = {"stage": made.stage, "settings": {}, "code": {}}
    ingredients["inputs"] = {name: source["content"] for name, source in sources.items()}
    ingredients["files"] = {"train": read} if read else {}
    manifest = {"inputs": sources, "result": dict(made.result), "ingredients": ingredients}
    manifest |= {"seconds": 5.5, "provenance": {**PROVENANCE, "run": run}}
    artifact(ArtifactStore(home), made.stage, made.key, files, began + 30.0, **manifest)


def alive() -> dict[str, Any]:
    return {"pid": os.getpid(), "started": process_started(os.getpid()), "host": platform.node()}


def falling(steps: int, to: float = 3.0, *, gap: int = 0) -> list[float | None]:
    losses = [to + 5 * math.exp(-step / (steps / 4)) for step in range(1, steps + 1)]
    return [None if step == gap else round(loss, 6) for step, loss in enumerate(losses, start=1)]
