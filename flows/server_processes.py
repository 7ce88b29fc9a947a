"""Start, wait for and stop the servers' processes, which `ttrain.store.server_records` tells from all others."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Final

import psutil
from filelock import FileLock

from ttrain.errors import TTrainError
from ttrain.store.server_records import HOST, folder_of, make_folder, read

HEALTH: Final = {"prefect": "/api/health", "mlflow": "/health"}
START_SECONDS: Final = 180.0  # a fresh home takes 10 s on two idle cores, 6 of them for Prefect's migrations
STOP_SECONDS: Final = 10.0  # idle servers stop within 2 s


class PortTaken(TTrainError):
    """Another program has the port that was free a moment ago."""


def spawn(module: list[str], environment: Mapping[str, str], path: Path) -> subprocess.Popen[bytes]:
    """`python -m module` in its own session, where the terminal's Ctrl-C does not reach it; its output goes to `path`.

    It runs in the log's directory, since Python looks for modules where it is, and Prefect for `.env` and settings.
    """
    with path.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *module],
            env={**os.environ, **environment},
            cwd=path.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait(name: str, port: int, process: subprocess.Popen[bytes], path: Path) -> None:
    """Wait until the server answers; raises TTrainError with the end of its log when it dies or stays silent.

    PortTaken where another program answers on its port: servers that start at once may choose the same.
    """
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    url, deadline = f"http://{HOST}:{port}{HEALTH[name]}", time.monotonic() + START_SECONDS
    while True:
        answered = False
        with contextlib.suppress(OSError, HTTPException), direct.open(url, timeout=5.0):
            answered = True
        code = process.poll()
        if answered and code is None and _listens(process.pid, port):
            return
        if answered and code is not None:
            raise PortTaken(f"port {port} was taken by another program before the {name} server had it; try again")
        if code is not None or time.monotonic() > deadline:
            failure = f"did not answer within {START_SECONDS:.0f} s" if code is None else f"ended with exit code {code}"
            tail = "\n".join(path.read_text(errors="replace").splitlines()[-20:])
            raise TTrainError(f"the {name} server {failure} on port {port}; the end of {path}:\n{tail}")
        time.sleep(0.05)


def _listens(leader: int, port: int) -> bool:
    """Whether a process of the leader's session listens on the port."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == leader and any(
                connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
                for connection in process.net_connections(kind="tcp")
            ):
                return True
    return False


def stop(home: Path, name: str) -> bool:
    """End every process of a server and remove its record; returns whether there was one."""
    server = read(home, name)
    processes = family = server.processes() if server else []
    for action, seconds in ((psutil.Process.terminate, STOP_SECONDS), (psutil.Process.kill, 5.0)):
        for process in family:
            with contextlib.suppress(psutil.Error):
                action(process)
        psutil.wait_procs(family, timeout=seconds)
        family = server.processes() if server else []
    if family:
        raise TTrainError(
            f"the {name} server does not end; its processes: {', '.join(str(process.pid) for process in family)}"
        )
    (folder_of(home) / f"{name}.json").unlink(missing_ok=True)
    return bool(processes)


def end(process: subprocess.Popen[bytes]) -> None:
    """End our own server, which ignores SIGTERM."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def start_lock(home: Path) -> FileLock:
    """Lock for the start and end of servers; two first runs at once would migrate one database twice."""
    return FileLock(make_folder(home) / "start.lock", thread_local=False)


def free_port(first_port: int) -> int:
    """The first port from `first_port` on that nobody listens on."""
    for port in range(first_port, min(first_port + 100, 1 << 16)):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do, for a port just left
            probe.bind((HOST, port))
            return port
    raise TTrainError(f"no port from {first_port} to {first_port + 99} is free; choose another one")
