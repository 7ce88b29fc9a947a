"""Who may use a server that ttrain started: who shows its token. All accounts of a machine reach 127.0.0.1.

Programs show the token in `Authorization`, as Bearer (MLFLOW_TRACKING_TOKEN) or as the password of Basic
(PREFECT_API_AUTH_STRING, or a password in the address). A browser shows it once in the address, `/?token=...`, and then in
a cookie. Prefect's clients show it in the first message of a web socket, where they cannot set a header.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, final

from flows.host_check import Receive, Scope, Send, answer
from ttrain.core.files import parse_json

COOKIE_SECONDS: Final = 30 * 24 * 3600
FIRST_MESSAGE_CHARACTERS: Final = 4096
REFUSED: Final = (
    b"this server answers to who shows its token: open the address that `ttrain ui` or `ttrain up` prints, or send the text "
    b"of the file servers/token in ttrain's home as `Authorization: Bearer TOKEN`\n"
)
# A page, not a redirect: a browser that came from a file or from another site sends a strict cookie only where a page of
# the server itself leads on. `replace`, so that the token does not stay in the history.
LEAVE_THE_TOKEN: Final = (
    "const there = new URL(location.href); there.searchParams.delete('token'); location.replace(there.href);"
)
LANDING: Final = f"<!doctype html><title>ttrain</title><script>{LEAVE_THE_TOKEN}</script>".encode()
SCRIPT_DIGEST: Final = base64.b64encode(hashlib.sha256(LEAVE_THE_TOKEN.encode()).digest())


@final
class TokenRequired:
    """An ASGI application that answers 401 to whoever does not show the token; a web socket is closed.

    The paths `without_token` are for everybody who asks with GET.
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
        elif kind == "lifespan" or self._may(scope):
            await self._app(scope, receive, send)
        elif kind == "websocket" and "prefect" in scope.get("subprotocols", ()):
            socket = _CheckedSocket(self._is_token, receive, send)
            await self._app(scope, socket.receive, socket.send)
        elif kind == "websocket":
            await receive()  # its request to connect, which the protocol has us take before we refuse
            await send({"type": "websocket.close", "code": 1008})
        else:
            await answer(send, 401, REFUSED, [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")])

    def _may(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["method"] == "GET" and scope["path"] in self._without_token:
            return True
        headers = [(name.lower(), value) for name, value in scope["headers"]]
        authorizations = (value for name, value in headers if name == b"authorization")
        return any(self._is_token(shown) for value in authorizations for shown in _shown(value)) or self._has_cookie(headers)

    def _is_token(self, shown: bytes) -> bool:
        return hmac.compare_digest(shown, self._token)

    def _is_in_address(self, scope: Scope) -> bool:
        pairs = (pair.partition(b"=") for pair in scope.get("query_string", b"").split(b"&"))
        return any(name == b"token" and self._is_token(value) for name, _, value in pairs)  # it needs no percent signs

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
    """What may be the token in an `Authorization`: Prefect sends its whole text as Basic, others a name and a password."""
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


@final
class _CheckedSocket:
    """A web socket of Prefect's protocol whose first message must bring the token; nothing passes before, either way."""

    def __init__(self, is_token: Callable[[bytes], bool], receive: Receive, send: Send) -> None:
        self._is_token, self._receive, self._send = is_token, receive, send
        self._is_checked = self._is_closed = False

    async def receive(self) -> Mapping[str, Any]:
        message = await self._receive()
        if self._is_checked or message["type"] != "websocket.receive":
            return message
        if self._brings_token(message.get("text") or ""):
            self._is_checked = True
            return message
        self._is_closed = True
        await self._send({"type": "websocket.close", "code": 1008, "reason": "the token is missing or wrong"})
        return {"type": "websocket.disconnect", "code": 1008}

    async def send(self, message: Mapping[str, Any]) -> None:
        if self._is_closed or not (self._is_checked or message["type"] in ("websocket.accept", "websocket.close")):
            return
        await self._send(message)

    def _brings_token(self, text: str) -> bool:
        if len(text) > FIRST_MESSAGE_CHARACTERS:
            return False
        try:
            message = parse_json(text)
        except ValueError:
            return False
        shown = message.get("token") if isinstance(message, dict) and message.get("type") == "auth" else None
        return isinstance(shown, str) and self._is_token(shown.encode("utf-8", "replace"))
