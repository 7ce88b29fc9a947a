"""The processes of the servers: started, told from all others, and ended; what is known of a server is in its file."""

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
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Final

import psutil
from filelock import FileLock

from ttrain.errors import TTrainError
from ttrain.store import read_json

HOST: Final = "127.0.0.1"
HEALTH: Final = {"prefect": "/api/health", "mlflow": "/health"}
START_SECONDS: Final = 180.0  # a fresh home takes 10 s on two idle cores, 6 of them for Prefect's migrations
STOP_SECONDS: Final = 10.0  # idle servers stop within 2 s
TOKEN: Final = "TTRAIN_SERVER_TOKEN"


class PortTaken(TTrainError):
    """Another program has the port that was free a moment ago."""


@dataclass(frozen=True)
class Server:
    """The file about a server that `up` started.

    Its processes share the session that `pid` leads and carry the token in their environment. A pid alone may be
    recycled, a start time moves with the clock, and a child may outlive its parent.
    """

    name: str
    pid: int
    port: int
    token: str

    def owns(self, pid: int) -> bool:
        """Two proofs, since what is owned gets killed: a mistake in one of them would end every process of the user."""
        try:
            return os.getsid(pid) == self.pid and psutil.Process(pid).environ()[TOKEN] == self.token
        except (psutil.Error, LookupError, OSError, OverflowError):  # gone, a zombie, another's, or no pid at all
            return False

    def processes(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self.owns(process.pid)]


def living(home: Path, name: str) -> Server | None:
    """The server of that name, if its process lives and its port answers."""
    server = read(home, name)
    if server and server.owns(server.pid):
        with contextlib.suppress(OSError), socket.create_connection((HOST, server.port), timeout=2.0):
            return server
    return None


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
    """Returns when the server answers; raises TTrainError with the end of its log when it dies or stays silent.

    PortTaken where another program answers on its port, which was faster: servers that start at once may choose the same.
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
            what = f"did not answer within {START_SECONDS:.0f} s" if code is None else f"ended with exit code {code}"
            tail = "\n".join(path.read_text(errors="replace").splitlines()[-20:])
            raise TTrainError(f"the {name} server {what} on port {port}; the end of {path}:\n{tail}")
        time.sleep(0.05)


def _listens(leader: int, port: int) -> bool:
    """Whether a process of that session listens there."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == leader and any(
                found.status == psutil.CONN_LISTEN and found.laddr.port == port
                for found in process.net_connections(kind="tcp")
            ):
                return True
    return False


def stop(home: Path, name: str) -> bool:
    """Ends every process of that server and forgets it; whether there was one."""
    server = read(home, name)
    found = family = server.processes() if server else []
    for action, seconds in ((psutil.Process.terminate, STOP_SECONDS), (psutil.Process.kill, 5.0)):
        for process in family:
            with contextlib.suppress(psutil.Error):
                action(process)
        psutil.wait_procs(family, timeout=seconds)
        family = server.processes() if server else []
    if family:
        raise TTrainError(f"the {name} server does not end; its processes: {', '.join(str(one.pid) for one in family)}")
    (folder_of(home) / f"{name}.json").unlink(missing_ok=True)
    return bool(found)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends our own server, which takes no SIGTERM."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def read(home: Path, name: str) -> Server | None:
    record = read_json(folder_of(home) / f"{name}.json")
    try:
        return Server(name, int(record["pid"]), int(record["port"]), str(record["token"]))
    except (LookupError, TypeError, ValueError):  # none, or a damaged one
        return None


def folder_of(home: Path) -> Path:
    return home.resolve() / "servers"


def start_lock(home: Path) -> FileLock:
    """Held while servers start and end; two first runs at once would migrate one database twice."""
    folder_of(home).mkdir(parents=True, exist_ok=True)
    return FileLock(folder_of(home) / "start.lock", thread_local=False)


def free_port(wanted: int) -> int:
    """The first port from `wanted` on that nobody listens on."""
    for port in range(wanted, min(wanted + 100, 1 << 16)):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do, for a port just left
            probe.bind((HOST, port))
            return port
    raise TTrainError(f"no port from {wanted} to {wanted + 99} is free; name another one")
