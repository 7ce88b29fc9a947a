"""What the cost grows with: runs in the history, stages, files of an artifact, input files, tracked runs.

    python bench/scale.py                      all of it, up to 10,000 of each; some two minutes
    python bench/scale.py --most 100 --only runs,inputs

Each line is a number of things and the milliseconds that one question then takes, in a process that has its modules loaded
and a disk that is warm; `status` is a process of its own. Ten times as many things may take at most 15 times as long.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sqlite3
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import common
from common import TTRAIN, Table

from ttrain import tracking
from ttrain.config import Settings, SourceConfig
from ttrain.core.hashing import DigestCache
from ttrain.pipeline.artifact_commands import InTracker
from ttrain.pipeline.input_files import file_digests
from ttrain.pipeline.plan import Planner
from ttrain.stages import SHARDS_PRETRAIN, Stage
from ttrain.store import runs
from ttrain.store.artifacts import ArtifactStore

NUMBERS = (10, 100, 1000, 10_000)
MOST_STAGES = 100  # a recipe is written by hand
MOST_GROWTH = 15.0  # for ten times as many
Questions = Mapping[str, Callable[[], object]]


def measure(
    prepare: Callable[[Path, int], Questions],
    options: argparse.Namespace,
    directory: Path,
    table: Table,
    *,
    most: int = 10_000,
) -> None:
    """Ask the questions for each number of things."""
    numbers = [number for number in NUMBERS if number <= min(options.most, most)]
    milliseconds: dict[str, list[float]] = {}
    for number in numbers:
        root = directory / f"{prepare.__name__}-{number}"
        questions = {name: partial(common.timed, ask) for name, ask in prepare(root, number).items()}
        for name, costs in table.interleave(questions, options.rounds, warmups=1, group=f"{number} of ").items():
            milliseconds.setdefault(name, []).append(1000 * common.median(costs, "wall"))
            table.value(f"ms, {name}, {number:,}", milliseconds[name][-1])
    for name, values in milliseconds.items():
        if len(values) > 1:
            table.ratio(f"ms, {name}, {numbers[-1]:,}, {numbers[-2]:,}", values[-1], values[-2], most=MOST_GROWTH)


def history(home: Path, number: int) -> Questions:
    """Records of some 6 kB, as a pipeline of eight stages leaves them; the oldest is the run that a cached one equals."""
    keys = {f"stage{n}": f"{n:064x}" for n in range(8)}
    record = runs.RunRecord(home, "full", list(keys), Settings().model_dump(mode="json"))
    for name, key in keys.items():
        record.stage(name, outcome="completed", key=key, path=f"/store/{name}/{key}", seconds=1.0)
    record.finish("completed", {})
    common.copy_runs(home, number - 1)
    return {
        "all runs in the history": lambda: runs.history(home),
        "the run that a cached one equals": lambda: list(runs.equal_runs(home, keys)),
        "`ttrain pipeline status`": lambda: common.run([*TTRAIN, "pipeline", "status"], {"TTRAIN_HOME": str(home)}),
    }


def stages(root: Path, number: int) -> Questions:
    """A plan in which every stage is cached, each reading the one before."""
    store, settings = ArtifactStore(root), Settings()
    table = [Stage(f"stage{at}", "ttrain.stages.source", SourceConfig, {"before": ()} if at else {}) for at in range(number)]

    def plan() -> None:
        planner, before = Planner(settings, store), None
        for stage in table:
            planned = planner(stage, before=before)
            if planned.artifact is None:  # the first time
                publish(store, stage.name, str(planned.key), planned.ingredients, files=1)
                planned = planner(stage, before=before)
            before = planned

    return {"the plan of cached stages": plan}


def shards(root: Path, number: int) -> Questions:
    """An artifact of so many files; a hit is a stat for each of them."""
    store = ArtifactStore(root)
    publish(store, "shards", "key", {}, files=number)
    return {"a hit on an artifact of files": lambda: store.find("shards", "key")}


def publish(store: ArtifactStore, stage: str, key: str, ingredients: Any, files: int) -> None:
    """Put an artifact of so many files into the store."""
    output = store.work(stage, key) / "output"
    output.mkdir(parents=True)
    for at in range(files):
        (output / f"{at}.arrow").write_text(stage)
    store.publish(stage, key, output, {"result": {}, "ingredients": ingredients})


def inputs(root: Path, number: int) -> Questions:
    """Files of the user's: listed, and a stat each, once their digests are known."""
    store, data = ArtifactStore(root / "home"), root / "data"
    data.mkdir(parents=True)
    for at in range(number):
        (data / f"{at}.jsonl").write_text('{"text": "' + str(at) + '"}\n')
        os.utime(data / f"{at}.jsonl", (1, 1))
    settings = Settings.model_validate({"data": {"pretrain": [str(data / "*.jsonl")]}})
    file_digests(SHARDS_PRETRAIN, settings, store)
    store.cache.save()
    return {
        "unchanged input files of a stage": lambda: file_digests(SHARDS_PRETRAIN, settings, store),
        "opening the cache of digests": lambda: DigestCache(store.root / "cache" / "digests.json"),
    }


def tracked(home: Path, number: int) -> Questions:
    """A key that the store lacks, looked up among the runs of the home's own MLflow; a new object asks each time."""
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    store = tracking.open_store(home, "ttrain")
    assert isinstance(store, tracking.MlflowStore)
    experiment = store.experiment_id()
    with contextlib.closing(sqlite3.connect(home / "mlflow" / "mlflow.db")) as db, db:
        fields = "run_uuid, name, status, start_time, end_time, lifecycle_stage, artifact_uri, experiment_id"
        rows = ((f"{at:032x}", "sft", "FINISHED", at, at, "active", f"file:///{at}", experiment) for at in range(number))
        db.executemany(f"INSERT INTO runs ({fields}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        for name, value in (("ttrain.key", None), ("ttrain.stage", "sft"), ("ttrain.run", "full")):
            tags = ((name, value or f"{at:064x}", f"{at:032x}") for at in range(number))
            db.executemany("INSERT INTO tags (key, value, run_uuid) VALUES (?, ?, ?)", tags)
    return {"an unknown key among tracked runs": lambda: InTracker(home, "ttrain").manifest("sft", "k")}


def options(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("--most", type=int, default=NUMBERS[-1], help="the largest number of things")


if __name__ == "__main__":
    PARTS: dict[str, common.Part] = {
        "runs": partial(measure, history),
        "stages": partial(measure, stages, most=MOST_STAGES),
        "shards": partial(measure, shards),
        "inputs": partial(measure, inputs),
        "tracked": partial(measure, tracked),
    }
    common.main(str(__doc__), PARTS, rounds=5, options=options)
