"""Host and Origin checks: a server on this machine answers local programs and its own pages, not those of other sites.

A browser lets any page send requests to 127.0.0.1, and a site whose name is made to point there (DNS rebinding) reads the
answers, too. Such requests have a foreign Origin or a foreign Host. MLflow has options against both, Prefect has none.

The pages themselves load and contact nothing but their own server: Prefect's pages contact their maker's telemetry host
from the browser, whatever its settings say, and an image in a run's description may be at any address.

MLflow's server also has an assistant: any program that reaches it may choose the language model that it asks, and allow what
that wants to run with the rights of the server's account. There is no option against it, so its routes are refused.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ttrain.core.files import parse_object
from ttrain.store.server_records import HOST

Scope = Mapping[str, Any]
Message = Mapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

ASSISTANT = "/ajax-api/3.0/mlflow/assistant"

HOST_REFUSED = b"this server answers requests to its own address, from its own pages, only"


def policy_of(hosts: Iterable[str]) -> bytes:
    """The Content-Security-Policy of pages that these hosts serve: scripts as Prefect and MLflow need them, no other host.

    Browsers differ in whether 'self' stands for a web socket, so that those are named.
    """
    sockets = " ".join(f"ws://{host}" for host in hosts)
    rules = (
        "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:",
        f"connect-src 'self' data: blob: {sockets}",
        "frame-ancestors 'self'",
    )
    return "; ".join(rules).encode()


def hosts_of(port: int) -> tuple[str, ...]:
    """The allowed values of a request's Host."""
    return (f"{HOST}:{port}", f"localhost:{port}")


async def refuse(
    scope: Scope, receive: Receive, send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]
) -> None:
    """Send a complete response of plain text; a web socket is closed instead."""
    if scope["type"] == "websocket":
        await receive()  # the connection request, which the protocol requires us to read before we refuse
        await send({"type": "websocket.close", "code": 1008})
    else:
        await answer(send, status, body, [(b"content-type", b"text/plain"), *headers])


async def answer(send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Send a complete response."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


class HostCheck:
    """An ASGI application that refuses, with 403, requests with a foreign Host or a foreign Origin; also web sockets.

    Every answer has the policy that keeps a page to its own server. Paths that begin with one of `without` are always
    refused.
    """

    def __init__(self, app: Any, hosts: Iterable[str], without: Iterable[str] = ()) -> None:
        hosts = tuple(hosts)
        self._app, self._hosts, self._without = app, frozenset(hosts), tuple(without)
        self._policy = (b"content-security-policy", policy_of(hosts))
        self._origins = frozenset(f"http://{host}" for host in self._hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_policy(message: Message) -> None:
            """Add the policy to answers; a browser obeys both it and one of the application's own."""
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), self._policy]}
            await send(message)

        if scope["type"] == "lifespan" or self._is_allowed(scope):
            await self._app(scope, receive, send_with_policy)
        else:
            await refuse(scope, receive, send_with_policy, 403, HOST_REFUSED)

    def _is_allowed(self, scope: Scope) -> bool:
        if self._without and scope["path"].startswith(self._without):
            return False
        headers = [(name.decode("latin-1").lower(), value.decode("latin-1").lower()) for name, value in scope["headers"]]
        hosts = [value for name, value in headers if name == "host"]
        origins = [value for name, value in headers if name == "origin"]
        return len(hosts) == 1 and hosts[0] in self._hosts and all(origin in self._origins for origin in origins)


COOKIE_SECONDS = 30 * 24 * 3600

FIRST_MESSAGE_CHARACTERS = 4096

TOKEN_REFUSED = (
    b"this server needs its token: open the address that `ttrain up` prints, or send the text "
    b"of the file servers/token in ttrain's home as `Authorization: Bearer TOKEN`\n"
)
# A page, not a redirect: a browser that came from a file or from another site sends a strict cookie only where a page of
# the server itself leads on. `replace`, so that the token does not stay in the history.
LEAVE_THE_TOKEN = "const there = new URL(location.href); there.searchParams.delete('token'); location.replace(there.href);"

LANDING = f"<!doctype html><title>ttrain</title><script>{LEAVE_THE_TOKEN}</script>".encode()

SCRIPT_DIGEST = base64.b64encode(hashlib.sha256(LEAVE_THE_TOKEN.encode()).digest())


class TokenRequired:
    """An ASGI application that answers 401 to requests without the token; a web socket is closed.

    GET requests of the paths `without_token` need none.
    """

    def __init__(self, app: Any, token: str, port: int, without_token: Iterable[str] = ()) -> None:
        self._app, self._token, self._without_token = app, token.encode(), frozenset(without_token)
        # Cookies go to all ports of a host: so each server has its own, which is of no use to another one
        self._cookie_name = f"ttrain-{port}".encode()
        self._cookie = hmac.new(self._token, b"cookie " + self._cookie_name, hashlib.sha256).hexdigest().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "http" and scope["method"] == "GET" and self._is_in_address(scope):
            await answer(send, 200, LANDING, self._landing_headers())
        elif kind == "lifespan" or self._is_allowed(scope):
            await self._app(scope, receive, send)
        elif kind == "websocket" and "prefect" in scope.get("subprotocols", ()):
            socket = _CheckedSocket(self._is_token, receive, send)
            await self._app(scope, socket.receive, socket.send)
        else:
            await refuse(scope, receive, send, 401, TOKEN_REFUSED, (b"www-authenticate", b"Bearer"))

    def _is_allowed(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["method"] == "GET" and scope["path"] in self._without_token:
            return True
        headers = [(name.lower(), value) for name, value in scope["headers"]]
        authorizations = (value for name, value in headers if name == b"authorization")
        return any(self._is_token(shown) for value in authorizations for shown in _shown(value)) or self._has_cookie(headers)

    def _is_token(self, shown: bytes) -> bool:
        return hmac.compare_digest(shown, self._token)

    def _is_in_address(self, scope: Scope) -> bool:
        pairs = (pair.partition(b"=") for pair in scope.get("query_string", b"").split(b"&"))
        return any(
            name == b"token" and self._is_token(value) for name, _, value in pairs
        )  # the token needs no percent-encoding

    def _has_cookie(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        pairs = (pair.strip().partition(b"=") for name, value in headers if name == b"cookie" for pair in value.split(b";"))
        return any(name == self._cookie_name and hmac.compare_digest(value, self._cookie) for name, _, value in pairs)

    def _landing_headers(self) -> list[tuple[bytes, bytes]]:
        cookie = b"%b=%b; Path=/; HttpOnly; SameSite=Strict; Max-Age=%d" % (self._cookie_name, self._cookie, COOKIE_SECONDS)
        return [
            (b"content-type", b"text/html; charset=utf-8"),
            (b"content-security-policy", b"default-src 'none'; script-src 'sha256-%b'" % SCRIPT_DIGEST),
            (b"cache-control", b"no-store"),
            (b"referrer-policy", b"no-referrer"),
            (b"set-cookie", cookie),
        ]


def _shown(authorization: bytes) -> Iterator[bytes]:
    """Candidates for the token in an `Authorization`: Prefect sends the text as Basic, others a name and a password."""
    scheme, _, credentials = authorization.strip().partition(b" ")
    if scheme.lower() == b"bearer":
        yield credentials.strip()
    if scheme.lower() == b"basic":
        try:
            text = base64.b64decode(credentials.strip(), validate=True)
        except binascii.Error:
            return
        yield text
        yield text.partition(b":")[2]


@dataclass
class _CheckedSocket:
    """A web socket of Prefect's protocol whose first message must bring the token; nothing passes before, either way."""

    _is_token: Callable[[bytes], bool]
    _receive: Receive
    _send: Send
    _is_checked: bool = False
    _is_closed: bool = False

    async def receive(self) -> Message:
        message = await self._receive()
        if self._is_checked or message["type"] != "websocket.receive":
            return message
        text = message.get("text") or ""
        first = parse_object(text) if len(text) <= FIRST_MESSAGE_CHARACTERS else {}
        shown = first.get("token") if first.get("type") == "auth" else None
        if isinstance(shown, str) and self._is_token(shown.encode("utf-8", "replace")):
            self._is_checked = True
            return message
        self._is_closed = True
        await self._send({"type": "websocket.close", "code": 1008, "reason": "the token is missing or wrong"})
        return {"type": "websocket.disconnect", "code": 1008}

    async def send(self, message: Message) -> None:
        if self._is_closed or not (self._is_checked or message["type"] in ("websocket.accept", "websocket.close")):
            return
        await self._send(message)


def guarded(app: Any, port: int, token: str, *, without_token: Iterable[str] = (), without: Iterable[str] = ()) -> HostCheck:
    """The application behind the token, unless that is empty, and behind the check against other sites."""
    checked = TokenRequired(app, token, port, without_token) if token else app
    return HostCheck(checked, hosts_of(port), without)


BODY_BYTES = 64 << 20  # a run's settings are 0.1 MB, a thousand lines of its log 1 MB
# Where MLflow writes a PUT to disk as it comes; a checkpoint may have any size. All its other bodies are held in memory.
UPLOADS = ("/api/2.0/mlflow-artifacts/artifacts/", "/ajax-api/2.0/mlflow-artifacts/artifacts/")


class BodyLimited:
    """An ASGI application that answers 413 to a larger body: before reading any of it, where its length is declared.

    A body without Content-Length is counted as it comes. A PUT to a path that begins with one of `uploads` has no limit.
    """

    def __init__(self, app: Any, limit_bytes: int = BODY_BYTES, uploads: Iterable[str] = ()) -> None:
        self._app, self._limit_bytes, self._uploads = app, limit_bytes, tuple(uploads)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["method"] == "PUT" and scope["path"].startswith(self._uploads)):
            await self._app(scope, receive, send)
            return
        body = _CountedBody(receive, send, self._limit_bytes)
        sizes = [value for name, value in scope["headers"] if name.lower() == b"content-length" and value.isdigit()]
        # cut, since int() of very many digits takes long
        if all(int(value[:20]) <= self._limit_bytes for value in sizes):
            try:
                await self._app(scope, body.receive, body.send)
            except Exception:
                if not body.is_too_large:
                    raise
            if not body.is_too_large or body.has_begun:
                return
        text = f"the body of a request may have {self._limit_bytes} bytes; this one has more\n".encode()
        await refuse(scope, receive, send, 413, text, (b"connection", b"close"))


class _TooLargeError(Exception):
    """A body is larger than the limit."""


@dataclass
class _CountedBody:
    """Passes a body to the application up to the limit; beyond it, the application gets an error, and its answer is dropped.

    No `http.disconnect`, after which MLflow takes what came for the whole body.
    """

    _receive: Receive
    _send: Send
    _limit_bytes: int
    _bytes: int = 0
    is_too_large: bool = False
    has_begun: bool = False

    async def receive(self) -> Message:
        if not self.is_too_large:
            message = await self._receive()
            self._bytes += len(message.get("body", b""))
            self.is_too_large = self._bytes > self._limit_bytes
        if self.is_too_large:
            raise _TooLargeError
        return message

    async def send(self, message: Message) -> None:
        if not self.is_too_large or self.has_begun:
            self.has_begun = True
            await self._send(message)
