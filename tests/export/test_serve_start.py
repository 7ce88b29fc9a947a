"""What is said before a server starts, and which program on its port is not taken for it."""

from __future__ import annotations

import http.server
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.tiny_models import reference, write_model

from ttrain.errors import TTrainError, UsageError
from ttrain.export import serve
from ttrain.store.server_records import listens


def served(directory: Path, *, port: int = 0, options: Sequence[str] = ()) -> AbstractContextManager[Any]:
    return serve.served(
        reference(directory), program="ttrain.flows.endpoint", port=port, device="cpu", dtype="fp32", max_requests=1,
        options=options,
    )  # fmt: skip


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "NEEDED", ("json", "no_such_package"))
    with pytest.raises(UsageError, match=r"needs no_such_package; install with: pip install 'ttrain\[serve\]'"):
        serve.check()


def test_a_taken_port_and_options_that_open_the_server_to_the_network_are_refused_before_it_starts(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    with socket.socket() as taken:
        taken.bind((serve.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"--port is {port}, which is taken"), served(directory, port=port):
            pass
    for option in ("--host", "--host=0.0.0.0", "--port"):
        with pytest.raises(UsageError, match="listens on 127"), served(directory, options=[option]):
            pass


def test_a_shape_that_the_server_does_not_know_is_refused(tmp_path: Path) -> None:
    directory = write_model(tmp_path, kind="moyun")
    with pytest.raises(UsageError, match="MoyunForCausalLM, which transformers serve does not know"), served(directory):
        pass


@pytest.mark.parametrize(
    ("status", "told"), [(200, "ttrain's guard is not in front of it"), (401, "port {} was taken by another program")]
)
def test_a_server_without_the_guard_is_not_left_running_and_another_program_is_not_taken_for_it(
    status: int, told: str
) -> None:
    """The other program may answer as the guard does; clients would show it their key."""

    class Answering(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *unused: Any) -> None:
            """Say nothing."""

    with http.server.HTTPServer((serve.HOST, 0), Answering) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            with pytest.raises(TTrainError, match=told.format(server.server_port)):
                serve.wait_until_ready(server.server_port, process)
            process.communicate(b"\n")
        assert listens(psutil.Process(), server.server_port), "the process that has the port"
