"""The same six stages under ttrain, Prefect's own cache, Metaflow, Dagster, Kedro and DVC: what an engine itself costs.

    python bench/orchestration.py --venv DIRECTORY      the virtual environment of the peers; made where there is none

A stage adds one to a number (`peers/step.py`) and notes that it ran. Every engine, in directories of its own, interleaved:
a first run; the same again, which should run nothing; and elsewhere a run whose fourth stage fails, then the one that
resumes it, which should run three. Wall seconds, and CPU seconds of all processes, with those of the Prefect server. One
runs already for both that use it; with `--own-servers` each run starts its own, as it does where none runs.

ttrain runs as it is installed, with its tracking, from a copy of the package with one more recipe and one more stage module.
It, Metaflow and DVC give each stage a process of its own; Prefect, Dagster and Kedro run all of them in theirs. Each side is
run once before it counts. The cost of one more stage is that of six less that of one, over five.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import common
import psutil

REPOSITORY = Path(__file__).parent.parent
PEERS = Path(__file__).parent / "peers"
PACKAGES = ("metaflow", "dagster", "kedro", "kedro-datasets", "dvc")
STAGES = 6
STAGE_SECONDS = 0.3  # one more stage, beyond what Prefect itself takes for one
OLD = 1_000_000_000.0  # a file that changed just now is not remembered by the cache of digests
QUIET = {
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "DAGSTER_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "USER": "bench",  # Metaflow asks for one
}
RECIPE = '''"""Six stages in a row."""

import os

from ttrain.stages import SIX


def six(stage, settings):
    before = None
    for one in SIX[: int(os.environ.get("BENCH_STAGES", "6"))]:
        before = stage(one, before=before)
'''
MODULE = '''"""Stage of the bench: one is added to a number."""

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


@dataclass
class Engine:
    """How an engine is told to run the six stages in a directory, to run them again, and to resume after a failure."""

    name: str
    run: list[str]
    again: list[str]
    resume: list[str]
    lay_out: Callable[[Path], object]
    environment: Mapping[str, str] = field(default_factory=dict)
    server: psutil.Process | None = None
    reruns: int = 0  # stages that run although nothing changed, where the engine knows no better

    def go(self, directory: Path, command: list[str], *, fails: bool = False, stages: int = STAGES) -> common.Cost:
        """Run a command to its end. Raises RuntimeError where it ends otherwise than it should."""
        ran = directory / "ran"
        ran.write_text("")
        environment = {
            **_environment(),
            **{name: value.format(directory=directory) for name, value in self.environment.items()},
            "BENCH_RAN": str(ran),
            "BENCH_STAGES": str(stages),
            "BENCH_FAILS": "1" if fails else "",
            "PYTHONDONTWRITEBYTECODE": "",  # an installed package has its bytecode, and so have all the sides here
        }
        before = _server_seconds(self.server)
        with (directory / "log").open("ab") as log:
            began = time.perf_counter()
            process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=directory, env=environment
            )
            _, status, usage = os.wait4(process.pid, 0)
            wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if bool(process.returncode) != fails:
            tail = (directory / "log").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{self.name}: {' '.join(command)} ended with {process.returncode}:\n{tail}")
        cpu = usage.ru_utime + usage.ru_stime + _server_seconds(self.server) - before
        memory = usage.ru_maxrss * 1024 / common.MEGABYTE
        return common.Cost(wall, cpu, memory, {"ran": len(ran.read_text().split())})

    def round(self, place: Path) -> dict[str, common.Cost]:
        """First run, cached rerun, resumed run; and a first run of one stage where the engine can be asked for one."""
        whole, broken = place / "whole", place / "broken"
        costs = {}
        for directory in (whole, broken):
            directory.mkdir(parents=True)
            self.lay_out(directory)
        costs["first run"] = self.go(whole, self.run)
        costs["cached rerun"] = self.go(whole, self.again)
        self.go(broken, self.run, fails=True)
        costs["resume"] = self.go(broken, self.resume)
        expected = {"first run": STAGES, "cached rerun": self.reruns, "resume": STAGES - 3}
        for what, cost in costs.items():
            if cost.found["ran"] != expected[what]:
                raise RuntimeError(f"{self.name}: {what} ran {cost.found['ran']} stages, not {expected[what]}")
        if self.name.startswith(("ttrain", "Prefect")):
            single = place / "single"
            single.mkdir()
            self.lay_out(single)
            costs["one stage"] = self.go(single, self.run, stages=1)
        shutil.rmtree(place)
        return costs


def _environment() -> dict[str, str]:
    """This process's variables without those that would tell an engine where to go; nobody phones home."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "TTRAIN_", "METAFLOW_"))}
    return {**mine, **QUIET}


def _server_seconds(server: psutil.Process | None) -> float:
    """CPU seconds of the server so far."""
    if server is None:
        return 0.0
    used = server.cpu_times()
    return used.user + used.system + used.children_user + used.children_system


def our_package(directory: Path) -> Path:
    """A copy of ttrain with the recipe `six` and its stages."""
    package = directory / "package"
    for name in ("ttrain", "configs"):
        shutil.copytree(REPOSITORY / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "ttrain" / "flows" / "six.py").write_text(RECIPE)
    (package / "ttrain" / "stages" / "six.py").write_text(MODULE)
    shutil.copyfile(PEERS / "step.py", package / "ttrain" / "six_step.py")
    for path, more in (
        (package / "ttrain" / "stages" / "__init__.py", STAGE_TABLE),
        (
            package / "ttrain" / "flows" / "__init__.py",
            '\nfrom ttrain.flows.six import six  # noqa: E402\n\nRECIPES["six"] = six\n',
        ),
    ):
        path.write_text(path.read_text() + more)
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
    environment = {**_environment(), "PREFECT_HOME": str(directory / "server"), "PREFECT_API_URL": address}
    with (directory / "server.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"{address}/health", timeout=5):
                    break
            except (OSError, urllib.error.URLError):
                time.sleep(0.2)
        else:
            raise RuntimeError(f"the Prefect server does not answer: {(directory / 'server.log').read_text()[-2000:]}")
        yield address, psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def peers_environment(venv: Path) -> Path:
    """The directory of the peers' commands; installed where they are not there yet."""
    binaries = venv / "bin"
    if not binaries.exists():
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        subprocess.run([binaries / "pip", "install", "--quiet", *PACKAGES], check=True)
    asked = subprocess.run([binaries / "pip", "list", "--format=json"], check=True, capture_output=True).stdout
    versions = {package["name"]: package["version"] for package in json.loads(asked)}
    print("peers: " + ", ".join(f"{name} {versions[name]}" for name in PACKAGES))
    return binaries.absolute()


def ours(name: str, package: Path, *options: str, server: tuple[str, psutil.Process] | None = None) -> Engine:
    """ttrain."""
    command = [sys.executable, "-P", "-c", "from ttrain.cli.main import main; main()", "pipeline", "run", "six", *options]
    environment = {"PYTHONPATH": str(package), "TTRAIN_HOME": "{directory}/home"}
    if server:
        environment["PREFECT_API_URL"] = server[0]
    return Engine(name, command, command, command, lambda directory: None, environment, server and server[1])


def prefect(name: str, server: tuple[str, psutil.Process] | None = None) -> Engine:
    """Prefect itself, of this environment; its cache is in the directory, so it is new for each round."""
    command = [sys.executable, str(PEERS / "prefect_six.py")]
    environment = {"PYTHONPATH": str(PEERS), "PREFECT_HOME": "{directory}/prefect"}
    environment |= {"PREFECT_API_URL": server[0]} if server else {"PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120"}
    return Engine(name, command, command, command, lambda directory: None, environment, server and server[1])


def others(binaries: Path) -> list[Engine]:
    """Metaflow, Dagster, Kedro and DVC, each in the way that its own documentation shows for running again and resuming."""
    python, path = str(binaries / "python"), {"PYTHONPATH": str(PEERS), "PATH": f"{binaries}:{os.environ['PATH']}"}
    metaflow = {**path, "METAFLOW_HOME": "{directory}/home", "METAFLOW_DATASTORE_SYSROOT_LOCAL": "{directory}"}
    flow = [python, str(PEERS / "metaflow_six.py"), "--quiet"]
    dagster = [python, str(PEERS / "dagster_six.py")]
    kedro = [str(binaries / "kedro"), "run", "--only-missing-outputs"]
    dvc = [str(binaries / "dvc"), "repro"]

    def kedro_project(directory: Path) -> None:
        shutil.copytree(PEERS / "kedro_six", directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))

    def dvc_project(directory: Path) -> None:
        for name in ("dvc.yaml", "step.py"):
            shutil.copyfile(PEERS / name, directory / name)
        subprocess.run([*dvc[:1], "init", "--no-scm", "-q"], cwd=directory, env=_environment(), check=True)

    return [
        # Metaflow has no cache: what comes nearest clones all steps of the run before but the last one
        Engine("Metaflow", [*flow, "run"], [*flow, "resume", "end"], [*flow, "resume"], lambda _: None, metaflow, reruns=1),
        Engine(
            *("Dagster", dagster, [*dagster, "rerun"], [*dagster, "rerun"]),
            *(lambda directory: (directory / "dagster.yaml").touch(), {**path, "DAGSTER_HOME": "{directory}"}),
        ),
        Engine("Kedro", kedro, kedro, kedro, kedro_project, path),
        Engine("DVC", dvc, dvc, dvc, dvc_project, path),
    ]


def main() -> int:
    """Print the tables; 1 where a goal was missed."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=common.ROUNDS)
    parser.add_argument("--venv", type=Path, help="of the peers; made where there is none; default: without them")
    parser.add_argument("--own-servers", action="store_true", help="each run of Prefect and ttrain starts its own server")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the server ends, too
    binaries = peers_environment(options.venv) if options.venv else None
    print(f"{os.cpu_count()} cores; load before the start {os.getloadavg()[0]:.1f}; python {' '.join(sys.argv)}", flush=True)
    with common.workplace() as place, nullcontext() if options.own_servers else prefect_server(place) as shared:
        package = our_package(place)
        engines = [
            ours("ttrain --engine none", package, "--engine", "none"),
            ours("ttrain", package, server=shared),
            prefect("Prefect", shared),
            *(others(binaries) if binaries else ()),
        ]
        rounds: dict[str, list[dict[str, common.Cost]]] = {engine.name: [] for engine in engines}
        for number in range(options.rounds + 1):  # the first one fills the caches of bytecode and of the file system
            for engine in engines:
                costs = engine.round(place / f"{engine.name}-{number}".replace(" ", "-"))
                if number:
                    rounds[engine.name].append(costs)
    return _report(rounds, engines)


def _report(rounds: Mapping[str, list[dict[str, common.Cost]]], engines: list[Engine]) -> int:
    def of(name: str, what: str, figure: str) -> float:
        return statistics.median(getattr(costs[what], figure) for costs in rounds[name])

    whats = ("first run", "cached rerun", "resume")
    print(f"{'wall s / CPU s, medians':<24}" + "".join(f"{what:>18}" for what in whats) + f"{'one more stage':>18}")
    more = {}
    for engine in engines:
        name = engine.name
        cells = [f"{of(name, what, 'wall'):.2f} / {of(name, what, 'cpu'):.2f}" for what in whats]
        if "one stage" in rounds[name][0]:
            each = {f: (of(name, "first run", f) - of(name, "one stage", f)) / (STAGES - 1) for f in ("wall", "cpu")}
            more[name] = each["wall"]
            cells.append(f"{each['wall']:.3f} / {each['cpu']:.3f}")
        note = f"   runs {engine.reruns} of {STAGES} stages again" if engine.reruns else ""
        print(f"{name:<24}" + "".join(f"{cell:>18}" for cell in cells) + note)
    missed = False
    for mine in ("ttrain --engine none", "ttrain"):
        for figure in ("wall", "cpu"):
            fastest = min((of(e.name, "cached rerun", figure), e.name) for e in engines if not e.name.startswith("ttrain"))
            value = of(mine, "cached rerun", figure)
            missed |= value > fastest[0]
            print(f"cached rerun, {figure}: {mine} {value:.2f} s, the fastest peer {fastest[1]} {fastest[0]:.2f} s"
                  f"{'  MISSED' if value > fastest[0] else ''}")  # fmt: skip
    for mine, limit in (("ttrain --engine none", STAGE_SECONDS), ("ttrain", STAGE_SECONDS + more["Prefect"])):
        missed |= more[mine] > limit
        print(f"one more stage: {mine} {more[mine]:.3f} s, limit {limit:.3f} s{'  MISSED' if more[mine] > limit else ''}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
