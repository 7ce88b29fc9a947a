"""`up` and `down` with the real servers once, and with two tiny doubles where only the bookkeeping matters."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows import processes, servers
from ttrain import tracking
from ttrain.errors import TTrainError

ROOT = Path(__file__).parents[2]
STARTED_BY_THE_RUN = """
import os, sys, time
from pathlib import Path
from flows import servers
home = Path(sys.argv[1])
os.environ.update(servers.prefect_environment(home))
ready = servers.own_server(home)
from prefect import flow, get_run_logger
ready()
@flow
def greet():
    get_run_logger().info("said to the API")
greet()
print(os.environ["PREFECT_API_URL"], flush=True)
time.sleep(60)
"""
# A double of a server: answers everything with 200
DOUBLE = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def nothing_set_by_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("PREFECT_", "MLFLOW_", "DO_NOT_TRACK")) or name.upper().endswith("_PROXY"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def real_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("home")
    yield home
    servers.down(home)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home whose servers are doubles."""
    (tmp_path / "servers").mkdir()
    (tmp_path / "servers" / "double.py").write_text(DOUBLE)
    for name in ("_prefect", "_mlflow"):
        monkeypatch.setattr(servers, name, lambda home, port: (["double", str(port)], {}))
    yield tmp_path
    servers.down(tmp_path)


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """Another program, which leads a session, as a server does."""
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command, start_new_session=True) as process:
        yield process
        process.kill()


def ports() -> tuple[int, int]:
    """Two free ones, below those that outgoing connections take."""
    return processes.free_port(random.randrange(20_000, 25_000)), processes.free_port(random.randrange(25_000, 30_000))


def processes_of(home: Path) -> set[int]:
    """All whose command line or working directory names this home."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(home) in " ".join(process.cmdline()) or process.cwd().startswith(str(home)):
                found.add(process.pid)
    return found - {os.getpid()}


def answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
        return True
    return False


def within(seconds: float, condition: Any) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return bool(condition())


@pytest.mark.soak
def test_the_real_servers_start_show_a_run_and_leave_nothing(real_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = tracking.open_store(real_home, "test")
    run: Any = store.start_run("run", run_id=None, parent_run_id=None, tags={}, params={})
    run.store.client.log_text(run.id, "kept", "report.md")
    port, other = ports()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        found = servers.up(real_home, prefect_port=port, mlflow_port=other)
        assert f":{port}" not in found.prefect_url and f"port {port} is taken" in caplog.text
        assert servers.up(real_home, prefect_port=port) == found == servers.running(real_home)

    assert answers(f"{found.prefect_api_url}/health") and answers(found.prefect_url) and answers(found.mlflow_url)
    assert servers.prefect_environment(real_home)["PREFECT_API_URL"] == found.prefect_api_url
    with urllib.request.urlopen(f"{found.mlflow_url}/ajax-api/2.0/mlflow/artifacts/list?run_id={run.id}") as reply:
        assert [file["path"] for file in json.load(reply)["files"]] == ["report.md"]
    with urllib.request.urlopen(f"{found.mlflow_url}/get-artifact?path=report.md&run_uuid={run.id}") as reply:
        assert reply.read() == b"kept"
    for url in (found.mlflow_url, f"{found.prefect_api_url}/health", f"{found.mlflow_url}/ajax-api/2.0/mlflow/runs/create"):
        sent = b"{}" if url.endswith("create") else None
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            foreign = urllib.request.Request(url, headers=headers, data=sent)
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(foreign)

    for path, sent in (("config", None), ("providers", None), ("message", b'{"message": "run this"}')):  # MLflow's assistant
        asked = urllib.request.Request(f"{found.mlflow_url}/ajax-api/3.0/mlflow/assistant/{path}", data=sent)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(asked)

    family = processes_of(real_home)
    listening = {c.laddr.ip for pid in family for c in psutil.Process(pid).net_connections() if c.status == "LISTEN"}
    assert len(family) >= 2 and listening == {"127.0.0.1"}
    assert servers.down(real_home) == ["prefect", "mlflow"]
    assert not processes_of(real_home) and not any(map(psutil.pid_exists, family))
    assert servers.down(real_home) == [] and servers.running(real_home) is None


@pytest.mark.soak
def test_a_run_has_its_own_server_which_hears_its_logs_and_dies_with_it(real_home: Path) -> None:
    servers.down(real_home)
    command = [sys.executable, "-c", STARTED_BY_THE_RUN, str(real_home)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True) as run:
        try:
            assert run.stdout is not None
            url = run.stdout.readline().decode().strip()
            assert url.startswith("http://127.0.0.1:"), "the first line in the terminal is ours: no log came before it"
            assert answers(f"{url}/health")
            database = f"file:{real_home / 'prefect' / 'prefect.db'}?mode=ro"

            def logged() -> bool:
                with contextlib.closing(sqlite3.connect(database, uri=True)) as db:
                    return bool(db.execute("SELECT 1 FROM log WHERE message = 'said to the API'").fetchone())

            assert within(10, logged)
        finally:
            run.kill()
    assert within(10, lambda: not answers(f"{url}/health")) and within(10, lambda: not processes_of(real_home))


@contextlib.contextmanager
def run_with_its_own_server(home: Path, environment: dict[str, str] | None = None, nice: int = 0) -> Iterator[str]:
    """A process that starts a server where it needs one and runs a flow through it; yields the address that it used."""
    command = [*(("nice", "-n", str(nice)) if nice else ()), sys.executable, "-c", STARTED_BY_THE_RUN, str(home)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True, env={**os.environ, **(environment or {})}
    ) as run:
        try:
            assert run.stdout is not None
            yield run.stdout.readline().decode().strip()
        finally:
            run.kill()


def flow_states(home: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(f"file:{home / 'prefect' / 'prefect.db'}?mode=ro", uri=True)) as db:
        return [state for (state,) in db.execute("SELECT state_name FROM flow_run")]


@pytest.mark.long
@pytest.mark.soak
def test_two_first_runs_at_once_on_a_fresh_home_share_its_database(tmp_path: Path) -> None:
    home, urls = tmp_path / "home", list[str]()

    def run() -> None:
        with run_with_its_own_server(home) as url:
            urls.append(url)

    both = [threading.Thread(target=run) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert len(set(urls)) == 2 and all(url.startswith("http://127.0.0.1:") for url in urls)
    assert flow_states(home) == ["Completed", "Completed"]
    assert "locked" not in (home / "servers" / "own.log").read_text()
    assert within(20, lambda: not processes_of(home)), "neither server outlives the run that started it"


@pytest.mark.long
@pytest.mark.soak
def test_a_server_starts_on_a_busy_machine(tmp_path: Path) -> None:
    """Prefect's own limit is 20 s, which a first start passes where others compute."""
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        with run_with_its_own_server(tmp_path / "home", nice=10) as url:
            assert url.startswith("http://127.0.0.1:")
            assert flow_states(tmp_path / "home") == ["Completed"]
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    assert within(30, lambda: not processes_of(tmp_path / "home"))


@pytest.mark.long
@pytest.mark.soak
def test_a_server_elsewhere_is_used_and_none_is_started(tmp_path: Path) -> None:
    with run_with_its_own_server(tmp_path / "there") as url:
        with run_with_its_own_server(tmp_path / "here", {"PREFECT_API_URL": url}) as used:
            assert used == url
            assert not (tmp_path / "here" / "servers" / "own.log").exists()
        assert flow_states(tmp_path / "there") == ["Completed", "Completed"]
    assert within(20, lambda: not processes_of(tmp_path))


def test_two_ups_at_once_start_one_of_each(home: Path) -> None:
    found: list[servers.Servers] = []
    wanted = ports()
    both = [
        threading.Thread(target=lambda: found.append(servers.up(home, prefect_port=wanted[0], mlflow_port=wanted[1])))
        for _ in range(2)
    ]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert len(found) == 2 and found[0] == found[1]
    assert len(processes_of(home)) == 2


def test_a_port_that_another_program_takes_meanwhile_is_passed_over(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers that start at once may find the same port free; the other one's answer is not taken for our own."""
    port, free_port = ports()[0], processes.free_port
    with subprocess.Popen([sys.executable, home / "servers" / "double.py", str(port)]) as faster:
        assert within(10, lambda: answers(f"http://127.0.0.1:{port}/api/health"))
        monkeypatch.setattr(processes, "free_port", lambda wanted: port if wanted == port else free_port(wanted))
        try:
            servers.start(home, {"prefect": port})
        finally:
            faster.kill()
    server = processes.living(home, "prefect")
    assert server is not None and server.port > port and server.owns(server.pid)


def test_a_server_that_was_killed_is_started_again_and_the_other_is_kept(home: Path) -> None:
    first = servers.up(home, prefect_port=ports()[0], mlflow_port=ports()[1])
    pids = {name: json.loads((home / "servers" / f"{name}.json").read_text())["pid"] for name in ("prefect", "mlflow")}
    psutil.Process(pids["prefect"]).kill()
    assert within(5, lambda: servers.running(home) is None)
    assert "PREFECT_API_URL" not in servers.prefect_environment(home)
    second = servers.up(home, prefect_port=ports()[0])
    assert second.mlflow_url == first.mlflow_url and psutil.pid_exists(pids["mlflow"])
    assert servers.down(home) == ["prefect", "mlflow"] and not processes_of(home)


def test_a_recycled_pid_is_neither_taken_for_a_server_nor_killed(home: Path, stranger: subprocess.Popen[bytes]) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        record = {"name": "prefect", "pid": stranger.pid, "port": listening.getsockname()[1], "token": "of old"}
        (home / "servers" / "prefect.json").write_text(json.dumps(record))
        assert "PREFECT_API_URL" not in servers.prefect_environment(home)
    assert servers.down(home) == []
    assert stranger.poll() is None and not (home / "servers" / "prefect.json").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"pid": 1}', "not json", '{"pid": PID, "port": 1, "token": null}'])
def test_a_damaged_file_owns_no_process(home: Path, text: str, stranger: subprocess.Popen[bytes]) -> None:
    path = home / "servers" / "prefect.json"
    path.write_text(text.replace("PID", str(stranger.pid)))  # null is also what asking for an absent token gives
    server = processes.read(home, "prefect")
    if server and server.processes():
        path.unlink()  # before `down` would end them
        pytest.fail(f"owns {server.processes()}")
    assert servers.running(home) is None and servers.down(home) == []
    assert stranger.poll() is None and not path.exists()


def test_a_server_that_dies_says_why_and_takes_the_other_along(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_mlflow", lambda home, port: (["there_is_no_such_module"], {}))
    with pytest.raises(TTrainError, match=r"(?s)mlflow server ended with exit code 1.*No module named there_is_no"):
        servers.up(home, prefect_port=ports()[0], mlflow_port=ports()[1])
    assert not processes_of(home) and servers.running(home) is None


def test_the_environment_prefers_what_the_user_has_set(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers.up(home, prefect_port=ports()[0], mlflow_port=ports()[1])
    monkeypatch.setenv("PREFECT_API_URL", "http://elsewhere:4200/api")
    monkeypatch.setenv("PREFECT_HOME", "/users/choice")
    chosen = servers.prefect_environment(home)
    assert not {"PREFECT_API_URL", "PREFECT_HOME", "PREFECT_SERVER_EPHEMERAL_ENABLED"} & set(chosen)
    servers.own_server(home)()
    assert os.environ["PREFECT_API_URL"] == "http://elsewhere:4200/api"


def test_without_a_server_the_environment_allows_an_ephemeral_one_that_is_silent(tmp_path: Path) -> None:
    chosen = servers.prefect_environment(tmp_path / "home")
    assert chosen["PREFECT_SERVER_EPHEMERAL_ENABLED"] == "true" and "PREFECT_API_URL" not in chosen
    assert chosen["DO_NOT_TRACK"] == "true" and chosen["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert chosen["PREFECT_HOME"] == str(tmp_path.resolve() / "home" / "prefect")
    assert not (tmp_path / "home").exists(), "asking leaves no trace"
    assert servers.down(tmp_path / "home") == [] and not (tmp_path / "home").exists()


def test_a_proxy_does_not_stand_before_our_own_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "intranet.example")
    assert servers.prefect_environment(tmp_path)["NO_PROXY"] == "intranet.example,127.0.0.1,localhost"


def test_neither_prefect_nor_mlflow_is_imported() -> None:
    code = "import sys, flows.servers; assert not {'prefect', 'mlflow', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
