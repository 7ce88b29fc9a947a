"""`up` and `down` with the real servers once, and with doubles where only bookkeeping matters."""

import contextlib
import json
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
from support.served import processes_of, write_double
from support.waiting import wait_until

from ttrain.cli.tracking import redirect_page
from ttrain.errors import TTrainError
from ttrain.flows import servers
from ttrain.store import server_records
from ttrain.tracking.client import tracking_uri
from ttrain.tracking.mlflow_mirror import Mirror, TrackedRun

# Whether a web socket of that address may be tried at all: one that a policy forbids throws, or is
# closed without a try
ELSEWHERE = "http://elsewhere:4200/api"


@pytest.fixture(autouse=True)
def nothing_set_by_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        is_setting = name.startswith(("PREFECT_", "MLFLOW_", "DO_NOT_TRACK"))
        if is_setting or name.upper().endswith("_PROXY"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def real_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("home")
    yield home
    servers.down(home)


@pytest.fixture
def faked_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    write_double(tmp_path)
    for name in ("prefect_command", "mlflow_command"):
        monkeypatch.setattr(servers, name, lambda home, port: (["double", str(port)], {}))
    yield tmp_path
    servers.down(tmp_path)


def start_both(home: Path, *ports: int) -> dict[str, str]:
    # Below those that outgoing connections take
    free = (servers.free_port(random.randrange(start, start + 5_000)) for start in (20_000, 25_000))
    servers.start(home, dict(zip(("prefect", "mlflow"), ports or free, strict=True)))
    return servers.running(home)


def request(
    url: str, token: str | None, data: bytes | None = None, **headers: str
) -> urllib.request.Request:
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return urllib.request.Request(url, data, headers)


def read(url: str, token: str | None) -> bytes:
    with urllib.request.urlopen(request(url, token), timeout=5) as reply:
        return bytes(reply.read())


def answers(url: str, token: str | None = None) -> bool:
    with contextlib.suppress(OSError):
        read(url, token)
        return True
    return False


def refusal_of(*words: str | bytes | None, **headers: str) -> int:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request(*words, **headers))  # type: ignore[arg-type]
    return refused.value.code


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
    assert answers(f"{prefect}/api/health") and answers(f"{mlflow}/health")
    for url in (prefect, f"{prefect}/api/version", mlflow, f"{mlflow}/version"):
        assert answers(url, token) and not answers(url) and not answers(url, "another")
    named = b'{"name": "of another account"}'
    json_type = {"Content-Type": "application/json"}
    for url in (f"{prefect}/api/flows/", f"{api}/experiments/create"):
        assert refusal_of(url, None, named, **json_type) == 401
    environment = servers.prefect_environment(real_home)
    assert environment["PREFECT_API_URL"] == f"{prefect}/api"
    assert environment["PREFECT_API_AUTH_STRING"] == token
    listed = json.loads(read(f"{api}/artifacts/list?run_id={run.run_id}", token))
    assert [file["path"] for file in listed["files"]] == ["report.md"]
    assert read(f"{mlflow}/get-artifact?path=report.md&run_uuid={run.run_id}", token) == b"kept"
    for name in (
        "mlflow/mlflow.db",
        "prefect/prefect.db",
        "servers/mlflow.log",
        "servers/prefect.log",
    ):
        assert token.encode() not in (real_home / name).read_bytes(), name
    for url in (mlflow, f"{prefect}/api/health", f"{api}/runs/create"):
        body = b"{}" if url.endswith("create") else None
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            assert refusal_of(url, token, body, **headers) == 403

    family = processes_of(real_home)
    assert len(family) >= 2
    for process in family:
        assert token not in " ".join(process.cmdline())
        listening = [c.laddr.ip for c in process.net_connections() if c.status == "LISTEN"]
        assert {*listening} <= {"127.0.0.1"}
    assert servers.down(real_home) == ["prefect", "mlflow"]
    assert not processes_of(real_home)
    assert not any(psutil.pid_exists(process.pid) for process in family)
    assert servers.down(real_home) == [] and servers.running(real_home) == {}


def test_a_second_up_starts_only_a_server_that_was_killed(faked_home: Path) -> None:
    def process_of(name: str) -> psutil.Process:
        record = json.loads((faked_home / "servers" / f"{name}.json").read_text())
        return psutil.Process(record["pid"])

    first = start_both(faked_home)
    assert first == start_both(faked_home) and len(processes_of(faked_home)) == 2
    mlflow = process_of("mlflow")
    process_of("prefect").kill()
    wait_until(lambda: "prefect" not in servers.running(faked_home), 5)
    assert "PREFECT_API_URL" not in servers.prefect_environment(faked_home)
    second = start_both(faked_home)
    assert second["mlflow"] == first["mlflow"] and mlflow.is_running()
    assert servers.down(faked_home) == ["prefect", "mlflow"] and not processes_of(faked_home)


def test_a_server_that_dies_ends_the_other(
    faked_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["there_is_no_such_module"]
    monkeypatch.setattr(servers, "mlflow_command", lambda home, port: (command, {}))
    with pytest.raises(TTrainError, match=r"(?s)mlflow.*there_is_no_such_module"):
        start_both(faked_home)
    assert not processes_of(faked_home) and servers.running(faked_home) == {}


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
