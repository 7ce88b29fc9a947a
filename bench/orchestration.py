"""The same six trivial stages under ttrain, with and without Prefect, and under Prefect's own cache: what an engine costs.

    python bench/orchestration.py --rounds 3           about 4 minutes on two cores

A stage adds one to a number and notes that it ran. Every engine, in directories of its own, interleaved: a first run; the
same again, which must run nothing; and elsewhere a run whose fourth stage fails, then the one that resumes it, which must
run three. Wall seconds, and CPU seconds of all processes, with those of the one Prefect server that runs meanwhile. ttrain
runs with its tracking, from a copy of the package with one more recipe and one more stage module, and gives each stage a
process of its own; Prefect runs all of them in one. The cost of one more stage is that of six less that of one, over five.
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
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import common
import psutil
from common import Cost, Table

REPOSITORY = Path(__file__).parent.parent
STAGES = 6
STATES = ("first run", "cached rerun", "resume", "one stage")
MOST_STAGE_SECONDS = 0.3  # one more stage, beyond what Prefect itself takes for one
OLD = 1_000_000_000.0  # a file that changed just now is not remembered by the cache of digests
QUIET = {
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_LEVEL": "WARNING",
}
STEP = """
import os
from pathlib import Path


def step(number, before):
    with Path(os.environ["BENCH_RAN"]).open("a") as file:
        file.write(f"{number}\\n")
    if number == 4 and os.environ["BENCH_FAILS"]:
        raise RuntimeError("stage 4 was asked to fail")
    return before + 1
"""
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
RECIPE = '''
"""Six stages in a row."""

import os

from ttrain.stages import SIX


def six(stage, settings):
    before = None
    for one in SIX[: int(os.environ["BENCH_STAGES"])]:
        before = stage(one, before=before)
'''
STAGE_MODULE = '''
"""Stage of the bench: one is added to a number."""

from ttrain.six_step import step


def run(config, job):
    before = job.inputs.get("before")
    value = step(int(job.arguments["number"]), int((before / "value").read_text()) if before else 0)
    (job.output / "value").write_text(f"{value}\\n")
    return {"value": value}
'''
STAGE_TABLE = """
SIX = tuple(
    Stage(
        f"stage-{n}",
        "ttrain.stages.six",
        config.ExistingModelConfig,
        inputs={"before": ()} if n > 1 else {},
        arguments={"number": str(n)},
    )
    for n in range(1, 7)
)
STAGES = {**STAGES, **{stage.name: stage for stage in SIX}}
RUNNABLE = {**RUNNABLE, **{stage.name: stage for stage in SIX}}
"""
RECIPES = """
from ttrain.flows.six import six  # noqa: E402

RECIPES["six"] = six
"""


@dataclass
class Engine:
    """An engine whose one command runs the six stages, runs them again, and resumes after a failure."""

    name: str
    command: list[str]
    environment: Mapping[str, str]
    server: psutil.Process | None = None

    def run(self, directory: Path, expected: int, *, fails: bool = False, stages: int = STAGES) -> Cost:
        """Run the command; its cost with that of the server. Raises RuntimeError where it runs more or fewer stages."""
        directory.mkdir(parents=True, exist_ok=True)
        log = directory / "ran"
        log.write_text("")
        homes = {"TTRAIN_HOME": str(directory / "home"), "PREFECT_HOME": str(directory / "prefect")}
        step = {"BENCH_RAN": str(log), "BENCH_STAGES": str(stages), "BENCH_FAILS": "1" if fails else ""}
        before = server_seconds(self.server)
        cost, _ = common.run(self.command, {**QUIET, **homes, **self.environment, **step}, directory, fails=fails)
        if (ran := len(log.read_text().split())) != expected:
            raise RuntimeError(f"{self.name} ran {ran} stages in {directory.name}, not {expected}")
        return replace(cost, cpu=cost.cpu + server_seconds(self.server) - before)

    def round(self, directory: Path) -> dict[str, Cost]:
        """First run, cached rerun, resumed run, and a first run of one stage."""
        self.run(directory / "failed", 4, fails=True)
        costs = {
            "first run": self.run(directory / "whole", STAGES),
            "cached rerun": self.run(directory / "whole", 0),
            "resume": self.run(directory / "failed", STAGES - 3),
            "one stage": self.run(directory / "single", 1, stages=1),
        }
        shutil.rmtree(directory)
        return costs


def server_seconds(server: psutil.Process | None) -> float:
    """CPU seconds of the server so far."""
    if server is None:
        return 0.0
    used = server.cpu_times()
    return float(used.user + used.system + used.children_user + used.children_system)


def copy_package(directory: Path) -> Path:
    """A copy of ttrain with the recipe `six` and its stages, and the same as a flow of Prefect."""
    package = directory / "package"
    for name in ("ttrain", "configs"):
        shutil.copytree(REPOSITORY / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "ttrain/flows/six.py").write_text(RECIPE)
    (package / "ttrain/stages/six.py").write_text(STAGE_MODULE)
    (package / "ttrain/six_step.py").write_text(STEP)
    (package / "prefect_six.py").write_text(PREFECT_FLOW)
    for path, code in (
        (package / "ttrain/stages/__init__.py", STAGE_TABLE),
        (package / "ttrain/flows/__init__.py", RECIPES),
    ):
        path.write_text(path.read_text() + code)
    for path in package.rglob("*.py"):
        os.utime(path, (OLD, OLD))
    return package


@contextmanager
def prefect_server(directory: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The address of a Prefect server that runs meanwhile, and its process."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}/api"
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, **QUIET, "PREFECT_HOME": str(directory / "server"), "PREFECT_API_URL": address}
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
            raise RuntimeError(f"the Prefect server does not answer: {(directory / 'server.log').read_text()[-2000:]}")
        yield address, psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def compare(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """All engines, interleaved; the first round fills the caches of bytecode and of the file system."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the server ends, too
    package = copy_package(directory)
    ours = [*common.TTRAIN, "pipeline", "run", "six"]
    path = {"PYTHONPATH": str(package)}
    with prefect_server(directory) as (address, server):
        with_server = {**path, "PREFECT_API_URL": address}
        engines = [
            Engine("ttrain --engine none", [*ours, "--engine", "none"], path),
            Engine("ttrain with Prefect", ours, with_server, server),
            Engine("Prefect", [sys.executable, str(package / "prefect_six.py")], with_server, server),
        ]
        rounds = [
            {engine.name: engine.round(directory / f"round-{number}") for engine in engines}
            for number in range(options.rounds + 1)
        ][1:]
    costs = {engine.name: {state: [one[engine.name][state] for one in rounds] for state in STATES} for engine in engines}
    more = {}
    for name, states in costs.items():
        table.costs |= {f"{name}, {state}": list(map(asdict, rounds)) for state, rounds in states.items()}
        more[name] = (common.median(states["first run"], "wall") - common.median(states["one stage"], "wall")) / (STAGES - 1)
    for name, base in (("ttrain --engine none", 0.0), ("ttrain with Prefect", more["Prefect"])):
        for state in STATES[:-1]:
            for figure, unit in (("wall", "s"), ("cpu", "CPU s")):
                values = (common.median(costs[engine][state], figure) for engine in (name, "Prefect"))
                table.ratio(f"{unit}, {state}, {name}, Prefect", *values, most=1 if state == "cached rerun" else 0)
        table.value(f"s, one more stage, {name}", more[name], most=base + MOST_STAGE_SECONDS)


if __name__ == "__main__":
    common.main(str(__doc__), {"engines": compare})
