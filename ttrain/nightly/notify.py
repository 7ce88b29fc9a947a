"""Tells a program or a web address what happened. Nothing leaves the machine unless the settings say so; never raises."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from http.client import HTTPMessage
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from ttrain.config import Event, Notify
from ttrain.errors import TTrainError

log = logging.getLogger("ttrain")
SAID_BYTES = 2000  # of what a failing program says


class _NotToldError(TTrainError):
    """Somebody was not told; the message says why, without the address."""


def send(settings: Notify, event: Event, message: Mapping[str, Any]) -> None:
    """Give the message to the program and the address of the settings, if they want this event.

    The message is JSON; `event`, `time`, `host` and `text` (one line, which chat services show) are added where they lack.
    What fails is a warning: no trouble of a notification may become one of the night's. Takes at most
    `timeout_seconds` for each of the two.
    """
    if event not in settings.on:
        return
    now = datetime.now(UTC).isoformat(timespec="seconds")
    whole = {"event": event, "time": now, "host": socket.gethostname(), "text": f"ttrain: {event}", **message}
    body = json.dumps(whole, ensure_ascii=False, default=str).encode("utf-8")
    if settings.command:
        _warned("the command of notify.command", lambda: _run(settings.command, body, settings.timeout_seconds))
    if settings.webhook or settings.webhook_file:
        _warned("the webhook", lambda: _post(_address(settings), body, settings.timeout_seconds))


def _warned(what: str, action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as error:  # a program of the user's and a network: nothing settles what can go wrong
        reason = str(error) if isinstance(error, _NotToldError) else type(error).__name__
        log.warning("%s was not told: %s", what, reason)


def _run(command: tuple[str, ...], body: bytes, seconds: float) -> None:
    """The program, with the message on its standard input. It and what it started end with the time limit."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise _NotToldError(f"{command[0]} cannot be started: {error.strerror}") from None
    try:
        _, said = process.communicate(body, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise _NotToldError(f"{command[0]} did not end within {seconds:g} s (notify.timeout_seconds)") from None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        last = said[-SAID_BYTES:].decode("utf-8", "replace").strip()
        raise _NotToldError(f"{command[0]} ended with exit code {process.returncode}{last and f': {last}'}")


def _address(settings: Notify) -> str:
    if settings.webhook:
        return settings.webhook
    path = Path(settings.webhook_file or "").expanduser()
    try:
        address = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise _NotToldError(f"notify.webhook_file is {path}, which cannot be read") from None
    if not address.startswith(("http://", "https://")):
        raise _NotToldError(f"notify.webhook_file is {path}, which must hold one http or https address")
    return address


def _post(address: str, body: bytes, seconds: float) -> None:
    """One POST, in a thread: urllib's limit is for each read, so a server that drips would hold the night up for ever."""
    failures: list[str] = []

    def post() -> None:
        headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "ttrain"}
        try:
            request = urllib.request.Request(address, data=body, headers=headers, method="POST")
            with urllib.request.build_opener(NoRedirect).open(request, timeout=seconds):
                return
        except urllib.error.HTTPError as error:
            failures.append(f"it answered with HTTP {error.code}")
        except Exception as error:  # its text can hold the address
            reason = getattr(error, "reason", None)
            failures.append(os.strerror(reason.errno) if isinstance(reason, OSError) and reason.errno else "no answer")

    thread = threading.Thread(target=post, name="webhook", daemon=True)
    thread.start()
    thread.join(seconds)
    where = urlsplit(address).hostname
    if thread.is_alive():
        raise _NotToldError(f"{where} did not answer within {seconds:g} s (notify.timeout_seconds)")
    if failures:
        raise _NotToldError(f"{where}: {failures[0]}")


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """What is sent goes to the address that was set, to no other."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        """Refuses."""
