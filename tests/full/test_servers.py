"""`up` and `down` with the real servers once, and with doubles where only bookkeeping matters."""

import os
import random
import socket
import stat
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.served import processes_of

from ttrain.cli.tracking import redirect_page
from ttrain.flows import servers
from ttrain.store import server_records
from ttrain.tracking.client import tracking_uri
from ttrain.tracking.mlflow_mirror import Mirror, TrackedRun

ELSEWHERE = "http://elsewhere:4200/api"


@pytest.fixture(autouse=True)
def nothing_set_by_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        is_setting = name.startswith(("PREFECT_", "MLFLOW_", "DO_NOT_TRACK"))
        if is_setting or name.upper().endswith("_PROXY"):
            monkeypatch.delenv(name)


@pytest.fixture
def real_home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    servers.down(tmp_path)


@pytest.fixture
def faked_home(real_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    double = ["http.server", "--bind", "127.0.0.1"]
    for name in ("prefect_command", "mlflow_command"):
        monkeypatch.setattr(servers, name, lambda home, port: ([*double, str(port)], {}))
    return real_home


def start_both(home: Path, *ports: int) -> dict[str, str]:
    # Below those that outgoing connections take
    free = (servers.free_port(random.randrange(start, start + 5_000)) for start in (20_000, 25_000))
    servers.start(home, dict(zip(("prefect", "mlflow"), ports or free, strict=True)))
    return servers.running(home)


def read(url: str, token: str = "", data: bytes | None = None, **headers: str) -> bytes | int:
    """The answer to a request, or the status that refuses it."""
    if token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=5) as reply:
            return bytes(reply.read())
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.soak
def test_real_servers_ask_for_the_token(real_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Mirror(real_home).push(TrackedRun("run", "run", "test", 1.0, files={"report.md": "kept"}))
    assert run
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        urls = start_both(real_home, port, servers.free_port(25_000))
        assert f":{port}" not in urls["prefect"] and f"port {port} is taken" in caplog.text
        assert start_both(real_home, port, 5000) == urls

    prefect = urls["prefect"]
    mlflow = urls["mlflow"]
    api = f"{mlflow}/ajax-api/2.0/mlflow"
    token = server_records.read_token(real_home)
    assert token
    assert read(f"{prefect}/api/health") and read(f"{mlflow}/health") == b"OK"
    for url in (prefect, f"{prefect}/api/version", mlflow, f"{mlflow}/version"):
        assert isinstance(read(url, token), bytes) and read(url) == read(url, "another") == 401
        assert read(url, token, Host="evil.example") == 403
    for url in (f"{prefect}/api/flows/", f"{api}/experiments/create"):
        assert read(url, "", b"{}", **{"Content-Type": "application/json"}) == 401
    environment = servers.prefect_environment(real_home)
    assert environment["PREFECT_API_URL"] == f"{prefect}/api"
    assert environment["PREFECT_API_AUTH_STRING"] == token
    assert read(f"{mlflow}/get-artifact?path=report.md&run_uuid={run.run_id}", token) == b"kept"
    for name in ("mlflow", "prefect"):
        for path in (real_home / name / f"{name}.db", real_home / "servers" / f"{name}.log"):
            assert token.encode() not in path.read_bytes(), path

    family = processes_of(real_home)
    assert len(family) >= 2
    for process in family:
        listening = [c.laddr.ip for c in process.net_connections() if c.status == "LISTEN"]
        assert {*listening} <= {"127.0.0.1"}
    assert servers.down(real_home) == ["prefect", "mlflow"]
    assert not processes_of(real_home)
    assert not any(psutil.pid_exists(process.pid) for process in family)
    assert servers.down(real_home) == [] and servers.running(real_home) == {}


def test_the_token_is_for_own_servers_alone(
    faked_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def auth() -> str | None:
        return servers.prefect_environment(faked_home).get("PREFECT_API_AUTH_STRING")

    urls = start_both(faked_home)
    api = f"{urls['prefect']}/api"
    token = server_records.read_token(faked_home)
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "of another server")
    assert token and auth() == token
    for url in (ELSEWHERE, api.replace("127.0.0.1", "127.0.0.1.elsewhere"), "nonsense"):
        monkeypatch.setenv("PREFECT_API_URL", url)
        assert auth() is None
    monkeypatch.setenv("PREFECT_API_URL", api)  # as a child of a run has it
    assert auth() == token

    mlflow = urls["mlflow"]
    port = mlflow.rpartition(":")[2]
    for url in (mlflow, f"{mlflow}/"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        assert tracking_uri(faked_home) == url.replace("//", f"//ttrain:{token}@")
        page = server_records.page_with_token(faked_home, f"{url}#/runs")
        assert page.endswith(f":{port}/?token={token}#/runs")
    foreign = (f"http://elsewhere:{port}", f"http://127.0.0.1:{port}@elsewhere", "sqlite:///a.db")
    for url in (urls["prefect"], *foreign):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        assert tracking_uri(faked_home) == url
    servers.down(faked_home)
    # Another account's program may have its port now
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow)
    assert tracking_uri(faked_home) == mlflow


def test_the_token_is_in_a_file_of_its_owner_and_in_no_argument(faked_home: Path) -> None:
    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    urls = start_both(faked_home)
    path = faked_home / "servers" / "token"
    token = path.read_text().strip()
    assert len(token) > 40 and (mode(path), mode(path.parent)) == (0o600, 0o700)
    for process in processes_of(faked_home):
        assert token not in " ".join(process.cmdline())
        assert process.environ()[server_records.ACCESS] == token
    # A browser gets it in a file, since other accounts see its arguments
    argument = redirect_page(faked_home, f"{urls['mlflow']}/?token={token}")
    page = faked_home / "servers" / "open.html"
    assert argument == page.as_uri() and token in page.read_text() and mode(page) == 0o600
    assert redirect_page(faked_home, ELSEWHERE) == ELSEWHERE
    servers.down(faked_home)
    assert server_records.make_token(faked_home) == token, "open pages and runs in progress go on"
    path.chmod(0o644)
    assert server_records.read_token(faked_home) is None
    assert server_records.make_token(faked_home) != token and mode(path) == 0o600
