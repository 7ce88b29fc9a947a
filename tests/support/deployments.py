"""Runs of a served deployment."""

from typing import Any

from support.pipeline_home import Cli
from support.served import Served, call
from support.waiting import wait_until

FINAL = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")


def start(cli: Cli, *changes: str) -> str:
    """Start a run of the deployment as the API does, with changes alone; returns its id."""
    [deployment] = call(cli.home, "deployments/filter", {})
    asked = {"state": {"type": "SCHEDULED"}, "parameters": {"changes": list(changes)}}
    return str(call(cli.home, f"deployments/{deployment['id']}/create_flow_run", asked)["id"])


def run_of(cli: Cli, id_: str) -> dict[str, Any]:
    found: dict[str, Any] = call(cli.home, f"flow_runs/{id_}")
    return found


def ended(cli: Cli, id_: str, served: Served | None = None, *, run_count: int = 1) -> dict[str, Any]:
    def over() -> dict[str, Any] | None:
        run = run_of(cli, id_)
        return run if run["state"]["type"] in FINAL and run["run_count"] >= run_count else None

    run: dict[str, Any] = wait_until(over, 300, lambda: served.said if served else "")
    return run
