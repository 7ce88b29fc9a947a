"""`ttrain up`, `ttrain down`, and the Prefect server that a run uses; imports neither prefect nor mlflow.

Prefect reads its settings while it is imported, so the choices made here go into the environment before that. A run
uses the server that PREFECT_API_URL names, else the one that `up` left running, else one that lives and dies with the
run (`flows/prefect_run.py`). All of them listen on 127.0.0.1 only, and nothing they do leaves the machine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock

from ttrain.config import Auth
from ttrain.core.files import private_directory, write_json
from ttrain.core.sqlite_files import damage_of, set_aside
from ttrain.errors import TTrainError
from ttrain.flows.prefect_api import AUTH_STRING, SILENT, unset
from ttrain.store import server_records
from ttrain.store.server_records import HOST, SERVER_MARK, Server
from ttrain.tracking import client as mlflow_client
from ttrain.tracking import mirror

log = logging.getLogger("ttrain")
PORT = "TTRAIN_SERVER_PORT"
HOME = "TTRAIN_SERVER_HOME"
HEALTH = {"prefect": "/api/health", "mlflow": "/health"}
START_SECONDS = 180.0  # both take 11 s on two idle cores, 24 s where Prefect makes its database
STOP_SECONDS = 10.0  # idle servers stop within 2 s
# What Prefect's server says of a database that another version of Prefect wrote
UNKNOWN_REVISION = "Can't locate revision identified by"

# The slots to come that the server makes flow runs of, of each deployment. Its defaults make those of the next hour and at
# least three: 60 of a cron of every minute.
SLOTS_AHEAD = {
    "PREFECT_SERVER_SERVICES_SCHEDULER_MIN_RUNS": "2",
    "PREFECT_SERVER_SERVICES_SCHEDULER_MAX_RUNS": "2",
    "PREFECT_SERVER_SERVICES_SCHEDULER_MIN_SCHEDULED_TIME": "PT0S",
}


@dataclass(frozen=True)
class ServerAddresses:
    """The addresses of the two servers."""

    prefect_url: str
    prefect_api_url: str
    mlflow_url: str


def served_app() -> Any:
    """Prefect's server application as `prefect server start` has it, in the process of the server that `up` starts."""
    return prefect_app(final=True)


def prefect_app(*, final: bool) -> Any:
    os.environ.pop("PREFECT_SERVER_API_AUTH_STRING", None)  # a password for servers of the user's; the token is in its place
    from prefect.server.api.server import create_app

    return guarded_app(create_app(final=final), "prefect")


def tracker_app() -> Any:
    """MLflow's server application over the home's database, in the process of the server that `up` starts."""
    return guarded_app(mlflow_client.server_app(Path(os.environ[HOME])), "mlflow")


def guarded_app(app: Any, name: str) -> Any:
    """The application behind the guard; the health path tells nothing else, and needs no token."""
    from ttrain.flows.guard import Guard  # with starlette, which only the servers' processes need

    token = os.environ.get(server_records.ACCESS, "")
    return Guard(app, int(os.environ[PORT]), token, open_path=HEALTH[name])


def token_of(auth: Auth, make: Callable[[], str]) -> str:
    """The token that a new server asks for; "", with a warning, where servers.auth is off."""
    if auth == "off":
        log.warning(server_records.NO_AUTH)
        return ""
    return make()


def up(home: Path, *, prefect_port: int = 4200, mlflow_port: int = 5000, auth: Auth = "token") -> ServerAddresses:
    """Start the servers that are not running yet, in the background; returns when both answer.

    A port that another program holds is passed over for the next free one. Raises TTrainError, with the end of the log,
    when a server does not start; then those that this call started are stopped.
    """
    start(home, {"prefect": prefect_port, "mlflow": mlflow_port}, auth)
    addresses = running(home)
    assert addresses is not None, "both have just answered"
    return addresses


def start(home: Path, ports: Mapping[str, int], auth: Auth = "token", owner: str = "") -> None:
    """Start the named servers as `up` does, those that run not again.

    ports: those to try first
    owner: the command that ends the servers; empty for those of `up`
    """
    home = home.resolve()
    processes: dict[str, subprocess.Popen[bytes]] = {}
    with start_lock(home):
        missing = [name for name in ports if not server_records.live_server(home, name)]
        token = token_of(auth, lambda: server_records.make_token(home)) if missing else ""
        try:
            for name in missing:
                processes[name] = _start(home, name, ports[name], token, owner)
            for name in missing:
                try:
                    _wait(home, name, processes[name])
                except TTrainError as error:  # or another program took the port meanwhile
                    if name == "prefect":
                        set_database_aside(home, str(error))
                    processes[name] = _start(home, name, ports[name], token, owner)
                    _wait(home, name, processes[name])
        except BaseException:
            for name in missing:
                stop(home, name)
            raise
        finally:
            for process in processes.values():
                process.returncode = 0  # it outlives us: Popen would warn of a running child


def _wait(home: Path, name: str, process: subprocess.Popen[bytes]) -> None:
    server = server_records.read(home, name)
    assert server is not None, "its record has just been written"
    wait(name, server.port, process, server_records.folder_of(home) / f"{name}.log")


def set_database_aside(home: Path, failure: str = "") -> bool:
    """Rename Prefect's database where it is damaged, or where `failure` says that another version wrote it.

    It holds only the history of runs: the next server makes a new one. Returns whether it was renamed.
    """
    database = database_of(home)
    damage = damage_of(database)
    if UNKNOWN_REVISION in failure:
        damage = "it is of another version of Prefect"
    if damage is None:
        return False
    aside = set_aside(database)
    log.warning("%s cannot be used (%s); it is kept as %s, and a new one begins without the history of runs",
                database, damage, aside.name)  # fmt: skip
    return True


def prepare_database(home: Path) -> None:
    """Before a Prefect server starts: set a damaged database aside, and say that making a new one takes long."""
    private_directory(database_of(home).parent)
    set_database_aside(home)
    if not database_of(home).exists():
        log.warning("Prefect makes its database in %s, which takes some 15 s, once", database_of(home).parent)


def database_of(home: Path) -> Path:
    return home.resolve() / "prefect" / "prefect.db"


def down(home: Path) -> list[str]:
    """Stop both servers with all their processes; returns those that ran. Raises TTrainError when one does not end."""
    if not server_records.folder_of(home).exists():
        return []
    with start_lock(home):
        return [name for name in HEALTH if stop(home, name)]


def running(home: Path) -> ServerAddresses | None:
    """The addresses where both servers run, else None."""
    prefect, mlflow = (server_records.live_server(home, name) for name in HEALTH)
    if not prefect or not mlflow:
        return None
    return ServerAddresses(prefect.url, f"{prefect.url}/api", mlflow.url)


def _start(home: Path, name: str, wanted_port: int, token: str, owner: str) -> subprocess.Popen[bytes]:
    """Start a server, on the next free port where another program has its own, and record it."""
    stop(home, name)  # remains of one that does not answer
    port, mark = free_port(wanted_port), secrets.token_hex(8)
    path = server_records.folder_of(home) / f"{name}.log"
    if port != wanted_port:
        taken = "port %d is taken by another program; %s listens on %d instead"
        log.warning(taken, wanted_port, name, port)
    if name == "prefect":
        prepare_database(home)
    command, environment = (prefect_command if name == "prefect" else mlflow_command)(home, port)
    path.unlink(missing_ok=True)
    environment |= {PORT: str(port), server_records.ACCESS: token, AUTH_STRING: token}
    process = spawn(command, {**unset(SILENT), **environment, SERVER_MARK: mark}, path)
    server = Server(name, process.pid, port, mark, asks_token=bool(token), owner=owner)
    write_json(path.with_suffix(".json"), asdict(server))
    return process


def prefect_command(home: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """Arguments of `python` and environment variables that start the Prefect server."""
    environment = {
        **unset({"PREFECT_HOME": str(home / "prefect"), **SLOTS_AHEAD}),
        "PREFECT_API_URL": f"http://{HOST}:{port}/api",
        "PREFECT_SERVER_UI_API_URL": "/api",  # of the host that the page came from, whose cookie the browser has
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(home / "prefect" / "ui"),  # else it is built inside site-packages
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://{HOST}:{port},http://localhost:{port}",  # else any web page
    }
    return uvicorn_command(served_app, port, "warning"), environment


def uvicorn_command(factory: Callable[[], Any], port: int, log_level: str) -> list[str]:
    """The arguments of `python` that serve what a function makes, which is at the top of its module."""
    name, directory = f"{factory.__module__}:{factory.__name__}", Path(__file__).parents[2]
    command = ["uvicorn", "--factory", name, "--app-dir", str(directory)]
    return [*command, "--host", HOST, "--port", str(port), "--log-level", log_level]


def mlflow_command(home: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """Arguments of `python` and environment variables that start the MLflow server."""
    mirror.prepare(home)  # the server would refuse a damaged one
    private_directory(mlflow_client.database_of(home).parent)
    hosts = (f"{HOST}:{port}", f"localhost:{port}")
    environment = {
        HOME: str(home),
        "MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(hosts),
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": ",".join(f"http://{host}" for host in hosts),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # eight processes more, for LLMs that judge
    }
    return uvicorn_command(tracker_app, port, "warning"), environment


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
    """Wait until the server answers.

    Raises TTrainError with the end of its log when it dies or stays silent.
    """
    deadline = time.monotonic() + START_SECONDS
    while True:
        answered = False
        connection = HTTPConnection(HOST, port, timeout=5.0)
        silent = contextlib.suppress(OSError, HTTPException, psutil.Error)
        with silent, contextlib.closing(connection):
            connection.request("GET", HEALTH[name])
            connection.getresponse()
            # Not another program there, which clients would send their token
            answered = server_records.listens(psutil.Process(process.pid), port)
        code = process.poll()
        if answered and code is None:
            return
        if code is not None or time.monotonic() > deadline:
            failure = f"did not answer within {START_SECONDS:.0f} s"
            if code is not None:
                failure = f"ended with exit code {code}"
            tail = "\n".join(path.read_text(errors="replace").splitlines()[-20:])
            raise TTrainError(f"the {name} server {failure} on port {port}; {path} ends:\n{tail}")
        time.sleep(0.05)


def stop(home: Path, name: str) -> bool:
    """End every process of a server and remove its record; returns whether there was one."""
    server = server_records.read(home, name)
    processes = family = server.processes() if server else []
    for action, seconds in ((psutil.Process.terminate, STOP_SECONDS), (psutil.Process.kill, 5.0)):
        for process in family:
            with contextlib.suppress(psutil.Error):
                action(process)
        psutil.wait_procs(family, timeout=seconds)
        family = server.processes() if server else []
    if family:
        raise TTrainError(f"the {name} server does not end; its processes: {', '.join(str(one.pid) for one in family)}")
    (server_records.folder_of(home) / f"{name}.json").unlink(missing_ok=True)
    return bool(processes)


def start_lock(home: Path) -> FileLock:
    """Lock for the start and end of servers; two first runs at once would migrate one database twice."""
    return FileLock(server_records.make_folder(home) / "start.lock", thread_local=False)


def free_port(first_port: int) -> int:
    """The first port from `first_port` on that nobody listens on."""
    for port in range(first_port, min(first_port + 100, 1 << 16)):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do, for a port just left
            probe.bind((HOST, port))
            return port
    raise TTrainError(f"no port from {first_port} to {first_port + 99} is free; choose another one")
