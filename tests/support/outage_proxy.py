"""A real MLflow server, in a process of its own, and in front of it a proxy that can be away in every way a server can."""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.waiting import wait_until

from ttrain.tracking.mlflow_mirror import prepare

# Without uvicorn and its workers, whose start takes 6 s on two cores: the same routes, the same database, in 2 s.
SERVER = """
import os, sys
home, port = sys.argv[1:]
os.environ["_MLFLOW_SERVER_SERVE_ARTIFACTS"] = "true"
os.environ["_MLFLOW_SERVER_ARTIFACT_DESTINATION"] = f"file://{home}/artifacts"
os.environ["_MLFLOW_SERVER_FILE_STORE"] = f"sqlite:///{home}/mlflow/mlflow.db"
os.environ["_MLFLOW_SERVER_ARTIFACT_ROOT"] = "mlflow-artifacts:/"
from mlflow.server import app
from mlflow.server.handlers import initialize_backend_stores
from werkzeug.serving import make_server
initialize_backend_stores(f"sqlite:///{home}/mlflow/mlflow.db", None, "mlflow-artifacts:/")
make_server("127.0.0.1", int(port), app, threaded=True).serve_forever()
"""


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as found:
        return int(found.getsockname()[1])


@contextlib.contextmanager
def mlflow_server(directory: Path) -> Iterator[str]:
    """The address of a server whose database and artifacts, which it hands on itself, lie in `directory`."""
    port = free_port()
    prepare(directory)  # its 67 migrations take 1 s
    quiet = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "MLFLOW_SERVER_DISABLE_SECURITY_MIDDLEWARE": "true",
    }
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(directory), str(port)],
            stdout=log,
            stderr=log,
            env={**os.environ, **quiet},
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(f"{url}/health") or process.poll() is not None, 180)
        assert process.poll() is None, (directory / "server.log").read_text()
        yield url
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("server")) as url:
        yield url


class Proxy:
    """Passes requests on to a server, or is away. `mode` can be changed at any time:

    well         passes all
    dead         nobody listens
    hanging      takes requests, passes them on later (when the mode changes), answers never
    error        answers 500
    no replies   passes requests on, and drops the answers: they arrived, and the sender does not know
    """

    def __init__(self, target: str) -> None:
        self.target, self.requests = urlsplit(target), list[str]()
        self._mode, self._changed = "well", threading.Condition()
        self._port = free_port()
        self._server: ThreadingHTTPServer | None = None
        self._listen()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def mode(self) -> str:
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        with self._changed:
            self._mode = mode
            self._changed.notify_all()
        if mode == "dead":
            self.close()
        else:
            self._listen()

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _listen(self) -> None:
        if self._server is not None:
            return
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                """Nothing."""

            def handle_request(self) -> None:
                body = (
                    self.rfile.read(int(self.headers.get("Content-Length") or 0))
                    if self.command != "GET"
                    else b""
                )
                if self.headers.get("Transfer-Encoding") == "chunked":
                    body = b"".join(_chunks(self.rfile))
                proxy.requests.append(f"{self.command} {self.path}")
                mode, self.close_connection = proxy.mode, True
                if mode == "hanging":
                    with proxy._changed:
                        proxy._changed.wait_for(lambda: proxy.mode != "hanging", 60)
                    with contextlib.suppress(OSError):
                        proxy.forward(self, body)
                    return
                if mode == "error":
                    self._answer(500, b"{}", "application/json")
                    return
                status, answer, kind = proxy.forward(self, body)
                if mode not in ("no replies", "dead"):
                    self._answer(status, answer, kind)

            def _answer(self, status: int, answer: bytes, kind: str) -> None:
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    self.send_header("Content-Type", kind)
                    self.send_header("Content-Length", str(len(answer)))
                    self.send_header("Connection", "close")
                    self.end_headers()
                    self.wfile.write(answer)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_request

        ThreadingHTTPServer.allow_reuse_address = True
        ThreadingHTTPServer.daemon_threads = True
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def forward(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes, str]:
        connection = http.client.HTTPConnection(
            str(self.target.hostname), self.target.port, timeout=60
        )
        dropped = ("host", "content-length", "transfer-encoding", "connection", "accept-encoding")
        headers = {
            name: value for name, value in request.headers.items() if name.lower() not in dropped
        }
        try:
            connection.request(request.command, request.path, body=body or None, headers=headers)
            answer = connection.getresponse()
            return (
                answer.status,
                answer.read(),
                answer.headers.get("Content-Type", "application/json"),
            )
        finally:
            connection.close()


def _chunks(stream: Any) -> Iterator[bytes]:
    while size := int(stream.readline().split(b";")[0], 16):
        yield stream.read(size)
        stream.readline()
    stream.readline()


def answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
        return True
    return False
