"""Who may talk to a server on this machine: programs that mean it, and its own pages; not the pages of other sites.

A browser lets any page send requests to 127.0.0.1, and a site whose name is made to point there (DNS rebinding) reads the
answers, too. Such requests bear a foreign Origin or a foreign Host. MLflow has options against both, Prefect has none.

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


def hosts_of(host: str, port: int) -> tuple[str, ...]:
    """What the Host of a request may be."""
    return (f"{host}:{port}", f"localhost:{port}")


@final
class Guarded:
    """An ASGI application that refuses, with 403, what has a foreign Host or a foreign Origin; also web sockets.

    Paths that begin as one of `without` are refused to everybody.
    """

    def __init__(self, app: Any, hosts: Iterable[str], without: Iterable[str] = ()) -> None:
        self._app, self._hosts, self._without = app, frozenset(hosts), tuple(without)
        self._origins = frozenset(f"http://{host}" for host in self._hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()  # its request to connect, which the protocol has us take before we refuse
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(REFUSED)).encode())]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSED})

    def _may(self, scope: Scope) -> bool:
        if self._without and scope["path"].startswith(self._without):
            return False
        given = [(name.decode("latin-1").lower(), value.decode("latin-1").lower()) for name, value in scope["headers"]]
        hosts = [value for name, value in given if name == "host"]
        origins = [value for name, value in given if name == "origin"]
        return len(hosts) == 1 and hosts[0] in self._hosts and all(origin in self._origins for origin in origins)
