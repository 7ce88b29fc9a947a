"""`ttrain up`, `ttrain down`, and which Prefect server a run talks to; imports neither prefect nor mlflow.

Prefect reads its settings while it is imported, so what is decided here goes into the environment before that. A run
uses the server that PREFECT_API_URL names, else the one that `up` left running, else one that lives and dies with the
run. All of them listen on 127.0.0.1 only, and nothing they do leaves the machine.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final

from flows import processes
from flows.guarding import ASSISTANT, Guarded, hosts_of
from flows.processes import HEALTH, HOST, STOP_SECONDS, TOKEN
from ttrain import tracking
from ttrain.store import write_json

log = logging.getLogger("ttrain")
OWNER: Final = "TTRAIN_SERVER_OWNER"
PORT: Final = "TTRAIN_SERVER_PORT"
HOME: Final = "TTRAIN_SERVER_HOME"
RESTARTS: Final = 5  # of a server that dies with each start

# Who phones home: Prefect's SDK (Amplitude); its server, and its UI from the browser (both obey "analytics"); MLflow.
# Prefect takes 1 or true for DO_NOT_TRACK, MLflow only true.
SILENT: Final = {
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
# The level of the console's handler, not of a logger: what flow and task runs say, and our own warnings, still reach the
# API and so the UI.
QUIET: Final = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "ERROR",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "ttrain",
}

_own_url: str | None = None  # of the server that this process started


@dataclass(frozen=True)
class Servers:
    """Where the two servers answer."""

    prefect_url: str
    prefect_api_url: str
    mlflow_url: str


def prefect_environment(home: Path) -> dict[str, str]:
    """What to add to the environment before prefect is imported; never a variable that the user has set."""
    wanted = {**SILENT, **QUIET, "PREFECT_HOME": str(home.resolve() / "prefect")}
    if server := processes.living(home, "prefect"):
        wanted["PREFECT_API_URL"] = f"http://{HOST}:{server.port}/api"
    elif not os.environ.get("PREFECT_API_URL"):
        # For whoever does not call `own_server`; Prefect's 20 s are short on a busy machine
        wanted["PREFECT_SERVER_EPHEMERAL_ENABLED"] = "true"
        wanted["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "120"
    return _unset(wanted) | _without_proxy()


def answers(api_url: str) -> bool:
    """Whether a Prefect server is behind that address; it may be busy, so it gets ten seconds."""
    try:
        with urllib.request.urlopen(f"{api_url.rstrip('/')}/health", timeout=10):
            return True
    except urllib.error.HTTPError:
        return True  # something is there; it may want a key, which Prefect knows
    except (OSError, ValueError):
        return False


def is_own() -> bool:
    """Whether this process started the Prefect server that it uses."""
    return _own_url is not None and os.environ.get("PREFECT_API_URL") == _own_url


def own_server(home: Path) -> Callable[[], None]:
    """Starts a Prefect server for this process alone, unless one is named or running; returns what waits for it.

    Call it with `prefect_environment` applied, then import prefect, then wait: the import goes on meanwhile (0.9 s),
    and prefect need not import its own server to start it (1.3 s). Prefect's ephemeral server dies of the Ctrl-C that
    its run still has to report, and outlives a run that is killed; this one does neither. Raises TTrainError like `up`.
    """
    lock = processes.start_lock(home)
    lock.acquire()
    if server := processes.living(home, "prefect"):
        os.environ.setdefault("PREFECT_API_URL", f"http://{HOST}:{server.port}/api")
    if os.environ.get("PREFECT_API_URL"):
        lock.release()
        return lambda: None
    # Below 32768, where outgoing connections get theirs: who asks a port there that nobody serves may reach himself
    port = processes.free_port(10_000 + secrets.randbelow(10_000))
    own = _OwnServer(port, processes.folder_of(home) / "own.log")
    atexit.register(own.end)  # atexit comes after Prefect has sent its last logs and events
    global _own_url
    _own_url = os.environ["PREFECT_API_URL"] = f"http://{HOST}:{port}/api"

    def wait() -> None:
        try:
            own.wait()
        finally:
            lock.release()

    return wait


@final
class _OwnServer:
    """The Prefect server of this process; started at once, and again on its port and its database should it die.

    The kernel kills what takes memory when that runs out. A run whose server is gone goes on, but Prefect's client asks
    at each state for minutes before it gives up: eight stages that took 20 s had not ended after five minutes.
    """

    def __init__(self, port: int, log_file: Path) -> None:
        self._port, self._log_file, self._owner = port, log_file, os.getpid()
        self._lock, self._is_ending = threading.Lock(), False
        self._process = self._spawn()

    def wait(self) -> None:
        """Returns when it answers, and keeps it from then on. Raises TTrainError."""
        processes.wait("prefect", self._port, self._process, self._log_file)
        threading.Thread(target=self._keep, name="own-server", daemon=True).start()

    def end(self) -> None:
        """Ends it; done in a forked child, which inherits what is registered, it does nothing."""
        if os.getpid() == self._owner:
            with self._lock:
                self._is_ending = True
            processes.end(self._process)

    def _keep(self) -> None:
        for _ in range(RESTARTS):
            code = self._process.wait()
            with self._lock:
                if self._is_ending:
                    return
                log.warning("the Prefect server of this run ended with code %d; it is started again", code)
                self._process = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [*_uvicorn("owned_app", self._port), "--log-level", "error", "--timeout-graceful-shutdown", "5"]
        ephemeral = {"PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1", "PREFECT_SERVER_UI_ENABLED": "false"}
        return processes.spawn(command, {**ephemeral, OWNER: str(self._owner), PORT: str(self._port)}, self._log_file)


def owned_app() -> Any:
    """Prefect's server application, in the server's process; ends that process when its owner is gone.

    SIGTERM does not: who stops all processes at once, as systemd does, stops the owner too, which still has to report to it.
    """
    owner = int(os.environ[OWNER])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == owner:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(STOP_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    from prefect.server.api.server import create_app

    return Guarded(create_app(), hosts_of(HOST, int(os.environ[PORT])))


def served_app() -> Any:
    """Prefect's server application as `prefect server start` has it, in the process of the server that `up` starts."""
    from prefect.server.api.server import create_app

    return Guarded(create_app(final=True), hosts_of(HOST, int(os.environ[PORT])))


def tracker_app() -> Any:
    """MLflow's server application over the home's database, in the process of the server that `up` starts."""
    return Guarded(tracking.server_app(Path(os.environ[HOME])), hosts_of(HOST, int(os.environ[PORT])), without=[ASSISTANT])


def up(home: Path, *, prefect_port: int = 4200, mlflow_port: int = 5000) -> Servers:
    """Starts what is not running yet, in the background, and returns when both answer.

    A port that another program holds is passed over for the next free one. Raises TTrainError, with the end of the log,
    when a server does not start; then none that this call started is left.
    """
    start(home, {"prefect": prefect_port, "mlflow": mlflow_port})
    found = running(home)
    assert found is not None, "both have just answered"
    return found


def start(home: Path, ports: Mapping[str, int]) -> None:
    """What `up` does, for the servers that are named with the ports to try first."""
    home = home.resolve()
    started: list[tuple[processes.Server, subprocess.Popen[bytes]]] = []
    with processes.start_lock(home):
        try:
            for name, port in ports.items():
                if not processes.living(home, name):
                    processes.stop(home, name)  # what is left of one that does not answer
                    started.append(_start(home, name, port))
            for number in range(len(started)):
                _wait(home, started, number)
        except BaseException:
            for server, _ in started:
                processes.stop(home, server.name)
            raise
        finally:
            for _, process in started:
                process.returncode = 0  # it is left to itself, or gone: Popen would warn of a child that still runs


def _wait(home: Path, started: list[tuple[processes.Server, subprocess.Popen[bytes]]], number: int) -> None:
    """Returns when it answers: on another port, where one that was free is taken meanwhile."""
    while True:
        server, process = started[number]
        try:
            processes.wait(server.name, server.port, process, processes.folder_of(home) / f"{server.name}.log")
            return
        except processes.PortTaken:
            processes.stop(home, server.name)
            started[number] = _start(home, server.name, server.port + 1)


def down(home: Path) -> list[str]:
    """Stops both with all their processes; the names of those that ran. Raises TTrainError when one does not end."""
    if not processes.folder_of(home).exists():
        return []
    with processes.start_lock(home):
        return [name for name in HEALTH if processes.stop(home, name)]


def running(home: Path) -> Servers | None:
    """The addresses, when both servers run."""
    prefect, mlflow = (processes.living(home, name) for name in HEALTH)
    if not prefect or not mlflow:
        return None
    url = f"http://{HOST}:{prefect.port}"
    return Servers(url, f"{url}/api", f"http://{HOST}:{mlflow.port}")


def _start(home: Path, name: str, wanted_port: int) -> tuple[processes.Server, subprocess.Popen[bytes]]:
    port, token, path = processes.free_port(wanted_port), secrets.token_hex(8), processes.folder_of(home) / f"{name}.log"
    if port != wanted_port:
        log.warning("port %d is taken by another program; %s listens on %d instead", wanted_port, name, port)
    command, environment = (_prefect if name == "prefect" else _mlflow)(home, port)
    path.unlink(missing_ok=True)
    process = processes.spawn(command, {**_unset(SILENT), **environment, TOKEN: token}, path)
    server = processes.Server(name, process.pid, port, token)
    write_json(path.with_suffix(".json"), asdict(server))
    return server, process


def _prefect(home: Path, port: int) -> tuple[list[str], dict[str, str]]:
    environment = {
        **_unset({"PREFECT_HOME": str(home / "prefect")}),
        "PREFECT_API_URL": f"http://{HOST}:{port}/api",
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(home / "prefect" / "ui"),  # else it is built inside site-packages
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://{HOST}:{port},http://localhost:{port}",  # else any web page
    }
    return [*_uvicorn("served_app", port), "--log-level", "warning"], {**environment, PORT: str(port)}


def _uvicorn(factory: str, port: int) -> list[str]:
    """Serves what a function of this module makes."""
    command = ["uvicorn", "--factory", f"flows.servers:{factory}", "--app-dir", str(Path(__file__).parents[1])]
    return [*command, "--host", HOST, "--port", str(port)]


def _mlflow(home: Path, port: int) -> tuple[list[str], dict[str, str]]:
    tracking.prepare(home)  # whole or not at all, where the server would make it in place and refuse an older one
    tracking.database_of(home).parent.mkdir(parents=True, exist_ok=True)
    hosts = hosts_of(HOST, port)
    environment = {
        HOME: str(home),
        PORT: str(port),
        "MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(hosts),
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": ",".join(f"http://{host}" for host in hosts),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # eight processes more, for LLMs that judge
    }
    return [*_uvicorn("tracker_app", port), "--log-level", "warning"], environment


def _unset(wanted: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in wanted.items() if not os.environ.get(name)}


def _without_proxy() -> dict[str, str]:
    """Where a proxy is set, our own address is excepted: else the requests to 127.0.0.1 go to the proxy."""
    name = "no_proxy" if "no_proxy" in os.environ else "NO_PROXY"
    listed = os.environ.get(name, "")
    if not urllib.request.getproxies() or HOST in listed or listed.strip() == "*":
        return {}
    return {name: ",".join(filter(None, (listed, HOST, "localhost")))}
