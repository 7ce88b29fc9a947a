"""Notify a program or a web address of events, if the settings say so. Never raises."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ttrain.config.training import BITS_PER_BYTE
from ttrain.core.files import JsonObject, user_path
from ttrain.core.text import format_duration
from ttrain.errors import TTrainError
from ttrain.store.runs import RecordedRun

if TYPE_CHECKING:
    from ttrain.config import Notify

log = logging.getLogger("ttrain")
ERROR_OUTPUT_BYTES = 2000  # of a failing program's standard error that are kept


def send(settings: Notify, event: str, message: JsonObject) -> None:
    """Send the message to the program and the address of the settings, if they want this event.

    The message is JSON; `event`, `time`, `host` and `text` (one line, which chat services show) are
    added if missing. A failure is only a warning, so that it cannot fail a night. Takes at most
    `timeout_seconds` for each of the two.
    """
    if event not in settings.on:
        return
    whole = {
        "event": event,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "text": f"ttrain: {event}",
        **message,
    }
    body = json.dumps(whole, ensure_ascii=False, default=str).encode("utf-8")
    for name, action in (("the command of notify.command", _run), ("the webhook", _post)):
        try:
            action(settings, body)
        except Exception as error:  # a user's program or a network can fail in any way
            # Other texts may contain the address, or the program's arguments
            reason = (
                str(error) if isinstance(error, TTrainError | OSError) else type(error).__name__
            )
            log.warning("%s was not notified: %s", name, reason)


def send_end_of_run(settings: Notify, name: str, run: RecordedRun) -> None:
    """Send that a run of `full` completed, with its metrics, or failed."""
    if run["outcome"] not in ("completed", "failed"):
        return
    event = str(run["outcome"])
    bits = run["metrics"].get(BITS_PER_BYTE.of_run)
    figure = "" if bits is None else f", {bits:.4f} {BITS_PER_BYTE.label}"
    reason = run.get("error") or f"took {format_duration(run['seconds'])}{figure}"
    payload = {
        "pipeline": name,
        "run": run["run"],
        "text": f"ttrain {name}, {run['run']}: {event}: {reason}",
        "reason": reason,
        "metrics": run["metrics"],
    }
    send(settings, event, payload)


def _run(settings: Notify, body: bytes) -> None:
    command = settings.command
    if not command:
        return
    try:
        done = subprocess.run(
            command, input=body, timeout=settings.timeout_seconds, capture_output=True
        )
    except subprocess.TimeoutExpired:
        raise TTrainError(
            f"{command[0]} did not end within {settings.timeout_seconds:g} s "
            "(notify.timeout_seconds)"
        ) from None
    if done.returncode:
        last = done.stderr[-ERROR_OUTPUT_BYTES:].decode("utf-8", "replace").strip()
        raise TTrainError(
            f"{command[0]} ended with exit code {done.returncode}{last and f': {last}'}"
        )


def _post(settings: Notify, body: bytes) -> None:
    address = settings.webhook
    if settings.webhook_file:
        path = user_path(settings.webhook_file)
        address = path.read_text(encoding="utf-8").strip()
        if not address.startswith(("http://", "https://")):
            raise TTrainError(
                f"notify.webhook_file is {path}, which must hold one http or https address"
            )
    if not address:
        return
    import httpx

    headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "ttrain"}
    host = urlsplit(address).hostname
    try:
        answer = httpx.post(
            address, content=body, headers=headers, timeout=settings.timeout_seconds
        )
    except httpx.HTTPError as error:
        raise TTrainError(f"{host}: {error}") from None
    if not answer.is_success:
        raise TTrainError(f"{host}: it answered with HTTP {answer.status_code}")
