"""`ttrain serve` and OpenAI's own client; the server ends with the command, however that ends."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.tiny_models import speaker, write_model
from support.waiting import wait_until

from ttrain.data.chat import prompt_ids
from ttrain.data.chat_templates import Message
from ttrain.inference.generate import generate
from ttrain.inference.sampling import Sampling

pytestmark = pytest.mark.soak
QUESTION = "What is a list?"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[dict[str, Any], subprocess.Popen[str], Path]]:
    """(what the command printed, its process, the model's directory)."""
    directory = write_model(tmp_path / "mine")
    code = "import sys; from ttrain.cli.main import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "serve", str(directory), "--port", "0", "--device", "cpu", "--json"]
    environment = {**os.environ, "TTRAIN_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        if line == "}\n":
            break
    try:
        yield json.loads(printed), process, directory
    finally:
        process.kill()
        process.wait()


def key_of(told: dict[str, Any]) -> str:
    """The key that the command's file holds, for its owner alone."""
    path = Path(told["api_key_file"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    return path.read_text().strip()


def test_the_client_gets_the_answer_that_the_chat_gives_whole_and_in_pieces(served: Any) -> None:
    openai = pytest.importorskip("openai")  # not at the top: whatever is collected would load it
    told, _, directory = served
    one = speaker(directory)
    ids = prompt_ids(one.encoder, (Message("user", QUESTION),))
    expected = one.encoder.decode(generate(one, [ids], Sampling(max_tokens=12))[0].ids)
    client = openai.OpenAI(base_url=told["url"], api_key=key_of(told))
    asked = {"model": told["model"], "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == expected
    assert whole.usage.prompt_tokens == len(ids)
    pieces = [piece.choices[0].delta.content for piece in client.chat.completions.create(**asked, stream=True)]
    assert "".join(piece for piece in pieces if piece) == expected
    assert [model.id for model in client.models.list()] == ["mine"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 0), (signal.SIGKILL, -9)])
def test_the_server_ends_with_the_command(served: Any, number: signal.Signals, code: int) -> None:
    told, process, _ = served
    process.send_signal(number)
    assert process.wait(20) == code
    wait_until(lambda: not psutil.pid_exists(told["pid"]), 10)
