"""Processes of stages: forked ones, and ranks that are killed, stopped or fail; none is left."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.tiny_stages import Home, build_stage, stage_settings
from support.waiting import wait_until

from ttrain.core.signals import PARENT
from ttrain.engine import fork_server, processes
from ttrain.engine.fork_server import ForkServer
from ttrain.engine.stage_worker import PROCESS_NAME
from ttrain.errors import StageFailed
from ttrain.store.layout import Artifact
from ttrain.tasks import PRETRAIN, STAGES

UP = "import os, time; os.write(1, b'up\\n'); time.sleep(30)"  # in one call: two share a pipe
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


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package and modules of the tests, in front of the path of new processes."""
    directory = tmp_path / "package"
    package = Path(fork_server.__file__).parents[1]
    shutil.copytree(package, directory / "ttrain")  # with its bytecode, since none is written here
    (directory / "ttrain" / "__init__.py").write_text("VALUE = 1\n")
    (directory / "errand.py").write_text(ERRAND)
    monkeypatch.setenv("PYTHONPATH", str(directory))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    return directory


def describe(server: ForkServer) -> tuple[int, int, dict[str, Any], str]:
    """The number and exit code of a forked process, how it describes itself, and its errors."""
    environment = {**os.environ, "MARK": "a b\udcff"}
    with tempfile.TemporaryFile() as output:
        process = server.start("errand", [DESCRIBE], environment, output.fileno())
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


def test_nothing_outlives_a_killed_launcher(package: Path) -> None:
    command = [sys.executable, "-c", LAUNCHER, UP]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        pids = [int(launcher.stdout.readline())]
        # A child stopped before its first instruction cannot have asked to end with the server.
        lines = sorted(launcher.stdout.readline() for _ in range(4))
        assert lines[2:] == ["up\n", "up\n"]
        pids += [*map(int, lines[:2])]
        psutil.Process(pids[1]).suspend()
        assert all(map(is_running, pids))
        launcher.kill()
    wait_until(lambda: not any(map(is_running, pids)))


LIMIT_SECONDS = 5.0
SEEDS = itertools.count(1)


class TwoRanks:
    """A stage on two ranks, with a seed that no other test has."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.training = {"optim": {"kind": "adamw"}, "seed": next(SEEDS)}

    def run(self, steps: int, act: Callable[[str], Any] = print, **runtime: Any) -> Artifact:
        settings = stage_settings(steps, self.training, devices=2, **runtime)
        inputs = self.home.pretrain_inputs()
        return build_stage(PRETRAIN, settings, self.home.store, inputs, act).artifact

    def fail(self, act: Callable[[], Any], steps: int = 400, **runtime: Any) -> tuple[str, float]:
        """The stage's message, and the seconds from `act` to the end."""
        began: list[float] = []

        def act_once(line: str) -> None:
            if not began and ("now" in line or "step 6/" in line):
                began.append(time.monotonic())
                act()

        with pytest.raises(StageFailed) as failed:
            self.run(steps, act_once, **runtime)
        return str(failed.value), time.monotonic() - began[0]


def workers() -> list[psutil.Process]:
    """The ranks that this process has started, rank 0 first."""
    children = psutil.Process().children(recursive=True)
    ranks = [child for child in children if child.name() == PROCESS_NAME]
    return sorted(ranks, key=lambda child: child.pid)


@pytest.fixture
def ranks(stage_home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoRanks]:
    """Afterwards no rank is left."""
    monkeypatch.setattr(processes, "OTHERS_SECONDS", 1.0)
    yield TwoRanks(stage_home)
    assert workers() == []


def test_a_stopped_rank_ends_all_after_the_timeout(ranks: TwoRanks) -> None:
    limit = {"rank_timeout_seconds": LIMIT_SECONDS}
    message, seconds = ranks.fail(lambda: workers()[0].suspend(), **limit)
    assert re.search("failed on rank 1: .*imed out", message), message
    assert LIMIT_SECONDS < seconds < LIMIT_SECONDS + 15


def test_a_rank_that_raises_ends_the_others(ranks: TwoRanks, monkeypatch: Any) -> None:
    monkeypatch.setattr(processes, "WORKER", "support.saboteur")
    message, seconds = ranks.fail(lambda: None)
    assert "rank 1: ZeroDivisionError: of rank 1;" in message and seconds < 20


def test_after_a_killed_rank_the_next_try_continues_at_the_checkpoint(ranks: TwoRanks) -> None:
    message, seconds = ranks.fail(lambda: workers()[1].kill(), 60)
    assert "SIGKILL" in message and "log.txt" in message and seconds < 20
    artifact = ranks.run(60)
    assert 0 < artifact.result["resumed_from_step"] < 60
    assert not ranks.home.store.work("pretrain", artifact.key).exists()


def test_lack_of_memory_names_a_setting(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    for signum, text, stage, setting in (
        ("KILL", "", "pretrain", "runtime.rows_per_device"),
        ("ABRT", "memory allocation of 1168 bytes failed", "tokenizer", "tokenizer.max_b"),
    ):
        process = subprocess.Popen(["sh", "-c", f"kill -{signum} $$"])
        process.wait()
        log.write_text(text)
        group = processes.ProcessGroup([process])
        assert group.poll()
        with pytest.raises(StageFailed, match=f"memory ran out.* lower {setting}"):
            processes.result_of(group, STAGES[stage], log, None)
