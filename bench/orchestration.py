"""What an engine costs: six trivial stages under ttrain, without and with Prefect, and Prefect.

    python bench/orchestration.py --rounds 3           about 3 minutes on two cores

A stage adds one to a number and notes that it ran. Every engine, in directories of its own,
interleaved: a first run; the same again, which must run nothing; and elsewhere a first run of one
stage. The cost of one more stage is that of six less that of one, over five. ttrain runs with its
tracking, from a copy of the package with one more pipeline and one more stage module, and gives
each stage a process of its own; Prefect runs all of them in one. One Prefect server runs meanwhile.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import common
from common import Table

REPOSITORY = Path(__file__).parent.parent
STAGES = 6
MOST_STAGE_SECONDS = 0.3  # one more stage, beyond what Prefect itself takes for one
MOST_CACHED = 1.0  # times Prefect's own
OLD = 1_000_000_000.0  # a file that changed just now is not remembered by the cache of digests
QUIET = {
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_LEVEL": "WARNING",
}
STAGE_MODULE = '''
"""Stage of the bench: one is added to a number."""

import os
from pathlib import Path


def step(number, before):
    with Path(os.environ["BENCH_RAN"]).open("a") as file:
        file.write(f"{number}\\n")
    return before + 1


def run(config, job):
    before = job.inputs.get("before")
    value = step(int(job.arguments["number"]), int((before / "value").read_text()) if before else 0)
    (job.output / "value").write_text(f"{value}\\n")
    return {"value": value}
'''
PREFECT_FLOW = """
import os

from prefect import flow, task
from prefect.cache_policies import INPUTS, TASK_SOURCE
from ttrain.six_step import step


@task(cache_policy=INPUTS + TASK_SOURCE, persist_result=True)
def stage(number: int, before: int) -> int:
    return step(number, before)


@flow(persist_result=True)
def six() -> int:
    value = 0
    for number in range(1, 1 + int(os.environ["BENCH_STAGES"])):
        value = stage.with_options(name=f"stage-{number}")(number, value)
    return value


six()
"""
STAGE_TABLE = """
SIX = tuple(
    Stage(
        f"stage-{n}",
        "ttrain.six_step",
        inputs={"before": ()} if n > 1 else {},
        arguments={"number": str(n)},
    )
    for n in range(1, 7)
)
STAGES = {**STAGES, **{stage.name: stage for stage in SIX}}
RUNNABLE = {**RUNNABLE, **{stage.name: stage for stage in SIX}}
"""
PIPELINE = """
import os

from ttrain.engine.graph import Graph
from ttrain.tasks import SIX


def six(settings):
    graph, before = Graph(), None
    for one in SIX[: int(os.environ["BENCH_STAGES"])]:
        before = graph.add(one, before=before)
    return graph


shipped_pipeline = pipeline


def pipeline(name):
    return six if name == "six" else shipped_pipeline(name)
"""


def copy_package(directory: Path) -> Path:
    """A copy of ttrain with the pipeline `six` and its stages, and the same as a Prefect flow."""
    package = directory / "package"
    for name in ("ttrain", "configs"):
        shutil.copytree(
            REPOSITORY / name, package / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name, code in {
        "ttrain/six_step.py": STAGE_MODULE,
        "ttrain/tasks/__init__.py": STAGE_TABLE,
        "ttrain/flows/__init__.py": PIPELINE,
        "prefect_six.py": PREFECT_FLOW,
    }.items():
        with (package / name).open("a") as file:
            file.write(code)
    for path in package.rglob("*.py"):
        os.utime(path, (OLD, OLD))
    return package


@contextmanager
def prefect_server(directory: Path) -> Iterator[str]:
    """The address of a Prefect server that runs meanwhile."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}/api"
    command = [
        sys.executable,
        "-m",
        "prefect",
        "server",
        "start",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    environment = {
        **os.environ,
        **QUIET,
        "PREFECT_HOME": str(directory / "server"),
        "PREFECT_API_URL": address,
    }
    with (directory / "server.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"{address}/health", timeout=5):
                    break
            except OSError:
                time.sleep(0.2)
        else:
            log = (directory / "server.log").read_text()
            raise RuntimeError(f"the Prefect server does not answer: {log[-2000:]}")
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def run_stages(
    command: list[str], environment: dict[str, str], directory: Path
) -> dict[str, float]:
    """Seconds of a first run, a cached one, and a first run of one stage.

    Raises RuntimeError where other stages ran.
    """
    seconds: dict[str, float] = {}
    for state, home, stages, expected in (
        ("first run", "whole", STAGES, STAGES),
        ("cached rerun", "whole", STAGES, 0),
        ("one stage", "single", 1, 1),
    ):
        root = directory / home
        root.mkdir(parents=True, exist_ok=True)
        (root / "ran").write_text("")
        own = {
            "TTRAIN_HOME": str(root / "home"),
            "PREFECT_HOME": str(root / "prefect"),
            "BENCH_RAN": str(root / "ran"),
            "BENCH_STAGES": str(stages),
        }
        cost, _ = common.run(command, {**QUIET, **environment, **own}, root)
        if (ran := len((root / "ran").read_text().split())) != expected:
            raise RuntimeError(f"{command} ran {ran} stages in a {state}, not {expected}")
        seconds[state] = cost.wall
    shutil.rmtree(directory)
    return {
        **seconds,
        "one more stage": (seconds["first run"] - seconds["one stage"]) / (STAGES - 1),
    }


def compare(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """All engines, interleaved; the first round fills the caches of bytecode and file system."""
    # So that the server ends, too
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    package = copy_package(directory)
    path = {"PYTHONPATH": str(package)}
    ours = [*common.TTRAIN, "pipeline", "run", "six"]
    with prefect_server(directory) as address:
        with_server = {**path, "PREFECT_API_URL": address}
        engines = {
            "ttrain --engine none": ([*ours, "--engine", "none"], path),
            "ttrain with Prefect": (ours, with_server),
            "Prefect": ([sys.executable, str(package / "prefect_six.py")], with_server),
        }
        sides = {
            name: partial(common.timed, partial(run_stages, *engine, directory / "round"))
            for name, engine in engines.items()
        }
        costs = table.interleave(sides, options.rounds, warmups=1)
    medians = {}
    for name, runs in costs.items():
        medians[name] = {state: common.median(runs, state) for state in runs[0].result}
    theirs = medians.pop("Prefect")
    for name, seconds in medians.items():
        for state, most in (("first run", 0.0), ("cached rerun", MOST_CACHED)):
            table.ratio(f"s, {state}, {name}, Prefect", seconds[state], theirs[state], most=most)
        base = theirs["one more stage"] if name == "ttrain with Prefect" else 0
        table.value(
            f"s, one more stage, {name}", seconds["one more stage"], most=base + MOST_STAGE_SECONDS
        )


if __name__ == "__main__":
    common.main(str(__doc__), {"engines": compare})
