"""`ttrain serve`: OpenAI's own client, refused requests, and the page in a browser."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from support.browser import Browser, executable
from support.tiny_models import ending_with, speaker, write_model
from support.waiting import wait_until

from ttrain.data.chat import prompt_ids
from ttrain.data.chat_templates import Message
from ttrain.data.preferences import preference_of
from ttrain.errors import UsageError
from ttrain.flows.guard import Guard
from ttrain.inference.answer_queue import AnswerQueue
from ttrain.inference.generate import completion_text, generate
from ttrain.inference.loading import LoadedModel
from ttrain.inference.sampling import Sampling
from ttrain.inference.serve import Endpoint

TOKEN = "secret"
CONTEXT = 64
QUESTION: Any = [{"role": "user", "content": "What is a list?"}]
CHAT: Any = {"messages": QUESTION, "max_tokens": 12, "temperature": 0}
SAVED = "document.getElementById('status').textContent.includes('preferences.jsonl')"
WRONG: list[tuple[str, Any, int, str]] = [
    ("/v1/chat/completions", {**CHAT, "max_tokens": 10**9}, 400, "max_tokens to at most"),
    ("/v1/chat/completions", {**CHAT, "max_completion_tokens": CONTEXT}, 400, f"{CONTEXT}"),
    ("/v1/chat/completions", {**CHAT, "temperature": -1}, 400, "temperature is -1"),
    ("/v1/chat/completions", b"{", 400, "JSON"),
    ("/v1/chat/completions", {**CHAT, "model": "mine"}, 404, "'mine'"),
    ("/preferences", {"prompt": QUESTION, "chosen": "a", "rejected": "a"}, 400, "'rejected'"),
]

in_a_browser = pytest.mark.skipif(executable() is None, reason="no Chromium is installed")


class Served:
    """The endpoint in a thread: two models of a short context, and one that answers for ever."""

    def __init__(self, directory: Path) -> None:
        self.pairs = directory / "preferences.jsonl"
        endless = write_model(directory / "endless", max_length=200_000)
        self.models = {
            "sft": speaker(write_model(directory / "sft", max_length=CONTEXT)),
            "dpo": speaker(write_model(directory / "dpo", seed=2, max_length=CONTEXT)),
            "endless": ending_with(speaker(endless)),
        }
        self.listed = ["sft", "dpo"]
        self.queue = AnswerQueue(self.load, max_requests=4)
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        endpoint = Endpoint(self.queue, lambda: self.listed, self.pairs)
        app = Guard(endpoint.application(), port, TOKEN)
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        sockets = {"sockets": [listener]}
        self.thread = threading.Thread(target=self.server.run, kwargs=sockets, daemon=True)
        self.thread.start()

    def load(self, name: str) -> LoadedModel:
        if name not in self.models:
            raise UsageError(f"there is no model '{name}'")
        return self.models[name]

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key=TOKEN, **options)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()
        self.queue.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("served"))
    yield served
    served.stop()


def chat_answer(model: LoadedModel, tokens: int) -> str:
    ids = prompt_ids(model.encoder, (Message("user", QUESTION[0]["content"]),))
    (answer,) = generate(model, [ids], Sampling(max_tokens=tokens))
    return completion_text(model.encoder, answer)


def test_openais_client_gets_the_answer_of_the_chat_complete_and_in_pieces(served: Served) -> None:
    client = served.client()
    assert [model.id for model in client.models.list()] == ["sft", "dpo"]
    for name in ("sft", "dpo"):
        complete = client.chat.completions.create(model=name, **CHAT)
        (choice,) = complete.choices
        expected = chat_answer(served.models[name], 12)
        assert (choice.message.content, choice.finish_reason) == (expected, "length")
        assert complete.usage.completion_tokens == 12
        with_usage: Any = {"stream": True, "stream_options": {"include_usage": True}}
        *pieces, last = client.chat.completions.create(model=name, **CHAT, **with_usage)
        assert "".join(piece.choices[0].delta.content for piece in pieces) == expected
        assert len(pieces) > 2
        assert last.usage == complete.usage


def test_an_answer_ends_before_a_stop_sequence(served: Served) -> None:
    unlimited = chat_answer(served.models["sft"], 12)
    stop = unlimited[4:6]
    request: Any = {"model": "sft", **CHAT, "stop": stop, "stream": True}
    pieces = [each.choices[0] for each in served.client().chat.completions.create(**request)]
    text = "".join(piece.delta.content or "" for piece in pieces)
    assert (text, pieces[-1].finish_reason) == (unlimited[: unlimited.index(stop)], "stop")


@pytest.mark.parametrize(("path", "body", "status", "message"), WRONG)
def test_a_wrong_request(served: Served, path: str, body: Any, status: int, message: str) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = httpx.post(served.address + path, content=data, headers=headers, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (status, "invalid_request_error")
    assert message in error["message"]
    assert not served.pairs.exists()


def test_an_answer_ends_with_its_client_and_requests_are_bounded(served: Served) -> None:
    create = served.client(max_retries=0).completions.create
    endless: Any = {"model": "endless", "prompt": "a", "max_tokens": 100_000}
    streams = [create(**endless, stream=True) for _ in range(4)]
    for name in ("endless", "not loaded"):
        with pytest.raises(openai.RateLimitError) as refused:
            create(**{**endless, "model": name})
        assert refused.value.response.headers["Retry-After"] == "1"
    for stream in streams:
        stream.close()
    wait_until(lambda: served.queue.requests < 4)
    with pytest.raises(openai.APITimeoutError):
        create(**endless, timeout=1)
    wait_until(lambda: not served.queue.requests)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 0)])
def test_the_command_ends_within_an_answer(tmp_path: Path, signum: int, code: int) -> None:
    first = str(write_model(tmp_path / "first", max_length=200_000))
    options = ["--port", "0", "--device", "cpu", "--json"]
    program = [sys.executable, "-m", "ttrain", "serve", first, *options]
    environment = {**os.environ, "TTRAIN_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        printed = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
        key = Path(printed["api_key_file"])
        assert key.stat().st_mode & 0o077 == 0
        client = openai.OpenAI(base_url=printed["url"], api_key=key.read_text().strip())
        endless: Any = {"prompt": "a", "max_tokens": 100_000, "stream": True}
        stream = client.completions.create(model=first, **endless)
        assert next(iter(stream)).model == first
        process.send_signal(signum)
        assert process.wait(20) == code


@in_a_browser
def test_the_page_compares_two_models_and_saves_the_verdict_by_the_keyboard(served: Served) -> None:
    with Browser() as page:
        open_page(page, served)
        for name, value in {"second": "dpo", "max_tokens": 9, "temperature": 0}.items():
            page.evaluate(f"document.getElementById('{name}').value = '{value}'")
        ask(page, "What is a list?")
        page.wait_for("document.querySelectorAll('.verdict button').length === 3")
        press(page, "Digit2", alt=True)
        page.wait_for(SAVED)
        first, second = texts_of(page, ".text")
        (row,) = saved_pairs(served.pairs)
        assert (row["rejected"], row["chosen"], row["prompt"]) == (first, second, QUESTION)
        assert (row["rejected_model"], row["chosen_model"]) == ("sft", "dpo")
        ask(page, "Why?")
        page.wait_for("document.querySelectorAll('.verdict').length === 2")
        press(page, "Digit0", alt=True)
        page.wait_for(SAVED)
        _, either, reverse = saved_pairs(served.pairs)
        contents = [turn["content"] for turn in either["prompt"]]
        assert contents == ["What is a list?", second, "Why?"]
        assert (either["chosen"], either["rejected"]) == (reverse["rejected"], reverse["chosen"])
        assert not page.errors
        assert all(address.startswith((served.address, "data:")) for address in page.requests)


@in_a_browser
def test_the_page_stops_an_answer(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "listed", ["endless", "dpo"])
    with Browser() as page:
        open_page(page, served)
        ask(page, "Who?")
        page.wait_for("document.querySelector('.stats')?.textContent.includes('a second')")
        press(page, "Escape")
        page.wait_for("document.querySelector('.stats').textContent.endsWith('; stopped')")
    wait_until(lambda: not served.queue.requests)


def open_page(page: Browser, served: Served) -> None:
    page.open(f"{served.address}/?token={TOKEN}")
    page.wait_for("document.querySelectorAll('#first option').length === 2")


def ask(page: Browser, question: str) -> None:
    page.send("Input.insertText", text=question)
    press(page, "Enter")


def press(page: Browser, code: str, *, alt: bool = False) -> None:
    key = code.removeprefix("Digit")
    for kind in ("keyDown", "keyUp"):
        page.send("Input.dispatchKeyEvent", type=kind, code=code, key=key, modifiers=int(alt))


def texts_of(page: Browser, selector: str) -> Any:
    return page.evaluate(f"[...document.querySelectorAll('{selector}')].map(e => e.textContent)")


def saved_pairs(path: Path) -> list[dict[str, Any]]:
    """The verdicts, all of which training reads."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(preference_of(row).chosen for row in rows)
    assert path.stat().st_mode & 0o077 == 0
    return rows
