"""Prefect's environment, which is set before Prefect is imported; whether its server answers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path

from ttrain.errors import UsageError
from ttrain.store import server_records
from ttrain.store.server_records import HOST

AUTH_STRING = "PREFECT_API_AUTH_STRING"

# Telemetry: of Prefect's SDK (Amplitude); of its server, and its UI in the browser (both obey "analytics"); of MLflow.
# Prefect takes 1 or true for DO_NOT_TRACK, MLflow only true.
SILENT = {
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
# The level of the console's handler, not of a logger: what flow and task runs say, and our own warnings, still reach the
# API and so the UI.
QUIET = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "ERROR",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "ttrain",
}


def prefect_environment(home: Path) -> dict[str, str]:
    """The variables to set before prefect is imported; never one that the user has set."""
    variables = {**SILENT, **QUIET, "PREFECT_HOME": str(home.resolve() / "prefect")}
    if server := server_records.live_server(home, "prefect"):
        variables["PREFECT_API_URL"] = f"{server.url}/api"
    chosen = unset(variables) | _without_proxy()
    url = chosen.get("PREFECT_API_URL") or os.environ.get("PREFECT_API_URL", "")
    if token := server_records.token_for(home, "prefect", url):  # None for another server
        chosen[AUTH_STRING] = token
    return chosen


def check_prefect_server() -> None:
    """Raise UsageError where the server at PREFECT_API_URL does not answer or refuses us."""
    import httpx
    from prefect.client.orchestration import get_client

    url = os.environ["PREFECT_API_URL"]
    try:
        with get_client(sync_client=True) as client:
            client.request("GET", "/admin/version")
    except httpx.HTTPStatusError as error:
        if error.response.status_code == HTTPStatus.UNAUTHORIZED:
            raise UsageError(
                f"PREFECT_API_URL is {url}, which refuses what {AUTH_STRING} says (401); set it to "
                f"the server's password, which for a server of another ttrain home is the text of "
                f"servers/token there"
            ) from None
    except httpx.TransportError:
        raise UsageError(
            f"PREFECT_API_URL is {url} but no Prefect server answers there; start it, or unset the variable"
        ) from None


def unset(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if not os.environ.get(name)}


def _without_proxy() -> dict[str, str]:
    """Requests to our own address do not go to a proxy, which would see the token."""
    name = "no_proxy" if "no_proxy" in os.environ else "NO_PROXY"
    listed = os.environ.get(name, "")
    if HOST in listed or listed.strip() == "*":
        return {}
    return {name: ",".join(filter(None, (listed, HOST, "localhost")))}
