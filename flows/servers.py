"""`ttrain up`, `ttrain down`, and the Prefect server of a run; without importing Prefect or MLflow.

Prefect reads its settings at import, so choices go into the environment before. A run uses the
server of PREFECT_API_URL, else that of `up`, else its own (`start_own_server`). All listen on
127.0.0.1, ask for a token and contact no other machine.
"""

import contextlib
import importlib
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from ttrain.core.files import exclusive, private_directory, write_json
from ttrain.core.sqlite_files import damage_of, set_aside
from ttrain.errors import TTrainError, UsageError
from ttrain.store import server_records
from ttrain.store.server_records import HOST, SERVER_MARK, Server
from ttrain.tracking import client as mlflow_client

log = logging.getLogger("ttrain")
AUTH_STRING = "PREFECT_API_AUTH_STRING"

# Telemetry: of Prefect's SDK (Amplitude); of its server, and its UI in the browser (both obey
# "analytics"); of MLflow. Prefect takes 1 or true for DO_NOT_TRACK, MLflow only true.
SILENT = {
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
# The level of the console's handler, not of a logger: what flow and task runs say, and our own
# warnings, still reach the API and so the UI.
QUIET = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "ERROR",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "ttrain",
}
PORT = "TTRAIN_SERVER_PORT"
HOME = "TTRAIN_SERVER_HOME"
OWNER = "TTRAIN_SERVER_OWNER"
HEALTH = {"prefect": "/api/health", "mlflow": "/health"}
START_SECONDS = 180.0  # both take 11 s on two idle cores, 24 s where Prefect makes its database
WATCH_SECONDS = 0.2  # between two looks of a run's own server for its owner
END_SECONDS = 6.0  # for its last events to be written; 2 s on an idle machine
RESTARTS = 10  # of a run's own server
STOP_SECONDS = 10.0  # idle servers stop within 2 s
# What Prefect's server says of a database that another version of Prefect wrote
UNKNOWN_REVISION = "Can't locate revision identified by"

# The slots to come that the server makes flow runs of, of each deployment. Its defaults make those
# of the next hour and at least three: 60 of a cron of every minute.
SLOTS_AHEAD = {
    "PREFECT_SERVER_SERVICES_SCHEDULER_MIN_RUNS": "2",
    "PREFECT_SERVER_SERVICES_SCHEDULER_MAX_RUNS": "2",
    "PREFECT_SERVER_SERVICES_SCHEDULER_MIN_SCHEDULED_TIME": "PT0S",
}


def prefect_app() -> Any:
    """Prefect's server application behind the guard.

    A run's server ends with its owner, and not by SIGTERM or SIGHUP: Slurm stops all processes at
    once, and the owner still has to report.
    """
    os.environ.pop("PREFECT_SERVER_API_AUTH_STRING", None)  # the token is in its place
    from prefect.server.api.server import create_app

    owner = os.environ.get(OWNER)
    if owner:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        threading.Thread(target=_end_with, args=(int(owner),), daemon=True).start()
    return guarded_app(create_app(final=True, ephemeral=bool(owner)), "prefect")


def _end_with(owner: int) -> None:
    while os.getppid() == owner:
        time.sleep(WATCH_SECONDS)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(END_SECONDS)
    os._exit(1)


def tracker_app() -> Any:
    """MLflow's server application over the home's database."""
    return guarded_app(mlflow_client.server_app(Path(os.environ[HOME])), "mlflow")


def guarded_app(app: Any, name: str) -> Any:
    """The application behind the guard; only its health path needs no token."""
    from ttrain.flows.guard import Guard  # with starlette, which only the servers' processes need

    return Guard(
        app, int(os.environ[PORT]), os.environ[server_records.ACCESS], open_path=HEALTH[name]
    )


def start(home: Path, ports: Mapping[str, int], owner: str = "") -> None:
    """Start the named servers that do not run yet; returns when all answer.

    A taken port is skipped. Raises TTrainError with the end of the log of a server that does not
    start; then those of this call are stopped.

    ports: those to try first owner: the command that ends the servers; empty for those of `up`
    """
    home = home.resolve()
    started: dict[str, tuple[int, subprocess.Popen[bytes]]] = {}
    with start_lock(home):
        missing = [name for name in ports if not server_records.live_server(home, name)]
        token = server_records.make_token(home)
        try:
            for name in missing:
                stop(home, name)  # remains of one that does not answer
                port = free_port(ports[name])
                if port != ports[name]:
                    log.warning(
                        "port %d is taken; %s listens on %d instead", ports[name], name, port
                    )
                mark = secrets.token_hex(8)
                process = _start(home, name, port, token, {SERVER_MARK: mark})
                started[name] = (port, process)
                write_json(
                    server_records.folder_of(home) / f"{name}.json",
                    asdict(Server(name, process.pid, port, mark, owner)),
                )
            for name, (port, process) in started.items():
                _wait(home, name, port, process)
        except BaseException:
            for name in missing:
                stop(home, name)
            raise
        finally:
            for _, process in started.values():
                process.returncode = 0  # it outlives us: Popen would warn of a running child


def database_of(home: Path) -> Path:
    return home.resolve() / "prefect" / "prefect.db"


def down(home: Path) -> list[str]:
    """Stop both servers with all their processes; returns those that ran."""
    if not server_records.folder_of(home).exists():
        return []
    with start_lock(home):
        return [name for name in HEALTH if stop(home, name)]


def running(home: Path) -> dict[str, str]:
    """The addresses of the servers that run, by name."""
    servers = {name: server_records.live_server(home, name) for name in HEALTH}
    return {name: server.url for name, server in servers.items() if server}


def _start(
    home: Path, name: str, port: int, token: str, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    # In its own session, which Ctrl-C does not reach, and in the log's directory, since Python
    # looks for modules and Prefect for `.env` where they are started.
    module, own = (prefect_command if name == "prefect" else mlflow_command)(home, port)
    token_variables = {PORT: str(port), server_records.ACCESS: token, AUTH_STRING: token}
    with _log_of(home, name).open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *module],
            env={**os.environ, **unset(SILENT), **own, **token_variables, **variables},
            cwd=server_records.folder_of(home),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _log_of(home: Path, name: str) -> Path:
    return server_records.folder_of(home) / f"{name}.log"


def prefect_command(home: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """(arguments of `python`, environment) of the Prefect server.

    A damaged database, which is only history, is renamed aside.
    """
    database = database_of(home)
    private_directory(database.parent)
    if damage := damage_of(database):
        log.warning(
            "%s is damaged (%s); it is kept as %s", database, damage, set_aside(database).name
        )
    if not database.exists():
        log.warning(
            "Prefect makes its database in %s, which takes some 15 s, once", database.parent
        )
    environment = {
        **unset({"PREFECT_HOME": str(home / "prefect"), **SLOTS_AHEAD}),
        "PREFECT_API_URL": f"http://{HOST}:{port}/api",
        # of the host that the page came from, whose cookie the browser has
        "PREFECT_SERVER_UI_API_URL": "/api",
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(
            home / "prefect" / "ui"
        ),  # else it is built inside site-packages
    }
    return uvicorn_command(prefect_app, port), environment


def uvicorn_command(factory: Callable[[], Any], port: int) -> list[str]:
    """The arguments of `python` that serve an application factory."""
    name = f"{factory.__module__}:{factory.__name__}"
    return [
        *("uvicorn", "--factory", name, "--app-dir", str(Path(__file__).parents[2])),
        *("--host", HOST, "--port", str(port), "--log-level", "warning"),
        *("--timeout-graceful-shutdown", "2"),
    ]


def mlflow_command(home: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """(arguments of `python`, environment) of the MLflow server."""
    mlflow_client.open_client(
        mlflow_client.own_uri(home), home
    )  # the server would refuse a damaged one
    return uvicorn_command(tracker_app, port), {
        HOME: str(home),
        # eight processes more, for LLMs that judge
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }


def _wait(home: Path, name: str, port: int, process: subprocess.Popen[bytes]) -> None:
    # Clients send their token to the port, so the process itself must listen there.
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(psutil.Error):
            if server_records.listens(psutil.Process(process.pid), port):
                return
        time.sleep(0.05)
    path = _log_of(home, name)
    tail = "\n".join(path.read_text(errors="replace").splitlines()[-20:])
    message = (
        f"the {name} server does not answer on port {port} (exit code {process.returncode}); "
        f"{path} ends:\n{tail}"
    )
    if UNKNOWN_REVISION in tail:
        aside = set_aside(database_of(home))
        message += (
            f"\nits database is of another version of Prefect and is kept as {aside.name}; "
            f"the same command begins a new one, without the history of runs"
        )
    raise TTrainError(message)


def stop(home: Path, name: str) -> bool:
    """End every process of a server and remove its record; returns whether there was one."""
    server = server_records.read(home, name)
    processes = server.processes() if server else []
    for action in (psutil.Process.terminate, psutil.Process.kill):
        for process in server.processes() if server else ():
            with contextlib.suppress(psutil.Error):
                action(process)
        psutil.wait_procs(processes, timeout=STOP_SECONDS)
    (server_records.folder_of(home) / f"{name}.json").unlink(missing_ok=True)
    return bool(processes)


def start_lock(home: Path) -> contextlib.AbstractContextManager[None]:
    """Lock for starting and stopping servers: two first runs would migrate one database twice."""
    return exclusive(server_records.make_folder(home) / "start.lock")


def free_port(wanted: int) -> int:
    """The wanted port, else any that nobody listens on."""
    with contextlib.suppress(OSError), socket.create_server((HOST, wanted)):
        return wanted
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])


# The servers that this process started for itself, by home, with the variables that lead to them
_own: dict[Path, tuple[dict[str, str], subprocess.Popen[bytes]]] = {}


def is_own() -> bool:
    """Whether this process started the Prefect server that it uses."""
    return os.environ.get("PREFECT_API_URL") in [
        variables["PREFECT_API_URL"] for variables, _ in _own.values()
    ]


def start_own_server(home: Path) -> None:
    """Start a Prefect server for this process alone, unless one is named or runs.

    Apply `prefect_environment` first; this imports prefect while the server starts. Prefect's
    ephemeral server has no token, dies of Ctrl-C and outlives a killed run.
    """
    if os.environ.get("PREFECT_API_URL"):
        return
    if home in _own:  # a second run of this process
        os.environ.update(_own[home][0])
        return
    with start_lock(home):
        # Below 32768, where ports of outgoing connections begin: a client of an unserved port there
        # may connect to itself
        port = free_port(10_000 + secrets.randbelow(10_000))
        token = server_records.new_token()  # known to this process and its children
        own = {OWNER: str(os.getpid()), "PREFECT_SERVER_UI_ENABLED": "false"}
        start_again = partial(_start, home, "prefect", port, token, own)
        process = start_again()
        variables = {"PREFECT_API_URL": f"http://{HOST}:{port}/api", **access(token)}
        os.environ.update(variables)
        importlib.import_module("prefect")  # 0.9 s
        _wait(home, "prefect", port, process)
        _own[home] = variables, process
    threading.Thread(
        target=_keep, args=(process, start_again), name="own-server", daemon=True
    ).start()


def _keep(
    process: subprocess.Popen[bytes], start_again: Callable[[], subprocess.Popen[bytes]]
) -> None:
    # Prefect's client would wait for minutes at each state: eight stages of 20 s had not ended
    # after 5.
    for _ in range(RESTARTS):
        log.warning(
            "the Prefect server of this run ended with code %d; it is started again",
            process.wait(),
        )
        process = start_again()


def prefect_environment(home: Path) -> dict[str, str]:
    """The variables to set before prefect is imported, except those of the user."""
    variables = {**SILENT, **QUIET, "PREFECT_HOME": str(home.resolve() / "prefect")}
    if server := server_records.live_server(home, "prefect"):
        variables["PREFECT_API_URL"] = f"{server.url}/api"
    chosen = unset(variables)
    url = chosen.get("PREFECT_API_URL") or os.environ.get("PREFECT_API_URL", "")
    if token := server_records.token_for(home, "prefect", url):  # None for another server
        chosen |= access(token)
    # Requests to our own address do not go to a proxy, which would see the token
    proxy = "no_proxy" if "no_proxy" in os.environ else "NO_PROXY"
    listed = os.environ.get(proxy, "")
    if HOST not in listed and listed != "*":
        chosen[proxy] = ",".join(filter(None, (listed, HOST, "localhost")))
    return chosen


def access(token: str) -> dict[str, str]:
    """The variables with which Prefect sends the token."""
    return {
        AUTH_STRING: token,
        "PREFECT_CLIENT_CUSTOM_HEADERS": json.dumps({"Authorization": f"Bearer {token}"}),
    }


def check_prefect_server() -> None:
    """Raise UsageError where the server at PREFECT_API_URL does not answer or refuses us."""
    import httpx
    from prefect.client.orchestration import get_client

    url = os.environ["PREFECT_API_URL"]
    try:
        with get_client(sync_client=True) as client:
            client.request("GET", "/admin/version")
    except httpx.HTTPStatusError as error:
        raise UsageError(
            f"PREFECT_API_URL is {url}, which refuses what {AUTH_STRING} says "
            f"({error.response.status_code}); set it to "
            f"the server's password, which for a server of another ttrain home is the text of "
            f"servers/token there"
        ) from None
    except httpx.TransportError:
        raise UsageError(
            f"PREFECT_API_URL is {url} but no Prefect server answers there; start it, or unset "
            f"the variable"
        ) from None


def unset(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if not os.environ.get(name)}
