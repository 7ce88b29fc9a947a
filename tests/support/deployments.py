"""Runs of a served deployment."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any

from support.pipeline_home import Cli
from support.served import Served, access
from support.waiting import wait_until

from ttrain.store import server_records

FINAL = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")


def call(cli: Cli, path: str, body: dict[str, Any] | None = None) -> Any:
    """What the server of this home answers to a POST, or to a GET where there is no body."""
    server = server_records.live_server(cli.home, "prefect")
    assert server is not None
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **access(cli.home)}
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/api/{path}", data, headers)
    for _ in range(20):  # a server whose SQLite is busy says 503, and Prefect's own client asks again too
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
        time.sleep(1)
    raise AssertionError(f"{path} stays unavailable")


def start(cli: Cli, *changes: str) -> str:
    """Start a run of the deployment as the API does, with changes alone; returns its id."""
    [deployment] = call(cli, "deployments/filter", {})
    asked = {"state": {"type": "SCHEDULED"}, "parameters": {"changes": list(changes)}}
    return str(call(cli, f"deployments/{deployment['id']}/create_flow_run", asked)["id"])


def run_of(cli: Cli, id_: str) -> dict[str, Any]:
    found: dict[str, Any] = call(cli, f"flow_runs/{id_}")
    return found


def ended(cli: Cli, id_: str, served: Served | None = None, *, run_count: int = 1) -> dict[str, Any]:
    """The run once it has ended."""

    def over() -> dict[str, Any] | None:
        run = run_of(cli, id_)
        return run if run["state"]["type"] in FINAL and run["run_count"] >= run_count else None

    run: dict[str, Any] = wait_until(over, 300, lambda: served.said if served else "")
    return run
