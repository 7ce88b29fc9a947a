"""The fork server: what it forks is a process like any other, and does not outlive its launcher."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.waiting import wait_until

from ttrain.core.signals import PARENT
from ttrain.engine import fork_server
from ttrain.engine.fork_server import ForkServer

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
import json, os, random, signal, sys, threading
import numpy
from ttrain import VALUE

paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd") if int(fd) > 2]
print(json.dumps({
    "session": os.getsid(0) == os.getpid(), "parent": os.getppid(), "value": VALUE,
    "environment": dict(os.environ), "directory": os.getcwd(), "input": sys.stdin.read(),
    "open": [os.readlink(path) for path in paths if os.path.lexists(path)],
    "random": [random.random(), numpy.random.random()],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "threads": threading.active_count(),
}))
print("to the error output", file=sys.stderr)
code = 3
"""
LAUNCHER = """
import os, sys, time
from ttrain.engine.fork_server import ForkServer
server = ForkServer(dict(os.environ), ["json"])
print(server.pid, flush=True)
for _ in range(2):
    print(server.start("errand", [sys.argv[1]], dict(os.environ), 1).pid, flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the package and modules of the tests, in front of the path of new processes."""
    directory = tmp_path_factory.mktemp("package")
    shutil.copytree(PACKAGE, directory / "ttrain")  # with its bytecode, since none is written here
    (directory / "ttrain" / "__init__.py").write_text("VALUE = 1\n")
    (directory / "errand.py").write_text(ERRAND)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(directory))
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        patch.setenv("PYTHONUNBUFFERED", "1")
        yield directory


def describe(server: ForkServer) -> tuple[int, int, dict[str, Any], str]:
    """The number and exit code of a forked process, how it describes itself, and its errors."""
    environment = {**os.environ, "MARK": "a b\udcff"}
    with tempfile.TemporaryFile() as output:
        process = server.start("errand", [DESCRIBE], environment, output.fileno())
        assert process is not None
        code = process.wait()
        output.seek(0)
        described, errors = output.read().decode().splitlines()
    return process.pid, code, json.loads(described), errors


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
        _, code, fork, errors = describe(server)
        drawn += fork.pop("random")
    server.close()
    assert len({*drawn}) == 4, "each draws other random numbers"
    assert (code, errors) == (3, "to the error output")
    open_files, environment = fork.pop("open"), fork.pop("environment")
    assert not [name for name in open_files if "socket" in name or "pidfd" in name]
    assert environment == {**os.environ, "MARK": "a b\udcff", PARENT: str(fork.pop("parent"))}
    assert fork == {
        "session": True,
        "directory": str(tmp_path),
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
        pid, _, fork, _ = describe(server)
        assert fork["value"] == [value, server.pid if value == 1 else pid]
        code.write_text("import os\nVALUE = [2, os.getpid()]\n")
    server.close()
    code.write_text("VALUE = 1\n")


def test_nothing_outlives_a_killed_launcher(package: Path) -> None:
    command = [sys.executable, "-c", LAUNCHER, UP]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pids = [int(launcher.stdout.readline())]
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
