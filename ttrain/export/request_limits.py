"""Limits on the requests to the endpoint: how many at once, how large, how slow, and no longer than their client waits.

Pure ASGI around transformers' server, which has no such limits: it computes one answer after the other, keeps what waits
in a queue without a bound, and computes on for clients that are gone.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from contextvars import ContextVar
from typing import Any, Final, final

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_BODY_BYTES: Final = 4 * 2**20  # a context of 131,072 tokens at eight times the bytes that a token of English has
MAX_HELD_BYTES: Final = 64 * 2**20  # of all bodies that are being read: a client may send the most of one, and then wait
BODY_SECONDS: Final = 30.0  # for the most bytes at 1.1 Mbit/s
RETRY_SECONDS: Final = "1"


@final
class ActiveRequest:
    """A request that is being answered: the length that it asks for, and whether its client still waits."""

    def __init__(self) -> None:
        self.max_tokens: tuple[str, int] | None = None  # (field, tokens); None: as many as there is room for
        self._closed = threading.Event()  # read by the thread that computes
        self._closing = asyncio.Event()
        self._callbacks: list[Callable[[], object]] = []

    @property
    def is_closed(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self._closed.is_set()

    def on_close(self, callback: Callable[[], object]) -> None:
        """Call this, in the event loop, once nobody waits for the answer; at once where that is so already."""
        if self.is_closed:
            callback()
        else:
            self._callbacks.append(callback)

    def close(self) -> None:
        """Nobody waits for the answer any more: its client is gone, or has it."""
        if not self.is_closed:
            self._closed.set()
            self._closing.set()
            for callback in self._callbacks:
                callback()

    async def closed(self) -> None:
        """Return once nobody waits for the answer any more."""
        await self._closing.wait()


ACTIVE: ContextVar[ActiveRequest] = ContextVar("active_request")  # of the task that answers it


class _Refused(Exception):
    """A request that is not passed on: the status of the answer, its message and its headers."""

    def __init__(self, status: int, message: str, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


@final
class LimitedRequests:
    """An ASGI application that answers at most `max_requests` POST requests at once, of at most `max_body_bytes`.

    One more is answered with 429, a larger one with 413. A request counts once its body is there, which may take
    `body_seconds`; then it is answered with 408. What is held of bodies until then is at most `max_held_bytes`. The
    application finds a request to `paths` in `ACTIVE`, which is closed as soon as the client is gone.
    """

    def __init__(
        self,
        app: Any,
        paths: Collection[str],
        *,
        max_requests: int,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_held_bytes: int = MAX_HELD_BYTES,
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        self._app, self._paths = app, frozenset(paths)
        self._max_requests, self._max_body_bytes = max_requests, max_body_bytes
        self._max_held_bytes, self._body_seconds = max_held_bytes, body_seconds
        self._active = self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            self._check_active()  # before any of the body is held
            body = await self._read(receive)
            self._check_active()
        except _Refused as refusal:
            await _refuse(send, refusal.status, str(refusal), *refusal.headers)
            return
        self._active += 1
        try:
            if scope["path"] not in self._paths:
                await self._app(scope, _Replay(body, receive), send)
            else:
                await self._answer(scope, body, receive, send)
        finally:
            self._active -= 1

    def _check_active(self) -> None:
        if self._active >= self._max_requests:
            text = f"{self._active} requests are being answered, as many as --max-requests allows; try again later"
            raise _Refused(429, text, (b"retry-after", RETRY_SECONDS.encode()))

    async def _read(self, receive: Receive) -> bytes:
        """The body. What a client sent before it left is a body, too."""
        body = bytearray()
        more = True
        try:
            async with asyncio.timeout(self._body_seconds):
                while more:
                    message = await receive()
                    piece = message.get("body", b"")
                    body += piece
                    self._held_bytes += len(piece)
                    more = message.get("more_body", False)
                    self._check_size(len(body))
        except TimeoutError:
            text = f"the body of the request did not arrive within {self._body_seconds:g} s; send it whole"
            raise _Refused(408, text, (b"connection", b"close")) from None
        finally:
            self._held_bytes -= len(body)
        return bytes(body)

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._max_body_bytes:
            text = f"the request has more than {self._max_body_bytes:,} bytes, the limit of this server; shorten it"
            raise _Refused(413, text)
        if self._held_bytes > self._max_held_bytes:
            text = f"requests of more than {self._max_held_bytes:,} bytes are arriving; try again later"
            raise _Refused(429, text, (b"retry-after", RETRY_SECONDS.encode()), (b"connection", b"close"))

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        request = ActiveRequest()
        token = ACTIVE.set(request)
        watch = asyncio.create_task(_close_with_client(request, receive))

        async def disconnected() -> Message:
            await request.closed()
            return {"type": "http.disconnect"}

        try:
            await self._app(scope, _Replay(body, disconnected), send)
        finally:
            request.close()
            watch.cancel()
            ACTIVE.reset(token)


@final
class _Replay:
    """`receive` of a request whose body was read already."""

    def __init__(self, body: bytes, after: Receive) -> None:
        self._body: bytes | None = body
        self._after = after

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._after()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


async def _close_with_client(request: ActiveRequest, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    request.close()


def error_body(status: int, message: str) -> dict[str, Any]:
    """A refusal as OpenAI's interface has it."""
    kind = "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


async def _refuse(send: Send, status: int, message: str, *headers: tuple[bytes, bytes]) -> None:
    body = json.dumps(error_body(status, message)).encode()
    length = (b"content-length", str(len(body)).encode())
    kind = (b"content-type", b"application/json")
    await send({"type": "http.response.start", "status": status, "headers": [kind, length, *headers]})
    await send({"type": "http.response.body", "body": body})
