"""The guard in front of a server: other sites, the token. Real servers: full/test_servers.py."""

import base64
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from ttrain.flows.guard import Guard

TOKEN = "a-token_1"
OPEN = "/api/health"
OWN = [{"Host": "127.0.0.1:4200"}, {"Host": "LOCALHOST:4200"}, {"Origin": "http://localhost:4200"}]
FOREIGN = [{"Host": "evil.example:4200"}, {"Origin": "http://evil.example"}, {"Origin": "null"}]


async def application(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": "events"})
    else:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})


def client_of(port: int) -> TestClient:
    guard = Guard(application, port, TOKEN, open_path=OPEN)
    return TestClient(guard, base_url=f"http://127.0.0.1:{port}")


@pytest.fixture
def client() -> TestClient:
    return client_of(4200)


def opens_a_websocket(client: TestClient, headers: dict[str, str]) -> bool:
    url = "ws://127.0.0.1:4200/api/events/out"
    try:
        with client.websocket_connect(url, headers=headers) as socket:
            return socket.receive_text() == "events"
    except WebSocketDisconnect:
        return False


def test_a_program_sends_the_token_as_prefect_and_mlflow_do(client: TestClient) -> None:
    basic = [base64.b64encode(text.encode()).decode() for text in (TOKEN, f"ttrain:{TOKEN}")]
    for value in (f"Bearer {TOKEN}", f"bearer  {TOKEN} ", *(f"Basic {text}" for text in basic)):
        headers = {"Authorization": value}
        assert client.get("/api/flows", headers=headers).status_code == 200
        assert opens_a_websocket(client, headers)


def test_without_a_token_only_the_health_is_open(client: TestClient) -> None:
    for headers in ({}, {"Authorization": f"Bearer {TOKEN}x"}, {"Cookie": f"ttrain={TOKEN}"}):
        for path, method in (("/api/flows", "GET"), (OPEN, "POST"), (f"{OPEN}/x", "GET")):
            reply = client.request(method, path, headers=headers)
            assert reply.status_code == 401 and TOKEN not in reply.text
        assert not opens_a_websocket(client, headers)
    assert client.get(OPEN).status_code == 200


def test_a_browser_sends_it_once_in_the_address_and_then_in_a_cookie(client: TestClient) -> None:
    reply = client.get(f"/runs?a=b&token={TOKEN}")
    assert reply.status_code == 200 and "location.replace" in reply.text and TOKEN not in reply.text
    expected = {"cache-control": "no-store", "referrer-policy": "no-referrer"}
    assert expected.items() <= reply.headers.items()
    cookie, *attributes = reply.headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(attributes)
    assert TOKEN not in cookie and cookie.startswith("ttrain-4200=")
    client.cookies.clear()
    for method in ("GET", "POST"):
        assert client.request(method, "/runs", headers={"Cookie": cookie}).status_code == 200
    assert opens_a_websocket(client, {"Cookie": cookie})
    assert not opens_a_websocket(client, {"Cookie": f"{cookie}0"})
    assert client.get("/runs?token=another").status_code == 401
    assert client.post(f"/runs?token={TOKEN}").status_code == 401, "only a browser's address"
    of_another_server = {"Cookie": cookie.replace("4200", "4300")}
    assert client_of(4300).get("/runs", headers=of_another_server).status_code == 401


def test_other_sites_are_refused_despite_a_token(client: TestClient) -> None:
    for headers in OWN + FOREIGN:
        authorized = {"Authorization": f"Bearer {TOKEN}", **headers}
        reply = client.get("/api/flows", headers=authorized)
        assert reply.status_code == (200 if headers in OWN else 403)
        assert opens_a_websocket(client, authorized) == (headers in OWN)
        rules = reply.headers["content-security-policy"].split("; ")
        assert "connect-src 'self' data: blob: ws://127.0.0.1:4200 ws://localhost:4200" in rules
        assert "frame-ancestors 'self'" in rules
