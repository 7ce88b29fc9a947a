"""Call MLflow one request at a time, track whether it is silent, and warn once about each failure."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from ttrain.core.redact import without_user
from ttrain.core.sqlite_files import is_damage
from ttrain.errors import TrackingError, is_disk_full
from ttrain.store.server_records import with_token
from ttrain.tracking.calls import attempt, first_line, is_out_of_use, is_refusal
from ttrain.tracking.database import REPAIR, database_of, try_to_write

log = logging.getLogger("ttrain")

Result = TypeVar("Result")

PROBE_SECONDS = 3.0  # one request to a silent server, instead of the client's ten seconds


class MlflowCaller:
    """Makes the calls of all threads of this process to one MLflow."""

    def __init__(self, uri: str, *, is_own: bool = False) -> None:
        """`is_own`: it is the home's own database, which `ttrain track repair` can replace."""
        self.uri, self.is_http, self.is_own = uri, uri.startswith(("http://", "https://")), is_own
        # Whether the last call got no answer: from a server, which /health has not shown to be up yet, or from a
        # SQLite file that is damaged, or that another program keeps locked, for which MLflow would wait 20 s at each
        # call
        self.is_silent = self.is_http
        self.last_error = ""
        self._warned: set[str] = set()
        # SQLite has one writer anyway; without a lock, threads met "database is locked" in 6 of 1803 (mlflow #20014)
        lock: contextlib.AbstractContextManager[object] = threading.RLock()
        self.lock = contextlib.nullcontext() if self.is_http else lock

    def try_call(self, action: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
        """Call MLflow once; return (result, error) instead of raising, without a warning. Fails fast while it is silent."""
        if self.is_silent and (silence := self.probe()) is not None:
            return None, silence
        with self.lock:
            result, error = attempt(action)
        self.is_silent = error is not None and (is_out_of_use(error) or (self.is_http and not is_refusal(error)))
        return result, error

    def warn(self, label: str, error: Exception) -> None:
        """Warn once for each label, and once about a server that does not answer or a disk that is full."""
        cause = first_line(error)
        if self.is_own and is_damage(cause) and REPAIR not in cause:
            cause = f"{cause}; {REPAIR}"
        if is_disk_full(error):
            cause = f"{cause}; free some space on its disk"
        self.last_error = f"{label} failed: {cause}"
        kind = "silent" if self.is_silent else "full disk" if is_disk_full(error) else label
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("MLflow at %s: %s failed, the pipeline continues: %s", without_user(self.uri), label, cause)

    def probe(self) -> Exception | None:
        """Send one short request to the server, or to a locked database file; None when it answers."""
        if not self.is_http:
            _, error = attempt(lambda: try_to_write(Path(self.uri.removeprefix("sqlite:///"))))
            error = error if error is not None and is_out_of_use(error) else None
            return self._note_answer(error)
        request, host = import_module("mlflow.utils.rest_utils"), import_module("mlflow.utils.credentials")
        ask = partial(request.http_request, timeout=PROBE_SECONDS, max_retries=0, raise_on_status=False)
        answer, error = attempt(lambda: ask(host.get_default_host_creds(self.uri), "/health", "GET"))
        if answer is not None and answer.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            error = ConnectionError(f"the server answers with HTTP {answer.status_code}")
        return self._note_answer(error)

    def _note_answer(self, error: Exception | None) -> Exception | None:
        self.is_silent = error is not None
        self.last_error = first_line(error) if error else self.last_error
        return error


# Set unless the user did. MLflow's own 7 retries of 120 s block for 246 s and more when the server is dead.
ENVIRONMENT = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_CONFIGURE_LOGGING": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # a repeated request to create a run creates two
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


def tracking_uri(home: Path) -> str:
    """MLFLOW_TRACKING_URI if set and not empty, else the SQLite file under this home.

    The URI of the home's own server has the token as its password, so write it only through `without_user`.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    return with_token(home, uri) if uri else f"sqlite:///{database_of(home)}"


def cannot_be_queried(uri: str, subject: str, error: Exception) -> TrackingError:
    """The error of a question that MLflow did not answer. `subject`: what it was asked for."""
    cause = first_line(error)
    fix = "; start it, or set MLFLOW_TRACKING_URI to the one that holds them" if uri.startswith("http") else ""
    if any(f"error code {status.value} " in cause for status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)):
        fix = "; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
    if "database is locked" in cause:
        fix = "; end the other program that is writing to it, and run the command again"
    return TrackingError(f"MLflow at {without_user(uri)} cannot be queried {subject}: {cause}{fix}")


def is_installed() -> bool:
    """Whether MLflow can be imported."""
    spec = find_spec("mlflow")
    return spec is not None and spec.origin is not None  # without an origin it is a plain directory, such as the home's own


def need_mlflow(purpose: str) -> None:
    """Silence MLflow. Raises TrackingError if it is not installed; `purpose`: the beginning of the message."""
    if not is_installed():
        raise TrackingError(f"{purpose} MLflow, which is not installed; pip install mlflow")
    silence()


def silence() -> None:
    """Keep logs of MLflow and its libraries off the terminal; what matters comes through ttrain's own logger."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in ("mlflow", "alembic", "sqlalchemy"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [logging.NullHandler()], False
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # it warns at each retry
