"""A real MLflow server in a process of its own, and a proxy for it that fails in every way."""

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
from urllib.parse import urlsplit

from support.waiting import wait_until

from ttrain.tracking.client import open_client, own_uri

# Without uvicorn and its workers: 2 s instead of 6 s, for the same routes and database
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
QUIET = dict.fromkeys(("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK"), "true")
QUIET["MLFLOW_SERVER_DISABLE_SECURITY_MIDDLEWARE"] = "true"
# Headers that hold for one connection
HOP = ("host", "content-length", "transfer-encoding", "connection", "accept-encoding")


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def mlflow_server(directory: Path) -> Iterator[str]:
    """The address of a server whose database and artifacts, which it serves, are in `directory`."""
    port = free_port()
    open_client(own_uri(directory), directory)  # its 67 migrations take 1 s
    command = [sys.executable, "-c", SERVER, str(directory), str(port)]
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **QUIET})
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(f"{url}/health") or process.poll() is not None, 180)
        assert process.poll() is None, (directory / "server.log").read_text()
        yield url
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


class Proxy:
    """Passes requests on to a server, or is away, as `mode` says, which can be changed any time.

    well         passes all
    dead         nobody listens
    hanging      takes requests, passes them on when the mode changes, never answers
    error        answers 500
    no replies   passes requests on, and drops the answers: the sender cannot know that they arrived
    """

    def __init__(self, target: str) -> None:
        self.target = urlsplit(target).netloc
        self._port = free_port()
        self._server: ThreadingHTTPServer | None = None
        self.mode = "well"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def mode(self) -> str:
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self._mode = mode
        if mode == "dead":
            self.close()
        elif self._server is None:
            handler = type("Handler", (_Handler,), {"proxy": self})
            self._server = ThreadingHTTPServer(("127.0.0.1", self._port), handler)
            threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Handler(BaseHTTPRequestHandler):
    proxy: Proxy
    protocol_version = "HTTP/1.1"

    log_message = staticmethod(lambda *_: None)

    def handle_request(self) -> None:
        body = self._body()
        self.close_connection = True
        mode = self.proxy.mode
        if mode == "error":
            self._answer(500, b"{}", "application/json")
            return
        if mode == "hanging":
            wait_until(lambda: self.proxy.mode != "hanging", 60)
        headers = {name: text for name, text in self.headers.items() if name.lower() not in HOP}
        connection = http.client.HTTPConnection(self.proxy.target, timeout=60)
        with contextlib.closing(connection) as server:
            server.request(self.command, self.path, body=body or None, headers=headers)
            answer = server.getresponse()
            data = answer.read()
        if mode == "well":
            kind = answer.headers.get("Content-Type", "application/json")
            self._answer(answer.status, data, kind)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_request

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _answer(self, status: int, answer: bytes, kind: str) -> None:
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(answer)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(answer)


def answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
        return True
    return False
