"""`ttrain pipeline serve` as a process of its own, and what its Prefect server says."""

import contextlib
import json
import os
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from support.pipeline_home import Cli
from support.waiting import wait_until

from ttrain.engine.stage_worker import PROCESS_NAME
from ttrain.store import server_records

# Names of the states in which flow runs end
FINAL_STATES = (
    *("Completed", "Failed", "TimedOut", "Cancelled", "Crashed"),
    *("Unfinished", "Promoted", "Kept", "NothingNew", "Skipped"),
)
FINAL_TYPES = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")


class Served:
    def __init__(self, cli: Cli) -> None:
        self.cli = cli
        self.lines: list[str] = []
        self.process = cli.start("pipeline", "serve", settings=False)
        threading.Thread(target=self._read, daemon=True).start()
        try:  # on a machine with much other work a server takes minutes to start
            self.wait_for("stop with Ctrl-C", 400)
        except BaseException:
            self.process.kill()
            raise

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    @property
    def said(self) -> str:
        return "".join(self.lines)

    def wait_for(self, text: str, seconds: float = 60) -> None:
        process = self.process
        wait_until(lambda: text in self.said or process.poll() is not None, seconds)
        assert text in self.said, self.said

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


@contextlib.contextmanager
def serving(cli: Cli) -> Iterator[Served]:
    served = Served(cli)
    try:
        yield served
    finally:
        if served.process.poll() is None:
            served.stop()


def call(home: Path, path: str, body: dict[str, Any] | None = None) -> Any:
    server = server_records.live_server(home, "prefect")
    if server is None:
        raise ConnectionError(f"no Prefect server of {home} answers")
    data = None if body is None else json.dumps(body).encode()
    token = server_records.read_token(home)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/api/{path}", data, headers)
    # A server whose SQLite is busy answers 503, and Prefect's own client asks again, too

    def answers() -> list[Any]:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return [json.load(reply)]

    [answer] = wait_until(answers, 60)
    return answer


def flow_runs(home: Path, *states: str) -> Any:
    named = {"state": {"name": {"any_": list(states)}}}
    body = {"flow_runs": named, "sort": "EXPECTED_START_TIME_ASC"}
    return call(home, "flow_runs/filter", body)


def processes_of(home: Path) -> list[psutil.Process]:
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            names = (process.environ().get("TTRAIN_HOME"), *process.cmdline(), process.cwd())
            if process.pid != os.getpid() and any(str(home) in name for name in names if name):
                processes.append(process)
    return processes


def kill_at_work(process: subprocess.Popen[str]) -> None:
    """Kill a command and its stages at once.

    On a fast core a stage does 100 steps before it notices that its parent is gone.
    """
    children = psutil.Process(process.pid).children(recursive=True)
    workers = [child for child in children if child.name() == PROCESS_NAME]
    for worker in workers:
        worker.suspend()
    process.kill()
    for worker in workers:
        worker.kill()
    process.communicate()


def slot(run: dict[str, Any]) -> float:
    return datetime.fromisoformat(run["expected_start_time"]).timestamp()


def start(cli: Cli, *changes: str) -> str:
    [deployment] = call(cli.home, "deployments/filter", {})
    body = {"state": {"type": "SCHEDULED"}, "parameters": {"changes": list(changes)}}
    return str(call(cli.home, f"deployments/{deployment['id']}/create_flow_run", body)["id"])


def run_of(cli: Cli, id_: str) -> Any:
    return call(cli.home, f"flow_runs/{id_}")


def ended(cli: Cli, id_: str, served: Served | None = None, *, run_count: int = 1) -> Any:
    def final_run() -> Any:
        run = run_of(cli, id_)
        is_final = run["state"]["type"] in FINAL_TYPES and run["run_count"] >= run_count
        return run if is_final else None

    return wait_until(final_run, 300, lambda: served.said if served else "")
