"""Conversations: the prompts that the model gets, commands, and the answers in a pipe."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.data_commands import Result, Run
from support.tiny_models import SHORT, chat_with, speaker, write_model

from ttrain.cli import chat_screen
from ttrain.data.chat import prompt_ids
from ttrain.data.chat_templates import Message
from ttrain.errors import DataError, UsageError
from ttrain.inference import generate
from ttrain.inference.loading import LoadedModel
from ttrain.inference.sampling import Sampling


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The prompts that models get."""
    prompts: list[list[int]] = []
    real = generate.generate

    def noting(model: LoadedModel, batch: Any, *arguments: Any, **options: Any) -> Any:
        prompts.extend(map(list, batch))
        return real(model, batch, *arguments, **options)

    monkeypatch.setattr(generate, "generate", noting)
    return prompts


def test_prompts_have_system_and_history(model: LoadedModel, prompts: list[list[int]]) -> None:
    chat = chat_with(model, system="Be brief.")
    first = chat.ask("Who?")
    chat.ask("Why?")
    chat.reset()
    assert chat.ask("Who?").text == first.text
    texts = ("Be brief.", "Who?", first.text, "Why?")
    turns = tuple(map(Message, ("system", "user", "assistant", "user"), texts))
    ids = prompt_ids(model.encoder, turns[:2])
    assert prompts == [ids, prompt_ids(model.encoder, turns), ids]


def test_a_full_context_loses_old_turns(model: LoadedModel, prompts: list[list[int]]) -> None:
    chat = chat_with(model, system="Stay.")
    questions = [f"{at} " + "x" * length for at, length in enumerate((40, 45, 4, 45, 4, 40))]
    forgotten = [chat.ask(question).forgotten for question in questions]
    assert forgotten[0] == 0 < 4 <= forgotten[-1]
    assert all(len(ids) + SHORT.max_tokens <= 128 for ids in prompts)
    system = prompt_ids(model.encoder, (Message("system", "Stay."),))[:-1]
    assert all(ids[: len(system)] == system for ids in prompts)
    with pytest.raises(DataError):
        chat.ask("y" * 500)
    assert len(chat.messages) == 13  # all of them can be saved


def test_ctrl_c_ends_the_answer_and_keeps_its_beginning(model: LoadedModel) -> None:
    pieces: list[str] = []

    def stop(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 2:
            raise KeyboardInterrupt

    chat = chat_with(model, sampling=Sampling(max_tokens=40, temperature=3.0))
    reply = chat.ask("Who?", stop)
    assert reply.stop == "interrupted" and reply.text.startswith("".join(pieces))
    assert chat.messages[-1].content == reply.text


def test_commands_save_the_conversation(model: LoadedModel, tmp_path: Path) -> None:
    chat = chat_with(model)
    path = tmp_path / "chat.jsonl"
    chat.ask("Who?")
    for _ in range(2):
        chat_screen.run_command(f"/save {path}", [chat])
    row = {"messages": [message.to_json() for message in chat.messages]}
    assert [json.loads(line) for line in path.read_text().splitlines()] == [row, row]
    with pytest.raises(UsageError, match="/rest"):
        chat_screen.run_command("/rest", [chat])


@pytest.fixture
def pipe(run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    def ask(lines: bytes, *arguments: str | Path) -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
        options = ("--device", "cpu", "--max-tokens", "6", "--temperature", "0", "--json")
        return run("chat", *arguments, *options)

    return ask


def test_two_models_in_a_pipe(directory: Path, tmp_path: Path, pipe: Callable[..., Result]) -> None:
    second = write_model(tmp_path / "second", seed=2)
    chats = [chat_with(speaker(path)) for path in (directory, second)]
    questions = ("Who?", "/usr/bin?")
    expected = [(question, [chat.ask(question).text for chat in chats]) for question in questions]
    for chat in chats:
        chat.reset()
    expected.append(("你好", [chat.ask("你好").text for chat in chats]))
    lines = "Who?\n\n/usr/bin?\r\n/reset\n你好".encode()
    replies = map(json.loads, pipe(lines, directory, "--versus", second).out.splitlines())
    answers = [
        (reply["question"], [answer["answer"] for answer in reply["answers"]]) for reply in replies
    ]
    assert answers == expected
    refused = pipe(b"\xef\xbb\xbfWho?\n" + "你好".encode("gb18030"), directory)
    assert (refused.code, "line 2 " in refused.err) == (1, True)
