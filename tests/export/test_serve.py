"""What a server refuses, and what ends a request. Its answers to real clients: tests/soak/test_serve_kills.py."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import write_model

from ttrain.export import prompt_tokens

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
CONTEXT = 64
QUESTION = [{"role": "user", "content": "What is a list?"}]
NO_END = {"3": -100, "8": -100}  # as many tokens as are asked for
ENDLESS = {"messages": QUESTION, "max_tokens": 10**6, "logit_bias": NO_END}
Answer = tuple[int, dict[str, Any] | str]


@pytest.fixture(scope="module", autouse=True)
def restored() -> Iterator[None]:
    """Other tests have transformers as it was: the application replaces what renders templates."""
    from transformers import processing_utils, tokenization_utils_base, tokenization_utils_tokenizers

    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (tokenization_utils_base, "render_jinja_template"),
            (processing_utils, "render_jinja_template"),
            (processing_utils, "_get_template_variables"),
            (tokenization_utils_tokenizers.TokenizersBackend, "_encode_plus"),
        ):
            patch.setattr(module, name, getattr(module, name))
        yield


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Makes the application of a model with a small context."""
    return applications(write_model(tmp_path_factory.mktemp("endpoint"), max_length=CONTEXT))


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Makes the application of a model whose context takes hours to fill."""
    return applications(write_model(tmp_path_factory.mktemp("endless"), max_length=2 * 10**6))


def applications(directory: Path) -> Callable[..., Any]:
    """Makes transformers' own application around the model, with our limits; no server process."""
    pytest.importorskip("fastapi")
    pytest.importorskip("openai")
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.response import ResponseHandler

    from ttrain.export import serve_process as server

    manager = ModelManager(device="cpu", dtype="float32", force_model=str(directory))

    def make(max_requests: int = 4) -> Any:
        state = server.LimitedGeneration()
        handlers = [kind(manager, state) for kind in (ChatCompletionHandler, CompletionHandler, ResponseHandler)]
        return server.application(manager, *handlers, None, None, generation_state=state, max_requests=max_requests)

    make.model = str(directory)  # type: ignore[attr-defined]
    return make


class Client:
    """One request to an ASGI application, whose client may leave before it is answered."""

    def __init__(self, app: Any, path: str, body: object, method: str = "POST") -> None:
        self._app, self._path, self._method = app, path, method
        self._body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._left = asyncio.Event()
        self.is_read = asyncio.Event()
        self.sent: list[MutableMapping[str, Any]] = []

    def leave(self) -> None:
        self._left.set()

    async def answer(self) -> Answer:
        """(status, JSON of the answer, or its text)."""
        asgi = {"version": "3.0", "spec_version": "2.3"}
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "asgi": asgi, "http_version": "1.1", "method": self._method, "path": self._path,
                 "raw_path": self._path.encode(), "query_string": b"", "headers": headers, "root_path": "", "scheme": "http",
                 "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 9)}  # fmt: skip
        await self._app(scope, self._receive, self._send)
        text = b"".join(message.get("body", b"") for message in self.sent).decode()
        is_json = text.startswith("{")
        return self.sent[0]["status"], json.loads(text) if is_json else text

    async def _receive(self) -> MutableMapping[str, Any]:
        if self.is_read.is_set():
            await self._left.wait()
            return {"type": "http.disconnect"}
        self.is_read.set()
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(message)


def ask(app: Any, path: str, body: object, method: str = "POST") -> Answer:
    return asyncio.run(Client(app, path, body, method).answer())


def message_of(answer: Answer) -> str:
    """What a refused client is told."""
    status, body = answer
    assert status == 400 and isinstance(body, dict)
    return str(body["error"]["message"])


@pytest.mark.parametrize(
    ("path", "request_body", "field", "is_streamed"),
    [
        (CHAT, {"messages": QUESTION}, "max_tokens", False),
        (CHAT, {"messages": QUESTION}, "max_completion_tokens", True),
        (TEXT, {"prompt": "What is a list?"}, "max_tokens", True),
        (RESPONSES, {"input": "What is a list?"}, "max_output_tokens", False),
        (RESPONSES, {"input": "What is a list?"}, "max_output_tokens", True),
    ],
)
def test_prompt_and_answer_beyond_the_context_are_refused_with_both_numbers(
    endpoint: Callable[..., Any], path: str, request_body: dict[str, Any], field: str, is_streamed: bool
) -> None:
    app, body = endpoint(), {**request_body, "stream": is_streamed}
    refusal = message_of(ask(app, path, {**body, field: 10**9}))
    words = refusal.split()
    prompt, room = int(words[3]), CONTEXT - int(words[3])
    assert refusal == (
        f"the prompt has {prompt} tokens and {field} is 1000000000, together {prompt + 10**9}, but the model's context "
        f"holds {CONTEXT}; set {field} to at most {room}, or shorten the prompt"
    )
    message_of(ask(app, path, {**body, field: room + 1}))
    assert ask(app, path, {**body, field: room})[0] == 200


def test_a_prompt_that_leaves_no_room_is_refused_whatever_is_asked_for(endpoint: Callable[..., Any]) -> None:
    for more in ({}, {"max_tokens": 1}, {"stream": True}):
        refusal = message_of(ask(endpoint(), TEXT, {"prompt": "xyz" * CONTEXT, **more}))
        assert f"the model's context of {CONTEXT} leaves no room for an answer" in refusal


async def longest_wait(task: asyncio.Task[Any]) -> float:
    """The longest time for which others did not get the event loop until the task was done, in seconds."""
    longest, previous = 0.0, time.monotonic()
    while not task.done():
        await asyncio.sleep(0.005)
        longest, previous = max(longest, time.monotonic() - previous), time.monotonic()
    return longest


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
def test_megabytes_are_refused_by_their_characters_while_others_are_answered(
    endpoint: Callable[..., Any], path: str
) -> None:
    text = "What is a list? " * 200_000
    body = {CHAT: {"messages": [{"role": "user", "content": text}]}, TEXT: {"prompt": text}, RESPONSES: {"input": text}}

    async def scenario() -> tuple[Answer, float]:
        task = asyncio.create_task(Client(endpoint(), path, body[path]).answer())
        longest = await longest_wait(task)
        return task.result(), longest

    ask(endpoint(), TEXT, {"prompt": "a", "max_tokens": 1})  # the model is loaded
    answer, longest = asyncio.run(scenario())
    assert re.search(
        rf"has 3,[\d,]+ characters, and the model's context of {CONTEXT} tokens holds at most \d", message_of(answer)
    )
    assert longest < 1


def test_a_long_prompt_is_tokenized_while_others_are_answered(
    endless: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:

    threads: list[threading.Thread] = []
    encode = prompt_tokens.transformers_encode

    def noted(*arguments: Any, **settings: Any) -> Any:
        threads.append(threading.current_thread())
        return encode(*arguments, **settings)

    monkeypatch.setattr(prompt_tokens, "transformers_encode", noted)
    for path, body in ((CHAT, {"messages": QUESTION}), (TEXT, {"prompt": "What is a list?"})):
        assert "together" in message_of(ask(endless(), path, {**body, "max_tokens": 10**9}))
    assert len(threads) == 2 and threading.main_thread() not in threads


def test_an_answer_of_no_length_that_was_asked_for_ends_with_the_context(endpoint: Callable[..., Any]) -> None:
    status, body = ask(endpoint(), CHAT, {"messages": QUESTION, "logit_bias": NO_END})
    assert status == 200 and isinstance(body, dict)
    assert body["usage"]["total_tokens"] == CONTEXT


# What a request asks besides its messages, and what its refusal says.
WRONG_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": -5}, "max_tokens is -5: must be at least 1"),
    ({"max_tokens": "many"}, 'max_tokens is "many": must be a whole number'),
    ({"temperature": -1}, "temperature is -1: must be at least 0"),
    ({"stop": ["x"] * 100}, "...: must have at most 16 entries"),
    ({"stop": 7}, "stop is 7: must be text or a list"),
    ({"stop": ""}, 'stop is "": must have 1 or more characters'),
    ({"max_tokens": True}, "max_tokens is true: must be a whole number"),
    ({"temperature": 1e-45}, "temperature is 1e-45: must be 0, or at least 0.01"),
    ({"logit_bias": {"3": 1e30}}, "logit_bias.3 is 1e+30: must be at most 100"),
    (
        {"generation_config": '{"repetition_penalty": 1e-45, "do_sample": true}'},
        "repetition_penalty is 1e-45: must be at least",
    ),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "not chat_template"),
    ({"generation_config": '{"num_beams": 1000}'}, "num_beams is 1000: cannot be set"),
    ({"generation_config": "{"}, "generation_config"),
    ({"generation_config": '{"max_new_tokens": 1000000}'}, "1000000, together"),
    ({"generation_config": '{"max_new_tokens": "x"}'}, "max_new_tokens"),
    ({"logit_bias": {"999999": 1}}, "vocabulary size"),
]
WRONG: list[tuple[str, object, str]] = [
    (CHAT, {"messages": "hi"}, 'messages is "hi": must be a list'),
    (CHAT, {"messages": []}, "messages is []: must have 1 or more entries"),
    (CHAT, {}, "messages is missing"),
    (CHAT, b"{", "the body of the request must be a JSON object: Expecting property name"),
    (CHAT, [1], "the body of the request must be a JSON object"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "content.0.type is"),
    (TEXT, {"prompt": ["a"]}, 'prompt is ["a"]: must be text'),
    (TEXT, {"prompt": "a", "max_tokens": -1}, "max_tokens is -1"),
    (RESPONSES, {"input": 7}, "input"),
    (RESPONSES, {"input": "a", "max_output_tokens": -1}, "max_output_tokens is -1"),
    *((CHAT, {"messages": QUESTION, **more}, expected) for more, expected in WRONG_CHATS),
]


def test_a_body_that_is_wrong_is_refused_with_its_field(endpoint: Callable[..., Any]) -> None:
    app = endpoint()
    for path, body, expected in WRONG:
        assert expected in message_of(ask(app, path, body)), body


def test_an_error_of_the_model_is_an_answer_and_a_line_of_the_log(
    endpoint: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ttrain.export import serve_process as server

    def fail(*unused: Any) -> None:
        raise RuntimeError("probability tensor contains inf\nand more")

    monkeypatch.setattr(server.ClientGone, "__call__", fail)
    status, body = ask(endpoint(), TEXT, {"prompt": "a", "max_tokens": 1})
    assert status == 500 and isinstance(body, dict)
    message = "could not be computed: RuntimeError: probability tensor contains inf"
    assert body["error"]["message"].endswith(message) and body["error"]["type"] == "server_error"
    (record,) = [record for record in caplog.records if record.name == server.__name__]
    assert record.getMessage().endswith(message) and record.exc_info is None


def test_routes_that_load_other_models_or_show_pages_are_not_there(endpoint: Callable[..., Any]) -> None:
    app = endpoint()
    for path in ("/v1/systemone", "/v1/audio/transcriptions", "/docs", "/openapi.json", "/load_model", "/reset"):
        assert [ask(app, path, {}, method)[0] for method in ("GET", "POST")] == [404, 404], path


def test_a_body_that_is_too_large_is_refused_before_it_is_read_whole(endpoint: Callable[..., Any]) -> None:
    status, body = ask(endpoint(), CHAT, b" " * (4 * 2**20 + 1))
    assert status == 413 and isinstance(body, dict)
    assert "more than 4,194,304 bytes" in body["error"]["message"]


def test_a_stream_ends_when_its_client_is_gone(endless: Callable[..., Any]) -> None:
    async def scenario() -> Answer:
        app = endless()
        client = Client(app, CHAT, {**ENDLESS, "stream": True})
        answering = asyncio.create_task(client.answer())
        await client.is_read.wait()
        client.leave()
        await asyncio.wait_for(answering, 30)
        return await asyncio.wait_for(Client(app, TEXT, {"prompt": "a", "max_tokens": 1}).answer(), 30)

    assert asyncio.run(scenario())[0] == 200


def test_more_requests_than_the_bound_are_told_to_come_back_until_clients_are_gone(endless: Callable[..., Any]) -> None:
    async def scenario() -> list[Answer]:
        app = endless(max_requests=2)
        clients = [Client(app, CHAT, ENDLESS) for _ in range(2)]
        answering = [asyncio.create_task(client.answer()) for client in clients]
        for client in clients:
            await client.is_read.wait()
        refused = Client(app, CHAT, ENDLESS)
        answers = [await refused.answer()]
        assert (b"retry-after", b"1") in refused.sent[0]["headers"]
        for client in clients:
            client.leave()
        await asyncio.wait_for(asyncio.gather(*answering), 30)
        return [*answers, await Client(app, TEXT, {"prompt": "a", "max_tokens": 1}).answer()]

    (status, refusal), (status_after, _) = asyncio.run(scenario())
    assert (status, status_after) == (429, 200) and isinstance(refusal, dict)
    assert "2 requests are being answered, as many as --max-requests allows" in refusal["error"]["message"]


# --- the model's own template -------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% set text = messages[-1]['content'] %}"
    "{% if text == 'raise' %}{{ raise_exception('no such role') }}{% endif %}"
    "{% for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor %}{{ mood }}{{ text }}"
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Makes the application of a model whose template goes wrong where a message asks for it."""
    directory = write_model(tmp_path_factory.mktemp("hostile"), max_length=CONTEXT)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return applications(directory)


def messages(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 2, **more}


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_what_a_template_does_wrong_is_told_and_the_next_request_is_answered(hostile: Callable[..., Any], path: str) -> None:
    def body(text: str) -> dict[str, Any]:
        return messages(text) if path == CHAT else {"input": text, "max_output_tokens": 2, "stream": False}

    app = hostile()
    assert "does not render this: no such role" in message_of(ask(app, path, body("raise")))
    assert ask(app, path, body("Hi"))[0] == 200


def test_a_template_gets_tools_and_variables_of_the_request(hostile: Callable[..., Any]) -> None:
    def prompt_tokens(**more: Any) -> int:
        status, body = ask(hostile(), CHAT, messages("Hi", **more))
        assert status == 200 and isinstance(body, dict)
        return int(body["usage"]["prompt_tokens"])

    tools = [{"type": "function", "function": {"name": "xyz" * 5, "parameters": {"type": "object", "properties": {}}}}]
    plain = prompt_tokens()
    assert prompt_tokens(tools=tools) > plain
    assert prompt_tokens(chat_template_kwargs={"mood": "xyz" * 5}) > plain
