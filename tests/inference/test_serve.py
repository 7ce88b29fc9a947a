"""`ttrain serve`: OpenAI's own client, what is refused, and the page in a browser."""

import json
import os
import re
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

TOKEN, CONTEXT = "secret", 64
QUESTION: Any = [{"role": "user", "content": "What is a list?"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class Served:
    def __init__(self, directory: Path, **settings: Any) -> None:
        self.pairs = directory / "preferences.jsonl"
        self.models = {
            "sft": speaker(write_model(directory / "sft", max_length=CONTEXT)),
            "dpo": speaker(write_model(directory / "dpo", seed=2, max_length=CONTEXT)),
            "endless": ending_with(speaker(write_model(directory / "endless", max_length=200_000))),
        }
        self.queue = AnswerQueue(self._load, **{"max_requests": 4, **settings})
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        endpoint = Endpoint(self.queue, lambda: ["sft", "dpo"], self.pairs)
        app = Guard(endpoint.application(), listener.getsockname()[1], TOKEN)
        self._server = uvicorn.Server(
            uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
        )
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, daemon=True
        )
        self._thread.start()

    def _load(self, name: str) -> LoadedModel:
        if name not in self.models:
            raise UsageError(f"there is no model '{name}'")
        return self.models[name]

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key=TOKEN, **options)

    def post(self, path: str, body: Any) -> httpx.Response:
        data = body if isinstance(body, bytes) else json.dumps(body)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return httpx.post(self.address + path, content=data, headers=headers, timeout=60)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()
        self.queue.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("served"))
    yield made
    made.stop()


def chat_answer(model: LoadedModel, tokens: int) -> str:
    ids = prompt_ids(model.encoder, (Message("user", QUESTION[0]["content"]),))
    (answer,) = generate(model, [ids], Sampling(max_tokens=tokens))
    return completion_text(model.encoder, answer)


def test_openais_client_gets_the_answer_of_the_chat_whole_and_in_pieces(served: Served) -> None:
    client = served.client()
    assert [model.id for model in client.models.list()] == ["sft", "dpo"]
    for name in ("sft", "dpo"):
        asked: Any = {"model": name, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
        whole = client.chat.completions.create(**asked)
        expected = chat_answer(served.models[name], 12)
        assert whole.choices[0].message.content == expected
        assert whole.usage.completion_tokens == 12 and whole.choices[0].finish_reason == "length"
        stream = client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        *pieces, last = stream
        assert "".join(piece.choices[0].delta.content for piece in pieces) == expected
        assert len(pieces) > 2 and last.usage == whole.usage


def test_texts_are_continued_several_at_once_and_several_times(served: Served) -> None:
    model = served.models["sft"]
    texts = ["What is", "a list of three"]
    ids = [[*model.begin_ids, *model.encoder.encode([text])[0]] for text in texts]
    asked: Any = {
        "model": "sft",
        "prompt": texts,
        "n": 2,
        "max_tokens": 6,
        "temperature": 1,
        "seed": 5,
    }
    done = served.client().completions.create(**asked)
    warm = Sampling(max_tokens=6, temperature=1, seed=5)
    answers = [
        generate(model, [prompt], warm, numbers=[number])[0]
        for prompt in ids
        for number in range(2)
    ]
    assert [choice.text for choice in done.choices] == [
        completion_text(model.encoder, answer) for answer in answers
    ]
    assert done.usage is not None and done.usage.prompt_tokens == sum(map(len, ids))
    unseeded = {**asked, "seed": None}
    assert served.client().completions.create(**unseeded) != served.client().completions.create(
        **unseeded
    )


def test_an_answer_ends_before_a_stop_sequence_also_in_a_stream(served: Served) -> None:
    free = chat_answer(served.models["sft"], 12)
    stop = free[4:6]
    asked: Any = {
        "model": "sft",
        "messages": QUESTION,
        "max_tokens": 12,
        "temperature": 0,
        "stop": stop,
    }
    whole = served.client().chat.completions.create(**asked).choices[0]
    assert (whole.message.content, whole.finish_reason) == (free[: free.index(stop)], "stop")
    pieces = served.client().chat.completions.create(**asked, stream=True)
    assert (
        "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.message.content
    )


WRONG: list[tuple[str, Any, int, str]] = [
    (CHAT, {"messages": QUESTION, "max_tokens": 10**9}, 400, "set max_tokens to at most"),
    (
        CHAT,
        {"messages": QUESTION, "max_completion_tokens": CONTEXT},
        400,
        f"the model's context holds {CONTEXT}",
    ),
    (
        CHAT,
        {"messages": QUESTION, "temperature": -1},
        400,
        "temperature is -1 but must be at least 0",
    ),
    (CHAT, b"{", 400, "JSON"),
    (CHAT, {"messages": QUESTION, "model": "mine"}, 404, "there is no model 'mine'"),
    (
        "/preferences",
        {"prompt": QUESTION, "chosen": "a", "rejected": "a"},
        400,
        "'chosen' and 'rejected' are equal",
    ),
]


@pytest.mark.parametrize(("path", "body", "status", "message"), WRONG)
def test_a_wrong_request_is_refused_with_its_field_and_the_rule(
    served: Served, path: str, body: Any, status: int, message: str
) -> None:
    answer = served.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (status, "invalid_request_error")
    assert message in error["message"]
    assert not served.pairs.exists()


def test_what_a_model_raises_is_an_error_also_in_a_stream(served: Served, monkeypatch: Any) -> None:
    def fail(*unused: Any, **options: Any) -> None:
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr("ttrain.inference.answer_queue.generate", fail)
    asked: Any = {"model": "sft", "prompt": "a"}
    client = served.client(max_retries=0)
    with pytest.raises(openai.InternalServerError, match="out of memory"):
        client.completions.create(**asked)
    with pytest.raises(openai.APIError, match="out of memory"):
        list(client.completions.create(**asked, stream=True))


def test_an_answer_ends_with_its_client_and_more_than_the_bound_are_told_to_come_back(
    served: Served,
) -> None:
    client = served.client(max_retries=0)
    endless: Any = {"model": "endless", "prompt": "a", "max_tokens": 100_000, "stream": True}
    streams = [client.completions.create(**endless) for _ in range(4)]
    with pytest.raises(openai.RateLimitError, match="4 requests are answered or wait") as refused:
        client.completions.create(model="sft", prompt="a")
    assert refused.value.response.headers["Retry-After"] == "1"
    for stream in streams:
        stream.close()
    wait_until(lambda: served.queue.requests < 4, 20)
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(**{**endless, "stream": False}, timeout=1)
    wait_until(lambda: not served.queue.requests, 20)
    answer = client.completions.create(model="sft", prompt="a", max_tokens=2)
    assert answer.choices[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 0)])
def test_the_command_serves_models_by_name_and_ends_within_an_answer(
    tmp_path: Path, number: int, code: int
) -> None:
    first, second = (
        write_model(tmp_path / name, max_length=200_000) for name in ("first", "second")
    )
    arguments = ["serve", str(first), "--port", "0", "--device", "cpu", "--json"]
    environment = {**os.environ, "TTRAIN_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "ttrain", *arguments]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        printed = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
        key = Path(printed["api_key_file"])
        assert key.stat().st_mode & 0o077 == 0
        client = openai.OpenAI(
            base_url=printed["url"], api_key=key.read_text().strip(), max_retries=0
        )
        assert [model.id for model in client.models.list()] == [str(first)]
        stream = client.completions.create(
            model=str(second), prompt="a", max_tokens=100_000, stream=True
        )
        assert next(iter(stream)).model == str(second)
        process.send_signal(number)
        assert process.wait(20) == code


@pytest.mark.skipif(executable() is None, reason="no Chromium is installed")
def test_the_page_talks_to_two_models_and_keeps_the_verdict_by_the_keyboard(served: Served) -> None:
    served.pairs.unlink(missing_ok=True)
    with Browser(width=1600, height=900) as page:
        page.open(f"{served.address}/?token={TOKEN}")
        page.wait_for("document.querySelectorAll('#first option').length === 2")
        fields = {"second": "dpo", "max_tokens": 9, "temperature": 0}
        for name, value in fields.items():
            page.evaluate(f"document.getElementById('{name}').value = '{value}'")
        page.send("Input.insertText", text="What is a list?")
        press(page, "Enter")
        page.wait_for("document.querySelectorAll('.verdict button').length === 3")
        for shown in page.evaluate(
            "[...document.querySelectorAll('.stats')].map(e => e.textContent)"
        ):
            assert re.fullmatch(r"9 tokens, \d+ tokens a second; cut at the longest answer", shown)
        press(page, "Digit2", alt=True)
        page.wait_for("document.getElementById('status').textContent.includes('preferences.jsonl')")
        (row,) = kept_pairs(served.pairs)
        texts = page.evaluate("[...document.querySelectorAll('.text')].map(e => e.textContent)")
        assert (row["rejected"], row["chosen"]) == tuple(texts)
        assert row["prompt"] == QUESTION and (row["rejected_model"], row["chosen_model"]) == (
            "sft",
            "dpo",
        )
        page.send("Input.insertText", text="Why?")
        press(page, "Enter")
        page.wait_for("document.querySelectorAll('.verdict').length === 2")
        press(page, "Digit0", alt=True)
        page.wait_for("document.getElementById('status').textContent.includes('preferences.jsonl')")
        _, one, other = kept_pairs(served.pairs)
        assert [turn["content"] for turn in one["prompt"]] == ["What is a list?", texts[1], "Why?"]
        assert (one["chosen"], one["rejected"]) == (other["rejected"], other["chosen"])
        assert not page.errors
        assert all(address.startswith((served.address, "data:")) for address in page.requests)


@pytest.mark.skipif(executable() is None, reason="no Chromium is installed")
def test_the_page_stops_an_answer_and_fits_a_narrow_window(
    served: Served, monkeypatch: Any
) -> None:
    monkeypatch.setitem(served.queue._models, "sft", served.models["endless"])
    with Browser(width=400, height=800) as page:
        page.open(f"{served.address}/?token={TOKEN}")
        page.wait_for("document.querySelectorAll('#first option').length === 2")
        page.send("Input.insertText", text="Who?")
        press(page, "Enter")
        page.wait_for("document.querySelector('.stats')?.textContent.includes('a second')")
        press(page, "Escape")
        page.wait_for("document.querySelector('.stats').textContent.endsWith('; stopped')")
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
    wait_until(lambda: not served.queue.requests, 20)


def kept_pairs(path: Path) -> list[dict[str, Any]]:
    """The verdicts, all of which training reads."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(preference_of(row).chosen for row in rows) and path.stat().st_mode & 0o077 == 0
    return rows


def press(page: Browser, code: str, *, alt: bool = False) -> None:
    key = code.removeprefix("Digit")
    for kind in ("keyDown", "keyUp"):
        page.send("Input.dispatchKeyEvent", type=kind, code=code, key=key, modifiers=int(alt))
