"""The guard in front of ttrain's servers: 403 for other sites, 401 without the token.

Any page may send requests to 127.0.0.1, and DNS rebinding lets it read the answers; such requests
have a foreign Origin or Host. Other accounts of the machine do not know the token.

The policy keeps pages from contacting other servers: Prefect's pages would send telemetry.
"""

import base64
import contextlib
import hashlib
import hmac
from typing import Any

from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from ttrain.store.server_records import HOST

COOKIE_SECONDS = 30 * 24 * 3600
# Scripts as Prefect and MLflow need them, from no other host
POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; frame-ancestors 'self'"
HOST_REFUSED = "this server answers requests to its own address, from its own pages, only"
TOKEN_REFUSED = (
    "this server needs its token: open the address that `ttrain serve` or `ttrain up` prints, or "
    "send the text of the file servers/token in ttrain's home as `Authorization: Bearer TOKEN`\n"
)
# A page, not a redirect: a browser that came from a file or from another site sends a strict
# cookie only where a page of the server itself leads on. `replace` keeps the token out of the
# history.
LEAVE_THE_TOKEN = """
const there = new URL(location.href);
there.searchParams.delete('token');
location.replace(there.href);
"""
LANDING = f"<!doctype html><title>ttrain</title><script>{LEAVE_THE_TOKEN}</script>"
LANDING_HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}


class Guard:
    """An ASGI application that passes on requests of its own pages and with the token.

    open_path: a path that anybody may GET
    """

    def __init__(self, app: Any, port: int, token: str, *, open_path: str = "") -> None:
        self._app = app
        self._token = token.encode()
        self._open_path = open_path
        self._hosts = (f"{HOST}:{port}", f"localhost:{port}")
        # Browsers differ in whether 'self' stands for a web socket, so that those are named
        policy = (
            f"{POLICY}; connect-src 'self' data: blob: "
            f"{' '.join(f'ws://{host}' for host in self._hosts)}"
        )
        self._policy = (b"content-security-policy", policy.encode())
        # Cookies go to all ports of a host: so each server has its own, useless to another one
        self._cookie_name = f"ttrain-{port}"
        self._cookie = hmac.new(
            self._token, f"cookie {self._cookie_name}".encode(), hashlib.sha256
        ).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_policy(message: Message) -> None:
            """Add the policy; a browser obeys both it and one of the application's own."""
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), self._policy]}
            await send(message)

        refusal = None if scope["type"] == "lifespan" else self._refusal(HTTPConnection(scope))
        if refusal is None:
            await self._app(scope, receive, send_with_policy)
        elif scope["type"] == "http":
            await refusal(scope, receive, send_with_policy)
        else:
            await receive()  # the connection request, which the protocol requires us to read
            await WebSocketClose(1008)(scope, receive, send)

    def _refusal(self, request: HTTPConnection) -> Response | None:
        is_get = request.scope.get("method", "GET") == "GET"
        # For this server, and from its own pages or from a program.
        hosts = request.headers.getlist("host")
        is_for_us = len(hosts) == 1 and hosts[0].lower() in self._hosts
        origins = {origin.lower() for origin in request.headers.getlist("origin")}
        if not is_for_us or origins - {f"http://{host}" for host in self._hosts}:
            return PlainTextResponse(HOST_REFUSED, 403)
        if is_get and request.scope["path"] == self._open_path:
            return None
        if is_get and self._is_token(request.query_params.get("token", "")):
            # the first page of a browser, which keeps a cookie and leaves the token behind
            landing = HTMLResponse(LANDING, headers=LANDING_HEADERS)
            landing.set_cookie(
                self._cookie_name, self._cookie, COOKIE_SECONDS, httponly=True, samesite="strict"
            )
            return landing
        if not self._has_token(request):
            return PlainTextResponse(TOKEN_REFUSED, 401, {"WWW-Authenticate": "Bearer"})
        return None

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode("utf-8", "replace"), self._token)

    def _has_token(self, request: HTTPConnection) -> bool:
        # By cookie, by Bearer, or by Basic: as all of the credentials (Prefect) or as the password.
        if hmac.compare_digest(
            request.cookies.get(self._cookie_name, "").encode(), self._cookie.encode()
        ):
            return True
        scheme, _, text = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "basic":
            with contextlib.suppress(ValueError):
                text = base64.b64decode(text).decode("latin-1")
        return self._is_token(text.strip()) or self._is_token(text.partition(":")[2])
