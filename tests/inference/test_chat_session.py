"""Conversations: what the model is given, what commands do, what a pipe and a terminal show; and answers to files."""

import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.data_commands import Result, Run
from support.tiny_models import SHORT, chat_with, speaker, write_model

from ttrain.cli import chat_screen
from ttrain.data.chat import prompt_ids
from ttrain.data.chat_templates import Message
from ttrain.data.records import Conversation, parse_conversation
from ttrain.errors import DataError, UsageError
from ttrain.inference import generate
from ttrain.inference.loading import LoadedModel
from ttrain.inference.sampling import Sampling

QUESTIONS = ("Who?", "123 456", "def f(x): return x", "東京")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    found: list[list[int]] = []
    real = generate.generate

    def noting(
        speaker: LoadedModel, prompts: Sequence[Sequence[int]], *more: Any, **options: Any
    ) -> Any:
        found.extend(list(prompt) for prompt in prompts)
        return real(speaker, prompts, *more, **options)

    monkeypatch.setattr(generate, "generate", noting)
    return found


def test_the_model_is_given_system_prompt_history_and_question(
    one: LoadedModel, given: list[list[int]]
) -> None:
    chat = chat_with(one, system="Be brief.")
    first = chat.ask("Who?")
    chat.ask("Why?")
    texts = ("Be brief.", "Who?", first.text, "Why?")
    turns = tuple(map(Message, ("system", "user", "assistant", "user"), texts))
    assert given == [prompt_ids(one.encoder, turns[:2]), prompt_ids(one.encoder, turns)]
    chat.reset()
    assert chat.ask("Who?").text == first.text
    assert given[2] == given[0]


def test_the_oldest_exchanges_are_left_out_when_the_context_is_full(
    one: LoadedModel, given: list[list[int]]
) -> None:
    chat = chat_with(one, system="Stay.")
    lengths = (40, 45, 4, 45, 4, 40)
    forgotten = [
        chat.ask(f"{number} " + "x" * length).forgotten for number, length in enumerate(lengths)
    ]
    assert forgotten[0] == 0
    assert forgotten[-1] >= 4
    assert all(count % 2 == 0 for count in forgotten)
    assert all(len(ids) + SHORT.max_tokens <= 128 for ids in given)
    system = prompt_ids(one.encoder, (Message("system", "Stay."),))[:-1]
    assert all(ids[: len(system)] == system for ids in given)
    assert "5 xxx" in one.encoder.decode(given[-1])
    assert len(chat.messages) == 13  # nothing is lost of what can be saved
    with pytest.raises(DataError, match="the question has"):
        chat.ask("y" * 500)
    assert len(chat.messages) == 13


def test_ctrl_c_ends_the_answer_and_keeps_what_was_said(one: LoadedModel) -> None:
    heard: list[str] = []

    def stop(piece: str) -> None:
        heard.append(piece)
        if len(heard) == 2:
            raise KeyboardInterrupt

    chat = chat_with(one, sampling=Sampling(max_tokens=40, temperature=3.0))
    reply = chat.ask("Who?", stop)
    assert reply.stop == "interrupted"
    assert reply.text.startswith("".join(heard))
    assert chat.messages[-1].content == reply.text
    assert chat.ask("Why?").stop != "interrupted"


def test_commands_save_and_end_the_conversation(one: LoadedModel, tmp_path: Path) -> None:
    chat = chat_with(one)
    assert (
        chat_screen.run_command(f"/save {tmp_path / 'none'}", [chat])
        == "there is nothing to save yet"
    )
    chat.ask("Who?")
    for _ in range(2):
        chat_screen.run_command(f"/save {tmp_path / 'chat.jsonl'}", [chat])
    lines = (tmp_path / "chat.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert json.loads(lines[1])["messages"] == [message.to_json() for message in chat.messages]
    if chat.messages[-1].content.strip():
        assert parse_conversation(json.loads(lines[0])) == Conversation(tuple(chat.messages))
    with pytest.raises(UsageError, match="cannot write"):
        chat_screen.run_command(f"/save {tmp_path}", [chat])
    with pytest.raises(UsageError, match="no command /rest"):
        chat_screen.run_command("/rest", [chat])


Pipe = Callable[..., Result]


@pytest.fixture
def pipe(run: Run, monkeypatch: pytest.MonkeyPatch) -> Pipe:
    def ask(lines: bytes, *arguments: str | Path) -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
        return run("chat", *arguments, "--device", "cpu", "--max-tokens", "6", "--temperature", "0")

    return ask


def test_in_a_pipe_a_line_goes_in_and_an_answer_comes_out(
    one: LoadedModel, directory: Path, pipe: Pipe
) -> None:
    chat = chat_with(one)
    expected = [chat.ask(question).text for question in ("Who?", "/usr/bin?")]
    chat.reset()
    expected += [chat.ask(question).text for question in ("Who?", "你好")]
    lines = "Who?\n\n/usr/bin?\r\n/reset\nWho?\n你好".encode()
    done = pipe(lines, directory, "--json")
    found = [json.loads(line) for line in done.out.splitlines()]
    assert done.code == 0
    assert [reply["answer"] for reply in found] == expected
    assert [reply["question"] for reply in found] == ["Who?", "/usr/bin?", "Who?", "你好"]
    assert "你好" in done.out  # for eyes too
    assert {reply["stop"] for reply in found} <= {"length", "end"}
    assert "the conversation is forgotten" in done.err
    refused = pipe(
        b"\xef\xbb\xbfWho?\n" + "你好".encode("gb18030"), directory, "--json"
    )  # a byte order mark is no text
    assert refused.code == 1 and "line 2 of standard input is not valid UTF-8" in refused.err
    assert refused.json["question"] == "Who?"


def test_two_models_answer_side_by_side(directory: Path, tmp_path: Path, pipe: Pipe) -> None:
    other = write_model(tmp_path / "other", seed=2)
    reply = pipe(b"Who?\n", directory, "--versus", other, "--json").json
    answers = [chat_with(speaker(place)).ask("Who?").text for place in (directory, other)]
    assert [each["answer"] for each in reply["answers"]] == answers
    assert answers[0] != answers[1]
