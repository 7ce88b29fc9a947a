"""Start, wait for and stop the servers' processes, which `ttrain.store.server_records` tells from all others."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final, final

import psutil
from filelock import FileLock

from ttrain.config import Auth
from ttrain.errors import TTrainError
from ttrain.flows import server_processes
from ttrain.flows.servers import (
    AUTH_STRING,
    PORT,
    prefect_app,
    set_damaged_history_aside,
    token_environment,
    token_of,
    uvicorn_command,
)
from ttrain.store import server_records
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


log = logging.getLogger("ttrain")

OWNER: Final = "TTRAIN_SERVER_OWNER"
RESTARTS: Final = 5  # of a server that keeps dying
HISTORY_CHECK_SECONDS: Final = 0.5  # spent on each run before its server starts; 1.6 MB take 0.01 s, 94 MB 0.5 s

_own_url: str | None = None  # of the server that this process started


def is_own() -> bool:
    """Whether this process started the Prefect server that it uses."""
    return _own_url is not None and os.environ.get("PREFECT_API_URL") == _own_url


def start_temporary_server(home: Path, auth: Auth = "token") -> Callable[[], None]:
    """Start a Prefect server for this process alone, unless one is named or running; returns a function that waits for it.

    Call it with `prefect_environment` applied, then import prefect, then wait: the import goes on meanwhile (0.9 s),
    and prefect need not import its own server to start it (1.3 s). Prefect's ephemeral server dies of the Ctrl-C that
    its run still has to report, and outlives a run that is killed; this one does neither. Raises TTrainError like `up`.
    """
    lock = server_processes.start_lock(home)
    lock.acquire()
    if server := server_records.live_server(home, "prefect"):
        os.environ.setdefault("PREFECT_API_URL", f"{server.url}/api")
    if os.environ.get("PREFECT_API_URL"):
        os.environ.update(token_environment(home, os.environ["PREFECT_API_URL"]))
        lock.release()
        return lambda: None
    set_damaged_history_aside(home, HISTORY_CHECK_SECONDS)
    # Below 32768, where ports of outgoing connections begin: a client of an unserved port there may connect to itself
    port = server_processes.free_port(10_000 + secrets.randbelow(10_000))
    token = token_of(auth, server_records.new_token)  # known to this process and its children alone
    temporary_server = _TemporaryServer(port, home, token)
    atexit.register(temporary_server.end)  # atexit comes after Prefect has sent its last logs and events
    global _own_url
    _own_url = os.environ["PREFECT_API_URL"] = f"http://{HOST}:{port}/api"
    os.environ[AUTH_STRING] = token  # in place of a password for another server

    def wait() -> None:
        try:
            temporary_server.wait()
        finally:
            lock.release()

    return wait


@final
class _TemporaryServer:
    """The Prefect server of this process; started at once, and again on its port and its database should it die.

    The kernel kills what takes memory when that runs out. A run whose server is gone goes on, but Prefect's client asks
    at each state for minutes before it gives up: eight stages that took 20 s had not ended after five minutes.
    """

    def __init__(self, port: int, home: Path, token: str) -> None:
        self._port, self._home, self._token, self._owner = port, home, token, os.getpid()
        self._log_file = server_records.folder_of(home) / "own.log"
        self._lock, self._is_ending = threading.Lock(), False
        self._process = self._spawn()

    def wait(self) -> None:
        """Wait until the server answers, and restart it from then on if it dies. Raises TTrainError."""
        try:
            server_processes.wait("prefect", self._port, self._process, self._log_file)
        except TTrainError:
            if not set_damaged_history_aside(self._home):
                raise
            server_processes.end(self._process)
            self._process = self._spawn()
            server_processes.wait("prefect", self._port, self._process, self._log_file)
        threading.Thread(target=self._keep, name="own-server", daemon=True).start()

    def end(self) -> None:
        """End the server; does nothing in a forked child, which inherits the atexit handler."""
        if os.getpid() == self._owner:
            with self._lock:
                self._is_ending = True
            server_processes.end(self._process)

    def _keep(self) -> None:
        for _ in range(RESTARTS):
            code = self._process.wait()
            with self._lock:
                if self._is_ending:
                    return
                log.warning("the Prefect server of this run ended with code %d; it is started again", code)
                self._process = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [*uvicorn_command(owned_app, self._port), "--log-level", "error", "--timeout-graceful-shutdown", "5"]
        ephemeral = {"PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1", "PREFECT_SERVER_UI_ENABLED": "false"}
        token_variables = {PORT: str(self._port), server_records.ACCESS: self._token, AUTH_STRING: self._token}
        environment = {**ephemeral, **token_variables, OWNER: str(self._owner)}
        return server_processes.spawn(command, environment, self._log_file)


def owned_app() -> Any:
    """Prefect's server application, in the server's process; ends that process when its owner is gone.

    SIGTERM and SIGHUP do not: who stops all processes at once, as systemd does, stops the owner too, which still has to
    report to it.
    """
    owner = int(os.environ[OWNER])
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == owner:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(STOP_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return prefect_app(final=False)
