"""The guard in front of a server: other sites, the token. Real servers behind it: full/test_servers.py."""

import base64
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from support.web import Site, served

from ttrain.errors import UsageError
from ttrain.flows import engine
from ttrain.flows.guard import Guard

TOKEN, OPEN = "a-token_1", "/api/health"


async def application(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": "events"})
    else:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})


def client_of(port: int) -> TestClient:
    return TestClient(
        Guard(application, port, TOKEN, open_path=OPEN), base_url=f"http://127.0.0.1:{port}"
    )


@pytest.fixture
def client() -> TestClient:
    return client_of(4200)


def is_let_in(client: TestClient, headers: dict[str, str]) -> bool:
    try:
        with client.websocket_connect(
            "ws://127.0.0.1:4200/api/events/out", headers=headers
        ) as there:
            return there.receive_text() == "events"
    except WebSocketDisconnect:
        return False


def basic(text: str) -> str:
    return f"Basic {base64.b64encode(text.encode()).decode()}"


@pytest.mark.parametrize(
    "authorization",
    [f"Bearer {TOKEN}", f"bearer  {TOKEN} ", basic(TOKEN), basic(f"ttrain:{TOKEN}")],
)
def test_a_program_shows_the_token_as_prefect_and_mlflow_do(
    client: TestClient, authorization: str
) -> None:
    headers = {"Authorization": authorization}
    assert client.get("/api/flows", headers=headers).status_code == 200 and is_let_in(
        client, headers
    )


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": basic(f"{TOKEN}:")},
        {"Cookie": f"ttrain={TOKEN}"},
    ],
)
def test_who_shows_it_not_is_told_how_and_reaches_nothing(
    client: TestClient, headers: dict[str, str]
) -> None:
    for path, method in (("/api/flows", "GET"), (OPEN, "POST"), (f"{OPEN}/x", "GET")):
        reply = client.request(method, path, headers=headers)
        assert reply.status_code == 401 and "`ttrain up`" in reply.text and TOKEN not in reply.text
    assert not is_let_in(client, headers)


def test_whether_it_is_there_everybody_may_know(client: TestClient) -> None:
    assert client.get(OPEN).status_code == 200


def test_a_server_of_another_home_is_refused_with_what_to_set(tmp_path: Path) -> None:
    with (
        served(Site({}, statuses=[401] * 20)) as site,
        mock.patch.dict(os.environ, {"PREFECT_API_URL": f"{site.url}/api"}),
    ):
        os.environ["PREFECT_API_AUTH_STRING"] = "another"
        with pytest.raises(UsageError, match=r"PREFECT_API_AUTH_STRING .*401.* servers/token"):
            engine.begin(tmp_path)
    engine.reread_environment()


def test_a_browser_shows_it_once_in_the_address_and_then_in_a_cookie_of_this_server(
    client: TestClient,
) -> None:
    reply = client.get(f"/runs?a=b&token={TOKEN}")
    client.cookies.clear()
    assert reply.status_code == 200 and "location.replace" in reply.text and TOKEN not in reply.text
    assert (reply.headers["cache-control"], reply.headers["referrer-policy"]) == (
        "no-store",
        "no-referrer",
    )
    cookie, *attributes = reply.headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(attributes)
    assert TOKEN not in cookie and cookie.startswith("ttrain-4200=")
    for method in ("GET", "POST"):
        assert (
            client.request(method, "/runs", headers={"Cookie": f"other=1; {cookie}"}).status_code
            == 200
        )
    assert is_let_in(client, {"Cookie": cookie}) and not is_let_in(client, {"Cookie": f"{cookie}0"})
    assert client.get("/runs?token=another").status_code == 401
    assert client.post(f"/runs?token={TOKEN}").status_code == 401, (
        "an address leads a browser in, nothing else"
    )
    others = {"Cookie": f"ttrain-4300={cookie.partition('=')[2]}; {cookie}"}
    assert client_of(4300).get("/runs", headers=others).status_code == 401, "of another server"


OWN = [{"Host": "127.0.0.1:4200"}, {"Host": "LOCALHOST:4200"}, {"Origin": "http://localhost:4200"}]
FOREIGN = [{"Host": "evil.example:4200"}, {"Origin": "http://evil.example"}, {"Origin": "null"}]


@pytest.mark.parametrize("headers", OWN + FOREIGN)
def test_other_sites_are_refused_even_with_the_token(
    client: TestClient, headers: dict[str, str]
) -> None:
    shown = {"Authorization": f"Bearer {TOKEN}", **headers}
    reply = client.get("/api/flows", headers=shown)
    assert reply.status_code == (200 if headers in OWN else 403) and is_let_in(client, shown) == (
        headers in OWN
    )
    policy = dict(
        rule.split(" ", 1) for rule in reply.headers["content-security-policy"].split("; ")
    )
    assert policy["connect-src"] == "'self' data: blob: ws://127.0.0.1:4200 ws://localhost:4200"
    assert policy["frame-ancestors"] == "'self'"
