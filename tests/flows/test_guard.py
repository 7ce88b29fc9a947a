"""The guard in front of a server: other sites, the token; a real server with a small application."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import uvicorn
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from ttrain.errors import UsageError
from ttrain.flows import engine, servers
from ttrain.flows.guard import Guard
from ttrain.store import server_records
from ttrain.store.server_records import HOST

TOKEN = "a-token_1"
SLEEP_SECONDS = 0.01


class Application:
    """Its web socket answers each message, and says something by itself at the beginning."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await self._socket(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async def _socket(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        subprotocol = "prefect" if "prefect" in scope["subprotocols"] else None
        await send({"type": "websocket.accept", "subprotocol": subprotocol})
        if subprotocol is None:
            await send({"type": "websocket.send", "text": "said before it was asked"})
        while (message := await receive())["type"] == "websocket.receive":
            kind = "auth_success" if "auth" in message["text"] else "heard"
            await send({"type": "websocket.send", "text": json.dumps({"type": kind})})


@contextlib.contextmanager
def served(app: Any, port: int) -> Iterator[None]:
    """The application on a port."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((HOST, port))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(SLEEP_SECONDS)
        yield
        server.should_exit = True
        thread.join(10)


PORT: list[int] = []


@pytest.fixture(scope="module")
def application() -> Iterator[Application]:
    """A small application behind the guard, as `up` puts it before Prefect."""
    app = Application()
    with socket.socket() as probe, pytest.MonkeyPatch.context() as patch:
        probe.bind((HOST, 0))
        PORT[:] = [probe.getsockname()[1]]
        patch.setenv(servers.PORT, str(PORT[0]))
        patch.setenv(server_records.ACCESS, TOKEN)
        guarded = servers.guarded_app(app, "prefect")
    with served(guarded, PORT[0]):
        yield app


@contextlib.contextmanager
def served_elsewhere(app: Any) -> Iterator[int]:
    """The same application behind a guard of the same token, on another port."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    with served(Guard(app, port, TOKEN), port):
        yield port


def ask(
    path: str = "/api/flows", method: str = "GET", body: Any = None, port: int = 0, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body)"""
    with contextlib.closing(HTTPConnection(HOST, port or PORT[0], timeout=10)) as connection:
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        return reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read()


def basic(text: str) -> str:
    return f"Basic {base64.b64encode(text.encode()).decode()}"


@pytest.mark.parametrize(
    "authorization", [f"Bearer {TOKEN}", f"bearer  {TOKEN} ", basic(TOKEN), basic(f"ttrain:{TOKEN}"), basic(f"any:{TOKEN}")]
)
def test_a_program_shows_the_token_as_prefect_and_mlflow_do(application: Application, authorization: str) -> None:
    assert ask(Authorization=authorization)[0] == 200
    with connect(f"ws://{HOST}:{PORT[0]}/api/events/in", additional_headers={"Authorization": authorization}) as there:
        assert there.recv(timeout=10) == "said before it was asked"


def test_prefects_own_subscriber_to_events_shows_it_when_it_connects(application: Application) -> None:
    from prefect.events.clients import PrefectEventSubscriber
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_CLIENT_CUSTOM_HEADERS, temporary_settings

    async def first_answer() -> str:
        subscriber = PrefectEventSubscriber(api_url=f"http://{HOST}:{PORT[0]}/api", reconnection_attempts=0)
        async with subscriber:
            return "let in"

    chosen = servers.access(TOKEN)
    names = {PREFECT_API_AUTH_STRING, PREFECT_CLIENT_CUSTOM_HEADERS}
    assert {name.name for name in names} == set(chosen)
    with temporary_settings({name: chosen[name.name] for name in names}):
        assert asyncio.run(first_answer()) == "let in"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": basic(f"{TOKEN}:")},
        {"Cookie": f"ttrain={TOKEN}"},
    ],
)
def test_who_shows_it_not_is_told_how_and_reaches_nothing(application: Application, headers: dict[str, str]) -> None:
    for path, method in (("/api/flows", "GET"), ("/api/health", "POST")):
        status, _, text = ask(path, method, **headers)
        assert status == 401 and b"`ttrain up` prints" in text and TOKEN.encode() not in text
    named = {name: value for name, value in headers.items() if value.isascii()}
    for subprotocols in (None, [Subprotocol("prefect")]):
        with pytest.raises(InvalidStatus, match="403"):
            connect(f"ws://{HOST}:{PORT[0]}/api/events/out", additional_headers=named, subprotocols=subprotocols)


def test_a_server_of_another_home_is_refused_with_what_to_set(application: Application, tmp_path: Path) -> None:
    with mock.patch.dict(os.environ, {"PREFECT_API_URL": f"http://{HOST}:{PORT[0]}/api"}):
        for text in ("", "another"):
            os.environ["PREFECT_API_AUTH_STRING"] = text
            with pytest.raises(UsageError, match=r"PREFECT_API_AUTH_STRING says \(401\); set it .* servers/token there"):
                engine.begin(tmp_path)
        os.environ["PREFECT_API_AUTH_STRING"] = TOKEN
        engine.begin(tmp_path)
    engine.reread_environment()


def test_whether_it_is_there_everybody_may_know(application: Application) -> None:
    assert ask("/api/health")[0] == 200
    assert ask("/api/health/x")[0] == ask("/x/api/health")[0] == 401


def test_a_browser_shows_it_once_in_the_address_and_then_in_a_cookie_of_this_server(application: Application) -> None:
    status, headers, page = ask(f"/runs?a=b&token={TOKEN}")
    assert status == 200 and b"location.replace" in page and TOKEN.encode() not in page
    assert headers["cache-control"] == "no-store" and headers["referrer-policy"] == "no-referrer"
    cookie, *attributes = headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(attributes)
    assert TOKEN not in cookie and cookie.startswith(f"ttrain-{PORT[0]}=")
    assert ask("/runs", Cookie=f"other=1; {cookie}")[0] == 200
    assert ask("/runs", "POST", Cookie=cookie)[0] == 200
    with connect(f"ws://{HOST}:{PORT[0]}/api/events/out", additional_headers={"Cookie": cookie}) as there:
        assert there.recv(timeout=10) == "said before it was asked"
    assert ask("/runs", Cookie=f"{cookie}0")[0] == ask("/runs?token=another")[0] == 401
    assert ask(f"/runs?token={TOKEN}", "POST")[0] == 401, "an address leads a browser in, nothing else"
    with served_elsewhere(application) as port:
        value = cookie.partition("=")[2]
        others = f"ttrain-{port}={value}; {cookie}"
        assert ask("/runs", port=port, Cookie=others)[0] == 401, "of another server"


OWN = [
    {"Host": "127.0.0.1:PORT"},
    {"Host": "LOCALHOST:PORT"},
    {"Host": "localhost:PORT", "Origin": "http://127.0.0.1:PORT"},
]
FOREIGN = [
    {"Host": "evil.example:PORT"},
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
]


@pytest.mark.parametrize("headers", OWN + FOREIGN)
def test_other_sites_are_refused_even_with_the_token(application: Application, headers: dict[str, str]) -> None:
    sent = {name: value.replace("PORT", str(PORT[0])) for name, value in headers.items()}
    status, answered, _ = ask(Authorization=f"Bearer {TOKEN}", **sent)
    assert status == (200 if headers in OWN else 403)
    policy = dict(rule.split(" ", 1) for rule in answered["content-security-policy"].split("; "))
    own = f"ws://127.0.0.1:{PORT[0]} ws://localhost:{PORT[0]}"
    assert policy["connect-src"] == f"'self' data: blob: {own}" and policy["frame-ancestors"] == "'self'"
    if "Origin" in sent and headers in FOREIGN:
        with pytest.raises(InvalidStatus, match="403"):
            connect(f"ws://{HOST}:{PORT[0]}/api/events/out", subprotocols=[Subprotocol("prefect")], additional_headers=sent)


def test_the_application_still_starts_and_stops() -> None:
    scopes: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope["type"])

    guard: Any = Guard(app, 1, TOKEN)
    asyncio.run(guard({"type": "lifespan"}, None, None))
    assert scopes == ["lifespan"]


def test_a_proxy_does_not_stand_before_our_own_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "intranet.example")
    assert servers.prefect_environment(tmp_path)["NO_PROXY"] == "intranet.example,127.0.0.1,localhost"
