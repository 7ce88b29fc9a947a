"""The guard before Prefect's server: its own pages and programs pass, other sites do not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from ttrain.flows.access_control import ASSISTANT, HostCheck, hosts_of

SENT = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/html")]}


def answer(kind: str, *headers: tuple[str, str], path: str = "/api/health") -> list[Mapping[str, Any]]:
    """What a guarded application sends to a request with these headers."""
    sent: list[Mapping[str, Any]] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send(SENT if path == "/page" else {"type": "passed"})

    async def receive() -> Mapping[str, Any]:
        return {"type": f"{kind}.connect"}

    async def send(message: Mapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": kind, "path": path, "headers": [(name.encode(), value.encode()) for name, value in headers]}
    asyncio.run(HostCheck(inner, hosts_of(4200), without=[ASSISTANT])(scope, receive, send))
    return sent


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(
    "headers",
    [
        [("host", "127.0.0.1:4200")],
        [("Host", "LOCALHOST:4200")],
        [("host", "127.0.0.1:4200"), ("origin", "http://127.0.0.1:4200")],
        [("host", "localhost:4200"), ("origin", "http://127.0.0.1:4200")],
    ],
)
def test_its_own_pages_and_programs_pass(kind: str, headers: list[tuple[str, str]]) -> None:
    assert answer(kind, *headers) == [{"type": "passed"}]


@pytest.mark.parametrize(
    "headers",
    [
        [("host", "evil.example:4200")],
        [("host", "127.0.0.1:4200"), ("origin", "http://evil.example")],
        [("host", "127.0.0.1:4200"), ("origin", "null")],
        [("host", "127.0.0.1:4200"), ("origin", "https://127.0.0.1:4200")],
        [("host", "127.0.0.1:4200"), ("origin", "http://127.0.0.1:5000")],
        [("host", "127.0.0.1:4200"), ("host", "evil.example")],
        [("host", "127.0.0.1.evil.example:4200")],
        [],
    ],
)
def test_other_sites_do_not(headers: list[tuple[str, str]]) -> None:
    first, *_ = answer("http", *headers)
    assert (first["type"], first["status"]) == ("http.response.start", 403)
    assert answer("websocket", *headers) == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.parametrize("path", [f"{ASSISTANT}/config", f"{ASSISTANT}/message", f"{ASSISTANT}/sessions/1/stream"])
def test_what_is_left_out_is_there_for_nobody(path: str) -> None:
    first, *_ = answer("http", ("host", "127.0.0.1:4200"), path=path)
    assert first["status"] == 403


@pytest.mark.parametrize("host", ["127.0.0.1:4200", "evil.example"])
def test_every_answer_keeps_its_page_to_its_own_server(host: str) -> None:
    first, *_ = answer("http", ("host", host), path="/page")
    [policy] = [value.decode() for name, value in first["headers"] if name == b"content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["connect-src"] == "'self' data: blob: ws://127.0.0.1:4200 ws://localhost:4200"
    assert "http" not in policy and "*" not in policy and rules["frame-ancestors"] == "'self'"
    assert (b"content-type", b"text/html") in first["headers"] or first["status"] == 403


def test_the_application_still_starts_and_stops() -> None:
    assert answer("lifespan") == [{"type": "passed"}]
