"""The fork server: what it forks is a process like any other, and none of them outlives who waits for it."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
from support.tiny_stages import stage_settings
from support.waiting import wait_until

from ttrain.core.signals import PARENT, SAME_SIGNAL_SECONDS
from ttrain.engine import fork_server, processes
from ttrain.engine.fork_server import ForkedProcess, ForkServer, ForkServerError
from ttrain.engine.stop_request import StopRequest
from ttrain.tasks import PRETRAIN

PACKAGE = Path(fork_server.__file__).parents[1]
ERRAND = """
import gc, json, os, random, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from ttrain import VALUE

def main():
    what = sys.argv[1]
    if what == "tell":
        import numpy
        print(json.dumps({
            "session": os.getsid(0) == os.getpid(), "parent": os.getppid(), "environment": dict(os.environ),
            "directory": os.getcwd(), "random": [random.random(), numpy.random.random()], "value": VALUE,
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "threads": threading.active_count(),
            "handler": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "input": sys.stdin.read(),
            "collects": gc.isenabled(),
            "descriptors": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) > 2
                                  and os.path.lexists(f"/proc/self/fd/{fd}")),
        }))
        print("to the error output", file=sys.stderr)
        return 3
    if what == "raise":
        raise ValueError("of its own")
    if what == "late":
        threading.Thread(target=lambda: (time.sleep(0.3), Path(sys.argv[2]).touch())).start()
        return 0
    if what == "pool":
        global pool
        pool = ThreadPoolExecutor(1)
        pool.submit(int).result()
        return 0
    if what == "listen":
        time.sleep(0.3)  # as imports do
        from ttrain.engine.stage_worker import StopFlag
        stop = StopFlag(stops_by_itself=False)
        stop.listen()
        print("stopped" if stop() else "never told", flush=True)
        time.sleep(60)
    os.write(1, b"up\\n")  # two of them may share a pipe, and print writes the end of the line by itself
    time.sleep(60)
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
server = ForkServer(dict(os.environ), sys.argv[1:])
print(server.pid, flush=True)
for _ in range(2):
    print(server.start("errand", ["sleep"], dict(os.environ), 1).pid, flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a copy of the package, the module `errand`, and `worker` in the place of a stage's."""
    directory = tmp_path_factory.mktemp("package")
    shutil.copytree(PACKAGE, directory / "ttrain")  # with its bytecode, since none is written here
    (directory / "ttrain" / "__init__.py").write_text("VALUE = 1\n")
    (directory / "errand.py").write_text(ERRAND)
    (directory / "worker.py").write_text(WORKER)
    return directory


@pytest.fixture
def place(package: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That directory, in front of the path of every new process."""
    for name, value in {
        "PYTHONPATH": str(package),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
    }.items():
        monkeypatch.setenv(name, value)
    return package


@pytest.fixture(scope="module")
def shared_server(package: Path) -> Iterator[ForkServer]:
    server = ForkServer(
        {**os.environ, "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1"},
        ["json", "numpy"],
    )
    yield server
    server.close()


@pytest.fixture
def server(place: Path, shared_server: ForkServer) -> ForkServer:
    """One for all tests that leave it as it is, which has loaded next to nothing, hence starts at once."""
    return shared_server


@contextlib.contextmanager
def errand(
    server: ForkServer, *arguments: str, **options: Any
) -> Iterator[tuple[ForkedProcess, IO[bytes]]]:
    """A forked process and what it has said."""
    with tempfile.TemporaryFile() as output:
        process = server.start(
            "errand", arguments, {**os.environ, "MARK": "a b\udcff"}, output.fileno(), **options
        )
        assert process is not None
        try:
            yield process, output
        finally:
            process.kill()
            process.wait()


def said(output: IO[bytes], wanted: str = "") -> str:
    def text() -> str:
        output.seek(0)
        found = output.read().decode()
        return found if wanted in found else ""

    return str(wait_until(text))


def wait_for_end(*pids: int) -> None:
    """Wait until all of them have ended; zombies have."""
    wait_until(lambda: not any(map(_runs, pids)))


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def test_a_forked_process_is_as_one_that_was_started(
    server: ForkServer, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LATER", "than the server")
    drawn = []
    for _ in range(2):
        with errand(server, "sleep"), errand(server, "tell") as (process, output):
            assert process.wait() == 3
            told, error = said(output).splitlines()
        found = json.loads(told)
        drawn += found["random"]
    assert len({*drawn}) == 4, "each draws other random numbers"
    assert error == "to the error output"
    assert found["session"] and found["directory"] == str(tmp_path)
    expected = {**os.environ, "MARK": "a b\udcff", PARENT: str(found["parent"])}
    assert {name: found["environment"].get(name) for name in expected} == expected
    assert {*found["environment"]} - {*expected} == set(), (
        "what keeps the server at one thread is its own"
    )
    assert found["handler"] and found["collects"] and found["input"] == "" and found["threads"] == 1
    assert found["blocked"] == [signal.SIGHUP, signal.SIGINT, signal.SIGTERM], (
        "until it has handlers"
    )
    assert [name for name in found["descriptors"] if "socket" in name or "pidfd" in name] == []


def test_it_takes_over_code_that_is_loaded_and_serves_none_that_is_stale(place: Path) -> None:
    code = place / "ttrain" / "__init__.py"
    code.write_text("import os\nVALUE = [1, os.getpid()]\n")
    server = ForkServer(dict(os.environ), ["json", "numpy"])
    for value in (1, 2):
        with errand(server, "tell") as (process, output):
            process.wait()
            assert json.loads(said(output).splitlines()[0])["value"] == [
                value,
                server.pid if value == 1 else process.pid,
            ]
        code.write_text("import os\nVALUE = [2, os.getpid()]\n")
    server.close()


def test_how_it_ended_comes_back(server: ForkServer, tmp_path: Path) -> None:
    with errand(server, "raise") as (process, output):
        assert process.wait() == 1 and "ValueError: of its own" in said(output)
    with errand(server, "late", str(tmp_path / "late")) as (process, _):
        assert process.wait() == 0 and (tmp_path / "late").exists(), (
            "a thread that is no daemon is waited for"
        )
    with errand(server, "pool") as (process, _):
        # a pool whose thread waits for work, and that nobody closed, does not hold it up
        assert wait_until(lambda: process.poll() is not None, 10) and process.returncode == 0
    with errand(server, "sleep") as (process, output):
        said(output, "up")
        assert process.poll() is None
        psutil.Process(process.pid).kill()
        assert process.wait() == -signal.SIGKILL
        process.send_signal(signal.SIGTERM)  # harmless


def test_a_killed_server_takes_what_it_forked_along_and_is_named(place: Path) -> None:
    server = ForkServer(os.environ, ["json"])
    with errand(server, "sleep") as (stopped, output), errand(server, "sleep") as (process, _):
        said(output, "up")
        psutil.Process(stopped.pid).suspend()  # which hears of nothing any more
        psutil.Process(server.pid).kill()
        wait_for_end(stopped.pid, process.pid)
        assert (process.wait(), stopped.wait()) == (-signal.SIGKILL, -signal.SIGKILL)
    assert not server.alive
    with pytest.raises(ForkServerError, match="the fork server was killed by SIGKILL"):
        server.start("errand", ["tell"], os.environ, 1)


@pytest.mark.parametrize("moment", ["while it loads", "with children"])
def test_nothing_outlives_a_killed_launcher(place: Path, moment: str) -> None:
    (place / "slow.py").write_text("import time; time.sleep(30)\n")
    preloaded = ["slow"] if moment == "while it loads" else ["json"]
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *preloaded], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    pids = [int(launcher.stdout.readline())]
    if moment == "with children":
        # Both must be up: a child that is stopped before its first instruction cannot have asked to end with the server.
        lines = sorted(launcher.stdout.readline() for _ in range(4))
        assert lines[2:] == ["up\n", "up\n"]
        pids += [*map(int, lines[:2])]
        psutil.Process(pids[1]).suspend()
    assert all(map(_runs, pids))
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    wait_for_end(*pids)


def test_it_refuses_to_fork_from_threads(place: Path) -> None:
    (place / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(30,), daemon=True).start()\n"
    )
    with pytest.raises(ForkServerError, match="2 threads run after loading threaded"):
        ForkServer(os.environ, ["threaded"]).start("errand", ["tell"], os.environ, 1)


def test_the_libraries_of_stages_start_no_thread() -> None:
    """Else no stage would be forked: all of them must load here."""
    environment = processes.environment_of(stage_settings())
    with tempfile.TemporaryFile() as output:
        process = processes.fork_server_for(environment).start(
            "platform", [], environment, output.fileno()
        )
        assert process is not None
        process.kill()
        process.wait()


def test_a_wait_for_the_libraries_can_be_given_up(place: Path) -> None:
    (place / "slow.py").write_text("import time; time.sleep(30)\n")
    server = ForkServer(os.environ, ["slow"])
    began = time.monotonic()
    assert (
        server.start("errand", ["sleep"], os.environ, 1, lambda: time.monotonic() > began + 0.3)
        is None
    )
    assert time.monotonic() - began < 20
    server.close()
    wait_for_end(server.pid)


def test_a_signal_before_it_listens_is_not_lost_and_the_second_ends_it(server: ForkServer) -> None:
    """One that comes at once does not: whoever signals all processes signals the launching one too, which passes it on."""
    with errand(server, "listen") as (process, output):
        process.send_signal(signal.SIGTERM)
        said(output, "stopped")
        process.send_signal(signal.SIGTERM)
        time.sleep(SAME_SIGNAL_SECONDS + 0.1)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait() == 128 + signal.SIGINT


def started(work: Path) -> tuple[processes.ProcessGroup, str]:
    """The processes of a stage, which end at once, and what is in their log."""
    group = processes.ProcessGroup()
    with (work / "log.txt").open("w+b") as log:
        try:
            processes.start(group, PRETRAIN, stage_settings(), work, log, StopRequest())
            for process in group.processes:
                process.wait()
        finally:
            group.end()
        log.seek(0)
        return group, log.read().decode()


@pytest.fixture
def cheap_server(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Have stages use servers of their own in this test, which load what it says, and do next to nothing."""
    servers: dict[Any, ForkServer] = {}
    monkeypatch.setattr(processes, "WORKER", "worker")

    def use(*preloaded: str) -> None:
        monkeypatch.setattr(processes, "fork_servers", servers)
        monkeypatch.setattr(
            processes, "ForkServer", lambda environment: ForkServer(environment, preloaded)
        )

    yield use
    for server in servers.values():
        server.close()


def test_where_there_is_no_server_a_fresh_process_is_started_and_the_log_says_why(
    tmp_path: Path, cheap_server: Callable[..., None]
) -> None:
    cheap_server("missing")
    group, log = started(tmp_path)
    assert isinstance(group.processes[0], subprocess.Popen)
    assert "No module named 'missing'; a fresh process loads its libraries itself" in log
    assert "it ran" in log


def test_a_server_that_was_killed_between_two_stages_is_replaced(
    tmp_path: Path, cheap_server: Callable[..., None]
) -> None:
    cheap_server("json")
    environment = processes.environment_of(stage_settings())
    first = processes.fork_server_for(environment)
    assert isinstance(started(tmp_path)[0].processes[0], ForkedProcess)
    assert processes.fork_server_for(environment) is first, "one for all stages"
    psutil.Process(first.pid).kill()
    wait_for_end(first.pid)
    group, log = started(tmp_path)
    assert isinstance(group.processes[0], ForkedProcess) and log == "it ran\n"
