"""Asks MLflow one thing at a time: knows whether it is silent, and warns once of each trouble."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from importlib import import_module
from pathlib import Path
from typing import TypeVar, final

from ttrain.core.redact import without_user
from ttrain.core.sqlite_files import is_damage
from ttrain.tracking.calls import first_line, is_out_of_use, is_refusal, outcome
from ttrain.tracking.database import REPAIR, try_to_write

log = logging.getLogger("ttrain")
Result = TypeVar("Result")

PROBE_SECONDS = 3.0  # one question to a silent server, instead of the client's ten seconds


@final
class Asking:
    """What is asked of one MLflow by all threads of this process."""

    def __init__(self, uri: str, *, is_own: bool = False) -> None:
        """`is_own`: it is the home's own database, which `ttrain track repair` can replace."""
        self.uri, self.is_http, self.is_own = uri, uri.startswith(("http://", "https://")), is_own
        # Whether it did not answer when it was last asked: a server, which /health has not shown to be there yet, or a
        # SQLite file that is damaged, or that another program keeps locked, for which MLflow would wait 20 s with each
        # thing that is told
        self.is_silent = self.is_http
        self.last_error = ""
        self._warned: set[str] = set()
        # SQLite has one writer anyway; without turns, threads met "database is locked" in 6 of 1803 (mlflow #20014)
        turn: contextlib.AbstractContextManager[object] = threading.RLock()
        self.turn = contextlib.nullcontext() if self.is_http else turn

    def once(self, action: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
        """Asks one thing now; the answer, or the error as a value, without a warning. Soon back from a silent server."""
        if self.is_silent and (silence := self.probe()) is not None:
            return None, silence
        with self.turn:
            result, error = outcome(action)
        self.is_silent = error is not None and (is_out_of_use(error) or (self.is_http and not is_refusal(error)))
        return result, error

    def tried(self, what: str, action: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
        """The same, with a warning."""
        result, error = self.once(action)
        if error is not None:
            self.warn(what, error)
        return result, error

    def failed(self, what: str, error: Exception, *, is_silent: bool) -> None:
        """Something was not answered, or refused: a warning, and whether a server is silent since."""
        self.is_silent = is_out_of_use(error) or (self.is_http and is_silent)
        self.warn(what, error)

    def warn(self, what: str, error: Exception) -> None:
        """Warns once about each thing, and once about a server that does not answer."""
        cause = first_line(error)
        if self.is_own and is_damage(cause) and REPAIR not in cause:
            cause = f"{cause}; {REPAIR}"
        self.last_error = f"{what} failed: {cause}"
        kind = "silent" if self.is_silent else what
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("MLflow at %s: %s failed, the pipeline goes on: %s", without_user(self.uri), what, cause)

    def probe(self) -> Exception | None:
        """One short question to the server, or to a file that was locked; None when it answers."""
        if not self.is_http:
            _, error = outcome(lambda: try_to_write(Path(self.uri.removeprefix("sqlite:///"))))
            self.is_silent = error is not None and is_out_of_use(error)
            return error if self.is_silent else None
        request, host = import_module("mlflow.utils.rest_utils"), import_module("mlflow.utils.credentials")
        ask = partial(request.http_request, timeout=PROBE_SECONDS, max_retries=0, raise_on_status=False)
        answer, error = outcome(lambda: ask(host.get_default_host_creds(self.uri), "/health", "GET"))
        if answer is not None and answer.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            error = ConnectionError(f"the server answers with HTTP {answer.status_code}")
        self.is_silent = error is not None
        return error
