"""What is said before a server starts; that one answers a real client stands in tests/faults/test_serve.py."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from talking import reference, write_model

from ttrain.errors import UsageError
from ttrain.talk import serving


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "NEEDED", ("json", "no_such_package"))
    with pytest.raises(UsageError, match=r"needs no_such_package; install with: pip install 'ttrain\[serve\]'"):
        serving.check()


def test_a_port_that_another_program_has_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind((serving.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"--port is {port}, which is taken"):
            with serving.served(reference(write_model(tmp_path)), port=port, device="cpu", dtype="fp32"):
                pass


@pytest.mark.parametrize("option", ["--host", "--host=0.0.0.0", "--port"])
def test_the_servers_own_options_cannot_open_it_to_the_network(option: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="listens on 127"):
        with serving.served(reference(write_model(tmp_path)), port=0, device="cpu", dtype="fp32", options=[option]):
            pass


def test_a_shape_that_the_server_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="MoyunForCausalLM, which transformers serve does not know"):
        with serving.served(reference(write_model(tmp_path, kind="moyun")), port=0, device="cpu", dtype="fp32"):
            pass
