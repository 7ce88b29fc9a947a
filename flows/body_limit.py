"""How large a request to a server may be: Prefect's holds each body in memory, several times over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, final

from flows.host_check import Receive, Scope, Send, answer

BODY_BYTES: Final = 64 << 20  # a run's settings are 0.1 MB, a thousand lines of its log 1 MB
# Where MLflow writes a PUT to disk as it comes; a checkpoint may have any size. All its other bodies are held in memory.
UPLOADS: Final = ("/api/2.0/mlflow-artifacts/artifacts/", "/ajax-api/2.0/mlflow-artifacts/artifacts/")


@final
class BodyLimited:
    """An ASGI application that answers 413 to a larger body, as soon as that is known: before any of it, where it says so.

    A body that does not say its size is counted as it comes. A PUT to what begins as one of `uploads` may have any size.
    """

    def __init__(self, app: Any, limit_bytes: int = BODY_BYTES, uploads: Iterable[str] = ()) -> None:
        self._app, self._limit_bytes, self._uploads = app, limit_bytes, tuple(uploads)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["method"] == "PUT" and scope["path"].startswith(self._uploads)):
            await self._app(scope, receive, send)
            return
        body = _CountedBody(receive, send, self._limit_bytes)
        if _content_length(scope) <= self._limit_bytes:
            try:
                await self._app(scope, body.receive, body.send)
            except Exception:
                if not body.is_too_large:
                    raise
            if not body.is_too_large or body.has_begun:
                return
        text = f"the body of a request may have {self._limit_bytes} bytes; this one has more\n".encode()
        await answer(send, 413, text, [(b"content-type", b"text/plain"), (b"connection", b"close")])


def _content_length(scope: Scope) -> int:
    sizes = [value for name, value in scope["headers"] if name.lower() == b"content-length" and value.isdigit()]
    return max((int(value[:20]) for value in sizes), default=0)  # of any number of digits, whose int() takes long


class _TooLargeError(Exception):
    """A body is larger than the limit."""


@final
class _CountedBody:
    """What passes to the application until the limit; then it gets an error, and what it answers is not sent.

    No `http.disconnect`, after which MLflow takes what came for the whole body.
    """

    def __init__(self, receive: Receive, send: Send, limit_bytes: int) -> None:
        self._receive, self._send, self._limit_bytes = receive, send, limit_bytes
        self._bytes = 0
        self.is_too_large = self.has_begun = False

    async def receive(self) -> Mapping[str, Any]:
        if not self.is_too_large:
            message = await self._receive()
            self._bytes += len(message.get("body", b""))
            self.is_too_large = self._bytes > self._limit_bytes
        if self.is_too_large:
            raise _TooLargeError
        return message

    async def send(self, message: Mapping[str, Any]) -> None:
        if not self.is_too_large or self.has_begun:
            self.has_begun = True
            await self._send(message)
