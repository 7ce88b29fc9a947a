"""`up` and `down` with the real servers once, and with two tiny doubles where only the bookkeeping matters."""

import contextlib
import json
import os
import random
import socket
import sqlite3
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.browser import Browser, executable
from support.paths import ROOT
from support.served import processes_of, write_double
from support.waiting import wait_until

from ttrain.errors import TTrainError
from ttrain.flows import servers
from ttrain.store import server_records
from ttrain.tracking.client import tracking_uri
from ttrain.tracking.mlflow_mirror import Mirror, TrackedRun

STARTED_BY_THE_RUN = """
import os, sys, time
from pathlib import Path
from ttrain.flows import servers
home = Path(sys.argv[1])
os.environ.update(servers.prefect_environment(home))
servers.start_own_server(home)
from prefect import flow, get_run_logger
@flow
def greet():
    get_run_logger().info("said to the API")
greet()
print(os.environ["PREFECT_API_URL"], os.environ["PREFECT_API_AUTH_STRING"], flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def nothing_set_by_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("PREFECT_", "MLFLOW_", "DO_NOT_TRACK")) or name.upper().endswith(
            "_PROXY"
        ):
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


def ports() -> tuple[int, int]:
    """Two free ones, below those that outgoing connections take."""
    first, second = (
        servers.free_port(random.randrange(start, start + 5_000)) for start in (20_000, 25_000)
    )
    return first, second


def start_both(home: Path, chosen: tuple[int, int] | None = None) -> dict[str, str]:
    servers.start(home, dict(zip(("prefect", "mlflow"), chosen or ports(), strict=True)))
    return servers.running(home)


def api_of(found: dict[str, str]) -> str:
    return f"{found['prefect']}/api"


def answers(url: str, token: str | None = None) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(asking(url, token), timeout=5):
        return True
    return False


def refusal_of(request: urllib.request.Request) -> int:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    return refused.value.code


def asking(
    url: str, token: str | None, data: bytes | None = None, **headers: str
) -> urllib.request.Request:
    shown = {"Authorization": f"Bearer {token}"} if token else {}
    return urllib.request.Request(url, data, {**shown, **headers})


@pytest.mark.soak
def test_the_real_servers_start_show_a_run_to_who_has_the_token_and_leave_nothing(
    real_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Mirror(real_home).push(TrackedRun("run", "run", "test", 1.0, files={"report.md": "kept"}))
    assert run
    port, other = ports()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        found = start_both(real_home, (port, other))
        assert f":{port}" not in found["prefect"] and f"port {port} is taken" in caplog.text
        assert start_both(real_home, (port, 5000)) == found

    token = server_records.read_token(real_home)
    assert answers(f"{found['prefect']}/api/health") and answers(f"{found['mlflow']}/health")
    for url in (
        found["prefect"],
        f"{found['prefect']}/api/version",
        found["mlflow"],
        f"{found['mlflow']}/version",
    ):
        assert answers(url, token) and not answers(url) and not answers(url, "another")
    json_type = {"Content-Type": "application/json"}
    for url in (
        f"{found['prefect']}/api/flows/",
        f"{found['mlflow']}/ajax-api/2.0/mlflow/experiments/create",
    ):
        assert refusal_of(asking(url, None, b'{"name": "of another account"}', **json_type)) == 401
    chosen = servers.prefect_environment(real_home)
    assert chosen["PREFECT_API_URL"] == api_of(found) and chosen["PREFECT_API_AUTH_STRING"] == token
    with urllib.request.urlopen(
        asking(f"{found['mlflow']}/ajax-api/2.0/mlflow/artifacts/list?run_id={run.run_id}", token)
    ) as reply:
        assert [file["path"] for file in json.load(reply)["files"]] == ["report.md"]
    with urllib.request.urlopen(
        asking(f"{found['mlflow']}/get-artifact?path=report.md&run_uuid={run.run_id}", token)
    ) as reply:
        assert reply.read() == b"kept"
    databases = [real_home / "mlflow" / "mlflow.db", real_home / "prefect" / "prefect.db"]
    logs = [real_home / "servers" / name for name in ("mlflow.log", "prefect.log")]
    assert token and not [
        path for path in (*databases, *logs) if token.encode() in path.read_bytes()
    ]
    for url in (
        found["mlflow"],
        f"{found['prefect']}/api/health",
        f"{found['mlflow']}/ajax-api/2.0/mlflow/runs/create",
    ):
        sent = b"{}" if url.endswith("create") else None
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            assert refusal_of(asking(url, token, sent, **headers)) == 403

    family = {process.pid for process in processes_of(real_home)}
    assert not [pid for pid in family if token in " ".join(psutil.Process(pid).cmdline())]
    listening = {
        c.laddr.ip
        for pid in family
        for c in psutil.Process(pid).net_connections()
        if c.status == "LISTEN"
    }
    assert len(family) >= 2 and listening == {"127.0.0.1"}
    assert servers.down(real_home) == ["prefect", "mlflow"]
    assert not processes_of(real_home) and not any(map(psutil.pid_exists, family))
    assert servers.down(real_home) == [] and servers.running(real_home) == {}


# Whether a web socket of that address may be tried at all: one that a policy forbids throws, or is closed without a try
FORBIDDEN_SOCKET = """new Promise(done => {
    document.addEventListener("securitypolicyviolation", () => done(true), {once: true});
    setTimeout(() => done(false), 2000);
    try { new WebSocket("ADDRESS", "prefect").onopen = () => done(false); } catch { done(true); }
})"""


@pytest.mark.soak
@pytest.mark.skipif(executable() is None, reason="no Chromium is installed")
def test_the_pages_of_the_servers_load_and_contact_nothing_else(real_home: Path) -> None:
    found = start_both(real_home)
    token, socket_url = server_records.read_token(real_home), found["prefect"].replace("http", "ws")
    pages = {
        "/dashboard": "Work Pools",
        "/runs": "Runs",
        "/v2/dashboard": "Work Pools",
        "/v2/runs": "Runs",
    }
    with Browser() as browser:
        for address, words in {
            f"{found['prefect']}{path}": words for path, words in pages.items()
        }.items():
            browser.open(f"{found['prefect']}/?token={token}")
            browser.open(address)
            browser.wait_for(f"document.body.innerText.includes('{words}')")
            browser.settle()
        assert (
            browser.evaluate(FORBIDDEN_SOCKET.replace("ADDRESS", f"{socket_url}/api/events/out"))
            is False
        )
        assert browser.evaluate(FORBIDDEN_SOCKET.replace("ADDRESS", "ws://127.0.0.1:9/")) is True
        browser.open(f"{found['mlflow']}/?token={token}")
        browser.wait_for("document.body.innerText.includes('Experiments')")
        browser.settle()
        own = (found["prefect"], found["mlflow"], "data:", "blob:", "about:")
        assert browser.requests and not [url for url in browser.requests if not url.startswith(own)]
        refused = [error for error in browser.errors if "violates" in error]
        assert all("amplitude" in error or "ws://127.0.0.1:9/" in error for error in refused), (
            refused
        )
    servers.down(real_home)


@contextlib.contextmanager
def run_with_its_own_server(home: Path) -> Iterator[str]:
    """A process that starts a server where it needs one and runs a flow through it; yields the address that it used, and
    its token."""
    command = [sys.executable, "-c", STARTED_BY_THE_RUN, str(home)]
    options: dict[str, Any] = {"cwd": ROOT, "start_new_session": True, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, stdout=subprocess.PIPE, **options) as run:
        try:
            assert run.stdout is not None
            lines = (line.decode().strip() for line in run.stdout)
            yield next(line for line in lines if not line.startswith("Prefect makes its database"))
        finally:
            run.kill()


@pytest.mark.soak
def test_a_run_has_its_own_server_which_hears_its_logs_and_dies_with_it(real_home: Path) -> None:
    servers.down(real_home)
    with run_with_its_own_server(real_home) as used:
        url, _, token = used.partition(" ")
        assert url.startswith("http://127.0.0.1:"), (
            "the first line in the terminal is ours: no log came before it"
        )
        assert answers(f"{url}/version", token) and not answers(f"{url}/version")
        assert (
            not (real_home / "servers" / "token").exists()
            or server_records.read_token(real_home) != token
        )
        database = f"file:{real_home / 'prefect' / 'prefect.db'}?mode=ro"

        def logged() -> bool:
            with contextlib.closing(sqlite3.connect(database, uri=True)) as db:
                return bool(
                    db.execute("SELECT 1 FROM log WHERE message = 'said to the API'").fetchone()
                )

        wait_until(logged, 10)
    wait_until(lambda: not answers(f"{url}/health") and not processes_of(real_home), 10)


def test_a_second_up_starts_nothing_and_a_server_that_was_killed_is_started_again(
    faked_home: Path,
) -> None:
    first = start_both(faked_home)
    assert first == start_both(faked_home) and len(processes_of(faked_home)) == 2
    pids = {
        name: json.loads((faked_home / "servers" / f"{name}.json").read_text())["pid"]
        for name in ("prefect", "mlflow")
    }
    psutil.Process(pids["prefect"]).kill()
    wait_until(lambda: "prefect" not in servers.running(faked_home), 5)
    assert "PREFECT_API_URL" not in servers.prefect_environment(faked_home)
    second = start_both(faked_home)
    assert second["mlflow"] == first["mlflow"] and psutil.pid_exists(pids["mlflow"])
    assert servers.down(faked_home) == ["prefect", "mlflow"] and not processes_of(faked_home)


def test_a_server_that_dies_says_why_and_takes_the_other_along(
    faked_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        servers, "mlflow_command", lambda home, port: (["there_is_no_such_module"], {})
    )
    with pytest.raises(TTrainError, match=r"(?s)mlflow.*there_is_no_such_module"):
        start_both(faked_home)
    assert not processes_of(faked_home) and servers.running(faked_home) == {}


def test_the_environment_prefers_what_the_user_has_set_and_the_token_is_for_the_homes_own_servers(
    faked_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = start_both(faked_home)
    with monkeypatch.context() as patch:
        patch.setenv("PREFECT_API_URL", "http://elsewhere:4200/api")
        patch.setenv("PREFECT_HOME", "/users/choice")
        assert not {"PREFECT_API_URL", "PREFECT_HOME"} & set(
            servers.prefect_environment(faked_home)
        )
        servers.start_own_server(faked_home)
        assert os.environ["PREFECT_API_URL"] == "http://elsewhere:4200/api"
    token = server_records.read_token(faked_home)
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "of another server")
    assert token and servers.prefect_environment(faked_home)["PREFECT_API_AUTH_STRING"] == token
    for url in (
        "http://elsewhere:4200/api",
        api_of(found).replace("127.0.0.1", "127.0.0.1.elsewhere"),
        "nonsense",
    ):
        monkeypatch.setenv("PREFECT_API_URL", url)
        assert "PREFECT_API_AUTH_STRING" not in servers.prefect_environment(faked_home)
    monkeypatch.setenv("PREFECT_API_URL", api_of(found))  # as a child of a run has it
    assert servers.prefect_environment(faked_home)["PREFECT_API_AUTH_STRING"] == token

    port = found["mlflow"].rpartition(":")[2]
    for url in (found["mlflow"], f"{found['mlflow']}/"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        assert tracking_uri(faked_home) == url.replace("//", f"//ttrain:{token}@")
        assert server_records.page_with_token(faked_home, f"{url}#/runs").endswith(
            f":{port}/?token={token}#/runs"
        )
    for url in (
        found["prefect"],
        f"http://elsewhere:{port}",
        f"http://127.0.0.1:{port}@elsewhere",
        "sqlite:///a.db",
    ):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        assert tracking_uri(faked_home) == url
    servers.down(faked_home)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", found["mlflow"])
    assert tracking_uri(faked_home) == found["mlflow"], (
        "another account's program may have its port now"
    )


def test_the_token_is_in_a_file_of_its_owner_and_in_no_argument(faked_home: Path) -> None:
    start_both(faked_home)
    path = faked_home / "servers" / "token"
    token = path.read_text().strip()
    assert len(token) > 40 and [
        stat.S_IMODE(one.stat().st_mode) for one in (path, path.parent)
    ] == [0o600, 0o700]
    for process in processes_of(faked_home):
        assert (
            token not in " ".join(process.cmdline())
            and process.environ()[server_records.ACCESS] == token
        )
    servers.down(faked_home)
    assert server_records.make_token(faked_home) == token, "open pages and runs in progress go on"
    path.chmod(0o644)
    assert server_records.read_token(faked_home) is None
    assert (
        server_records.make_token(faked_home) != token
        and stat.S_IMODE(path.stat().st_mode) == 0o600
    )
