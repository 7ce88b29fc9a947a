"""What the cost grows with: runs in the history, stages, files of shards, input files, tracked runs, ranks.

    python bench/scale.py                      all of it, up to 10,000 of each; some two minutes
    python bench/scale.py --most 100 --only runs,ranks

Each line is a number of things and the milliseconds (medians of --rounds) that one question then takes, by the clock and of
CPU, in a process that has its modules loaded and a disk that is warm. `status` is a process of its own. Nothing here trains.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ttrain import tracking
from ttrain.config import Settings, SourceConfig
from ttrain.core.hashing import DigestCache
from ttrain.pipeline.artifact_commands import InTracker
from ttrain.pipeline.plan import Planner
from ttrain.stages import SHARDS_PRETRAIN, Stage
from ttrain.store import runs
from ttrain.store.artifacts import ArtifactStore

NUMBERS = (10, 100, 1000, 10_000)
MOST_STAGES = 100  # a recipe is written by hand
STATUS = [sys.executable, "-P", "-c", "from ttrain.cli.main import main; main()", "pipeline", "status"]
RANK = """
import os, sys, time
import torch, torch.distributed as dist
rank, world, file, numbers = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(file, world), rank=rank, world_size=world)
tensor = torch.zeros(numbers)
for _ in range(3):
    dist.all_reduce(tensor)
began, rounds = time.perf_counter(), 20
for _ in range(rounds):
    dist.all_reduce(tensor)
if rank == 0:
    print(1000 * (time.perf_counter() - began) / rounds)
dist.destroy_process_group()
"""


class Bench:
    """Prints one line a measurement, and keeps them."""

    def __init__(self, root: Path, most: int, rounds: int) -> None:
        self.root, self.most, self.rounds = root, most, rounds
        self.lines: list[dict[str, Any]] = []

    def numbers(self) -> Iterator[int]:
        """How many things there are."""
        yield from (number for number in NUMBERS if number <= self.most)

    def add(self, what: str, number: int, action: Callable[[], object]) -> None:
        """One line: the median of the rounds, after one that warms up."""
        action()
        seconds, busy = [], []
        for _ in range(self.rounds):
            began, worked = time.perf_counter(), _cpu_seconds()
            action()
            seconds.append(time.perf_counter() - began)
            busy.append(_cpu_seconds() - worked)
        self.note(what, number, 1000 * statistics.median(seconds), 1000 * statistics.median(busy))

    def note(self, what: str, number: int, milliseconds: float, cpu: float | None = None) -> None:
        """One line."""
        self.lines.append({"what": what, "number": number, "ms": milliseconds, "cpu_ms": cpu})
        print(
            f"{what:<52}{number:>8,}{milliseconds:>12.2f} ms" + ("" if cpu is None else f"{cpu:>12.2f} ms CPU"), flush=True
        )

    # --- the questions --------------------------------------------------------------------------------------------------

    def runs(self) -> None:
        """The history: files of some 6 kB, as a pipeline of eight stages leaves them."""
        keys = {f"stage{n}": f"{n:064x}" for n in range(8)}
        for number in self.numbers():
            home = self.root / f"runs{number}"
            (home / "runs").mkdir(parents=True)
            for at in range(number):
                _record(home, at, keys)
            self.add("history: all runs", number, lambda: runs.history(home))  # noqa: B023
            self.add("history: the run that a cached one equals", number, lambda: runs.equal_run(home, keys))  # noqa: B023
            environment = {**os.environ, "TTRAIN_HOME": str(home)}
            self.add(
                "`ttrain pipeline status`, a process",
                number,
                lambda: subprocess.run(STATUS, env=environment, check=True, capture_output=True),  # noqa: B023
            )

    def stages(self) -> None:
        """A plan in which every stage is cached, each reading the one before."""
        for number in self.numbers():
            if number > MOST_STAGES:
                break
            store, settings = ArtifactStore(self.root / f"stages{number}"), Settings()
            table = [
                Stage(f"stage{at}", "ttrain.stages.source", SourceConfig, {"before": ()} if at else {})
                for at in range(number)
            ]

            def walk(table: list[Stage] = table, store: ArtifactStore = store, settings: Settings = settings) -> None:
                planner, before = Planner(settings, store), None
                for stage in table:
                    planned = planner(stage, before=before)
                    if planned.artifact is None:
                        output = store.work(stage.name, str(planned.key)) / "output"
                        output.mkdir(parents=True)
                        (output / "file").write_text(stage.name)
                        manifest = {"result": {}, "ingredients": planned.ingredients}
                        store.publish(stage.name, str(planned.key), output, manifest)
                        planned = planner(stage, before=before)
                    before = planned

            self.add("plan: stages, all cached", number, walk)

    def shards(self) -> None:
        """A hit on an artifact: a stat for each of its files."""
        for number in self.numbers():
            store = ArtifactStore(self.root / f"shards{number}")
            output = store.work("shards", "key") / "output"
            output.mkdir(parents=True)
            for at in range(number):
                (output / f"{at}.arrow").write_bytes(b"")
            began = time.perf_counter()
            store.publish("shards", "key", output, {"result": {}, "ingredients": {}})
            self.note("publish: files of an artifact (once)", number, 1000 * (time.perf_counter() - began))
            self.add("hit: files of an artifact", number, lambda: store.find("shards", "key"))  # noqa: B023

    def inputs(self) -> None:
        """The user's own files: listed, and a stat each, once their digests are known."""
        from ttrain.pipeline.input_files import file_digests

        for number in self.numbers():
            store, data = ArtifactStore(self.root / f"inputs{number}"), self.root / f"data{number}"
            data.mkdir()
            for at in range(number):
                (data / f"{at}.jsonl").write_text('{"text": "' + str(at) + '"}\n')
                os.utime(data / f"{at}.jsonl", (1, 1))
            settings = Settings.model_validate({"data": {"pretrain": [str(data / "*.jsonl")]}})
            file_digests(SHARDS_PRETRAIN, settings, store)
            store.cache.save()
            self.add(
                "plan: input files of a stage, unchanged",
                number,
                lambda: file_digests(SHARDS_PRETRAIN, settings, store),  # noqa: B023
            )
            self.add("digest cache: opened", number, lambda: DigestCache(store.root / "cache" / "digests.json"))  # noqa: B023

    def tracked(self) -> None:
        """A key that the store lacks, looked up among the runs of the home's own MLflow."""
        for number in self.numbers():
            home = self.root / f"tracked{number}"
            with contextlib.suppress(KeyError):
                del os.environ["MLFLOW_TRACKING_URI"]
            opened = tracking.open_store(home, "ttrain")
            assert isinstance(opened, tracking.MlflowStore)
            experiment = opened.experiment_id()
            with contextlib.closing(sqlite3.connect(home / "mlflow" / "mlflow.db")) as db, db:
                fields = "run_uuid, name, status, start_time, end_time, lifecycle_stage, artifact_uri, experiment_id"
                entries = (
                    (f"{at:032x}", "sft", "FINISHED", at, at, "active", f"file:///none/{at}", experiment)
                    for at in range(number)
                )
                db.executemany(f"INSERT INTO runs ({fields}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", entries)
                tags = [
                    (name, value, f"{at:032x}")
                    for at in range(number)
                    for name, value in (("ttrain.key", f"{at:064x}"), ("ttrain.stage", "sft"), ("ttrain.run", "full"))
                ]
                db.executemany("INSERT INTO tags (key, value, run_uuid) VALUES (?, ?, ?)", tags)
            self.add("a key that nobody has, among tracked runs", number, partial(_ask_anew, home))

    def ranks(self) -> None:
        """All that ranks tell each other in a step: ten figures, and the gradient (here of 1 M parameters in fp32)."""
        for world in (2, 4, 8):
            if world > self.most:
                break
            for what, numbers in (
                ("ranks: the step's one small collective", 10),
                ("ranks: the gradient of 1 M parameters", 10**6),
            ):
                self.note(what, world, _collective(self.root / f"ranks{world}-{numbers}", world, numbers))


def _cpu_seconds() -> float:
    """Of this process and of those that it waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _ask_anew(home: Path) -> None:
    """By an object of its own, since each asks once for each key."""
    InTracker(home, "ttrain").manifest("sft", "k")


def _record(home: Path, at: int, keys: dict[str, str]) -> None:
    """A completed run's file."""
    stages = [
        {
            "name": name,
            "outcome": "completed",
            "key": key if at == 0 else f"{at:064x}",
            "path": f"/store/{name}/{key}",
            "seconds": 1.0,
        }
        for name, key in keys.items()
    ]
    name = f"full-20261121-{at // 3600 % 24:02d}{at // 60 % 60:02d}{at % 60:02d}-{at:04x}"
    record = {"run": name, "pipeline": "full", "outcome": "completed", "started": "2026-11-21T00:00:00+00:00"}
    record |= {"started_unix": 1.7e9 + at, "seconds": 8.0, "process": {"pid": 1, "started": 0.0}, "stages": stages}
    text = json.dumps({**record, "metrics": {}, "settings": Settings().model_dump(mode="json")}, indent=1, sort_keys=True)
    (home / "runs" / f"{name}.json").write_text(text, encoding="utf-8")  # not made safe: 10,000 flushes take minutes


def _collective(file: Path, world: int, numbers: int) -> float:
    """Milliseconds of one all-reduce of so many fp32 numbers, by processes of one thread on this machine."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(world), str(file), str(numbers)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    said = [process.communicate(timeout=300)[0] for process in started]
    assert not any(process.returncode for process in started), said
    return float(said[0])


def main() -> int:
    """Print the lines; with --json keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("runs", "stages", "shards", "inputs", "tracked", "ranks")
    parser.add_argument("--only", default=",".join(names), help=f"some of {', '.join(names)}")
    parser.add_argument("--most", type=int, default=NUMBERS[-1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the lines")
    arguments = parser.parse_args()
    loads = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    print(f"{os.cpu_count()} cores, {platform.platform()}; load before the start {loads}")
    with tempfile.TemporaryDirectory() as root:
        bench = Bench(Path(root), arguments.most, arguments.rounds)
        for name in arguments.only.split(","):
            getattr(bench, name)()
    if arguments.json:
        arguments.json.write_text(json.dumps(bench.lines, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
