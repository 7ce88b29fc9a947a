"""The fork server: what it forks is a process like any other, and does not outlive its launcher."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
from support.tiny_stages import stage_settings
from support.waiting import wait_until

from ttrain.core.signals import PARENT
from ttrain.engine import fork_server, processes
from ttrain.engine.fork_server import ForkedProcess, ForkServer
from ttrain.engine.stop_request import StopRequest
from ttrain.tasks import PRETRAIN

PACKAGE = Path(fork_server.__file__).parents[1]
SLEEP = "import time; time.sleep(30)"
UP = f"import os; os.write(1, b'up' + os.linesep.encode()); {SLEEP}"  # two may share a pipe
ERRAND = """
import sys

def main():
    names = {"code": 0}
    exec(sys.argv[1], names)
    return names["code"]
"""
DESCRIBE = """
import gc, json, os, random, signal, sys, threading
import numpy
from ttrain import VALUE

paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd") if int(fd) > 2]
print(json.dumps({
    "session": os.getsid(0) == os.getpid(), "parent": os.getppid(), "value": VALUE,
    "environment": dict(os.environ), "directory": os.getcwd(), "input": sys.stdin.read(),
    "open": [os.readlink(path) for path in paths if os.path.lexists(path)],
    "random": [random.random(), numpy.random.random()],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "threads": threading.active_count(), "collects": gc.isenabled(),
    "default handler": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
}))
print("to the error output", file=sys.stderr)
code = 3
"""
WORKER = """
def main():
    print("it ran")
    return 0

if __name__ == "__main__":
    main()
"""
LAUNCHER = """
import os, sys, time
from ttrain.engine.fork_server import ForkServer
server = ForkServer(dict(os.environ), sys.argv[1:2])
print(server.pid, flush=True)
for _ in range(2):
    print(server.start("errand", [sys.argv[2]], dict(os.environ), 1).pid, flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the package and modules of the tests, in front of the path of new processes."""
    directory = tmp_path_factory.mktemp("package")
    shutil.copytree(PACKAGE, directory / "ttrain")  # with its bytecode, since none is written here
    (directory / "ttrain" / "__init__.py").write_text("VALUE = 1\n")
    modules = {"errand": ERRAND, "worker": WORKER, "slow": SLEEP}
    for name, code in modules.items():
        (directory / f"{name}.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(directory))
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        patch.setenv("PYTHONUNBUFFERED", "1")
        yield directory


@contextlib.contextmanager
def errand(server: ForkServer, code: str) -> Iterator[tuple[ForkedProcess, IO[bytes]]]:
    """A forked process and its output."""
    environment = {**os.environ, "MARK": "a b\udcff"}
    with tempfile.TemporaryFile() as output:
        process = server.start("errand", [code], environment, output.fileno())
        assert process is not None
        try:
            yield process, output
        finally:
            process.kill()
            process.wait()


def text_of(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def test_a_fork_is_like_a_started_process(package: Path, tmp_path: Path, monkeypatch: Any) -> None:
    server = ForkServer(os.environ, ["json", "numpy"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LATER", "than the server")
    drawn = []
    for _ in range(2):
        with errand(server, UP), errand(server, DESCRIBE) as (process, output):
            assert process.wait() == 3
            described, error = text_of(output).splitlines()
        fork = json.loads(described)
        drawn += fork.pop("random")
    server.close()
    assert len({*drawn}) == 4, "each draws other random numbers"
    assert error == "to the error output"
    open_files, environment = fork.pop("open"), fork.pop("environment")
    assert not [name for name in open_files if "socket" in name or "pidfd" in name]
    assert environment == {**os.environ, "MARK": "a b\udcff", PARENT: str(fork.pop("parent"))}
    assert fork == {
        "session": True,
        "directory": str(tmp_path),
        "default handler": True,
        "collects": True,
        "input": "",
        "threads": 1,
        "value": 1,
        "blocked": [signal.SIGHUP, signal.SIGINT, signal.SIGTERM],  # until it has handlers
    }


def test_loaded_code_is_shared_and_changed_code_is_loaded_again(package: Path) -> None:
    code = package / "ttrain" / "__init__.py"
    code.write_text("import os\nVALUE = [1, os.getpid()]\n")
    server = ForkServer(dict(os.environ), ["json", "numpy"])
    for value in (1, 2):
        with errand(server, DESCRIBE) as (process, output):
            process.wait()
            importer = server.pid if value == 1 else process.pid
            assert json.loads(text_of(output).splitlines()[0])["value"] == [value, importer]
        code.write_text("import os\nVALUE = [2, os.getpid()]\n")
    server.close()
    code.write_text("VALUE = 1\n")


@pytest.mark.parametrize("library", ["slow", "json"])
def test_nothing_outlives_a_killed_launcher(package: Path, library: str) -> None:
    """Neither a server that still loads, nor one with children."""
    command = [sys.executable, "-c", LAUNCHER, library, UP]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pids = [int(launcher.stdout.readline())]
    if library == "json":
        # A child stopped before its first instruction cannot have asked to end with the server.
        lines = sorted(launcher.stdout.readline() for _ in range(4))
        assert lines[2:] == ["up\n", "up\n"]
        pids += [*map(int, lines[:2])]
        psutil.Process(pids[1]).suspend()
    assert all(map(is_running, pids))
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    wait_until(lambda: not any(map(is_running, pids)))


def test_without_a_server_a_process_starts(package: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(processes, "WORKER", "worker")
    monkeypatch.setattr(processes, "fork_servers", {})
    monkeypatch.setattr(processes, "ForkServer", lambda env: ForkServer(env, ["missing"]))
    group = processes.ProcessGroup()
    with (tmp_path / "log.txt").open("w+b") as log:
        processes.start(group, PRETRAIN, stage_settings(), tmp_path, log, StopRequest())
        [process] = group.processes
        process.wait()
        group.end()
        assert type(process) is subprocess.Popen
        assert "'missing'" in text_of(log) and "it ran" in text_of(log)
