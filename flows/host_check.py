"""Who may talk to a server on this machine: programs that mean it, and its own pages; not the pages of other sites.

A browser lets any page send requests to 127.0.0.1, and a site whose name is made to point there (DNS rebinding) reads the
answers, too. Such requests bear a foreign Origin or a foreign Host. MLflow has options against both, Prefect has none.

The pages themselves load and contact nothing but their own server: Prefect's pages contact their maker's telemetry host
from the browser, whatever its settings say, and an image in a run's description may be at any address.

MLflow's server also has an assistant: any program that reaches it may choose the language model that it asks, and allow what
that wants to run with the rights of the server's account. There is no option against it, so its routes are not there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, final

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]

ASSISTANT: Final = "/ajax-api/3.0/mlflow/assistant"
REFUSED: Final = b"this server answers requests to its own address, from its own pages, only"


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


def hosts_of(host: str, port: int) -> tuple[str, ...]:
    """What the Host of a request may be."""
    return (f"{host}:{port}", f"localhost:{port}")


async def answer(send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """A whole answer of a guard itself."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


@final
class Guarded:
    """An ASGI application that refuses, with 403, what has a foreign Host or a foreign Origin; also web sockets.

    Every answer has the policy that keeps a page to its own server. Paths that begin as one of `without` are refused to
    everybody.
    """

    def __init__(self, app: Any, hosts: Iterable[str], without: Iterable[str] = ()) -> None:
        hosts = tuple(hosts)
        self._app, self._hosts, self._without = app, frozenset(hosts), tuple(without)
        self._policy = (b"content-security-policy", policy_of(hosts))
        self._origins = frozenset(f"http://{host}" for host in self._hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            send = self._with_policy(send)
        if scope["type"] == "lifespan" or self._may(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()  # its request to connect, which the protocol has us take before we refuse
            await send({"type": "websocket.close", "code": 1008})
        else:
            await answer(send, 403, REFUSED, [(b"content-type", b"text/plain")])

    def _with_policy(self, send: Send) -> Send:
        """Where the application has a policy of its own, a browser obeys both."""

        async def send_with_policy(message: Mapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), self._policy]}
            await send(message)

        return send_with_policy

    def _may(self, scope: Scope) -> bool:
        if self._without and scope["path"].startswith(self._without):
            return False
        given = [(name.decode("latin-1").lower(), value.decode("latin-1").lower()) for name, value in scope["headers"]]
        hosts = [value for name, value in given if name == "host"]
        origins = [value for name, value in given if name == "origin"]
        return len(hosts) == 1 and hosts[0] in self._hosts and all(origin in self._origins for origin in origins)
