"""Prefect's environment, and whether a Prefect server answers. Does not import Prefect."""

from __future__ import annotations

import base64
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path

from ttrain.errors import UsageError
from ttrain.nightly.notify import NoRedirect
from ttrain.store import server_records
from ttrain.store.server_records import HOST

AUTH_STRING = "PREFECT_API_AUTH_STRING"
ANSWER_SECONDS = 10.0  # of a server that may be busy

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
    return chosen | token_environment(home, chosen.get("PREFECT_API_URL") or os.environ.get("PREFECT_API_URL", ""))


def token_environment(home: Path, api_url: str) -> dict[str, str]:
    """The token for the home's own server, as a variable; none for another server, whose variables the user sets."""
    token = server_records.token_for(home, "prefect", api_url)
    return {AUTH_STRING: token} if token else {}


def status_of(api_url: str, home: Path) -> int | None:
    """The HTTP status with which a Prefect server answers us, as its own client would ask; None where none is there."""
    environment = {**os.environ, **token_environment(home, api_url)}
    headers = {}
    if text := environment.get(AUTH_STRING):
        headers["Authorization"] = f"Basic {base64.b64encode(text.encode()).decode()}"
    elif key := environment.get("PREFECT_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    try:
        request = urllib.request.Request(f"{api_url.rstrip('/')}/version", headers=headers)
        opener = urllib.request.build_opener(NoRedirect)
        with opener.open(request, timeout=ANSWER_SECONDS) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError):
        return None


def check_prefect_server(home: Path) -> None:
    """Raise UsageError where PREFECT_API_URL names a server that does not answer, or refuses our password."""
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return
    status = status_of(url, home)
    if status is None:
        raise UsageError(f"PREFECT_API_URL is {url} but no Prefect server answers there; start it, or unset the variable")
    if status == HTTPStatus.UNAUTHORIZED:
        raise UsageError(
            f"PREFECT_API_URL is {url}, which refuses what {AUTH_STRING} says (401); set it to the server's "
            f"password, which for a server of another ttrain home is the text of servers/token there"
        )


def unset(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if not os.environ.get(name)}


def _without_proxy() -> dict[str, str]:
    """Where a proxy is set, except our own address: else the requests to 127.0.0.1 go to the proxy."""
    name = "no_proxy" if "no_proxy" in os.environ else "NO_PROXY"
    listed = os.environ.get(name, "")
    if not urllib.request.getproxies() or HOST in listed or listed.strip() == "*":
        return {}
    return {name: ",".join(filter(None, (listed, HOST, "localhost")))}
