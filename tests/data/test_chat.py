"""Chats as ids with a loss mask: equal to what transformers makes of the template, and proof against forged markers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from ttrain.data import tokenizer
from ttrain.data.chat import encode_chat, encode_chats, prompt_ids
from ttrain.data.chat_templates import Message
from ttrain.data.encoder import Encoder
from ttrain.data.jinja_templates import ROLES
from ttrain.data.records import Conversation, parse_conversation
from ttrain.errors import DataError

NAMES = {"system": "System：", "user": "User：", "assistant": "Assistant：", "tool": "Tool："}

PIECES = (
    "the fox", " jumps", "\n", "  ", "über", "日本語", "\u3000", "🙂", "e\u0301", "{{ x }}", "{% if %}", "<", "|>", "",
)  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(tokenizer.train(["the quick brown fox jumps over the lazy dog"] * 20, 320), path)
    return path


@pytest.fixture(scope="module")
def fox_encoder(directory: Path) -> Encoder:
    return Encoder(directory)


@pytest.fixture(scope="module")
def opened(directory: Path) -> Any:
    """The same tokenizer, as transformers sees it."""
    return in_transformers(directory)


@pytest.fixture(scope="module")
def tinyseek(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    path = tmp_path_factory.mktemp("tinyseek")
    tokenizer.save(tokenizer.train(["the quick brown fox jumps over the lazy dog"] * 20, 320, "tinyseek"), path, "tinyseek")
    return Encoder(path)


def in_transformers(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def random_chat(chance: random.Random) -> tuple[Message, ...]:
    """Any roles in any order, with at least one answer."""
    turns = chance.choices(ROLES, k=chance.randint(0, 6))
    turns.insert(chance.randint(0, len(turns)), "assistant")
    return tuple(Message(role, "".join(chance.choices(PIECES, k=chance.randint(0, 6)))) for role in turns)


def as_dicts(messages: tuple[Message, ...]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def test_ids_and_mask_equal_what_transformers_renders_from_the_template(fox_encoder: Encoder, opened: Any) -> None:
    chance = random.Random(1)
    for _ in range(50):
        messages = random_chat(chance)
        rendered = opened.apply_chat_template(
            as_dicts(messages), return_assistant_tokens_mask=True, return_dict=True, tokenize=True
        )
        ids, live = encode_chat(fox_encoder, messages)
        assert ids == rendered["input_ids"], messages
        assert [int(token) for token in live] == rendered["assistant_masks"], messages
        rendered = opened.apply_chat_template(as_dicts(messages), add_generation_prompt=True, return_dict=True)
        assert prompt_ids(fox_encoder, messages) == rendered["input_ids"]


def test_the_live_tokens_are_the_answers_and_what_stops_each(fox_encoder: Encoder) -> None:
    chance, end = random.Random(3), fox_encoder.end_id
    for _ in range(50):
        messages = random_chat(chance)
        ids, live = encode_chat(fox_encoder, messages)
        answers: list[list[int]] = [[]]
        for number, scored in zip(ids, live, strict=True):
            if scored:
                answers[-1].append(number)
                if number == end:
                    answers.append([])
        assert answers.pop() == []
        assert all(answer[-1] == end for answer in answers)
        expected = [message.content for message in messages if message.role == "assistant" and message.content.strip()]
        assert [fox_encoder.decode(answer) for answer in answers] == expected


def test_many_chats_are_encoded_as_each_alone(fox_encoder: Encoder, tinyseek: Encoder) -> None:
    chance = random.Random(4)
    talks = [random_chat(chance) for _ in range(40)]
    for opened in (fox_encoder, tinyseek):
        many = encode_chats(opened, talks)
        assert [(ids.tolist(), live.tolist()) for ids, live in many] == [encode_chat(opened, talk) for talk in talks]
        assert {(str(ids.dtype), str(live.dtype)) for ids, live in many} == {("uint32", "bool")}
        assert encode_chats(opened, []) == []


def test_an_answer_that_is_not_learnt_changes_the_mask_and_no_token(fox_encoder: Encoder, tinyseek: Encoder) -> None:
    turns = (Message("user", "the fox"), Message("assistant", "jumps"), Message("user", "and"), Message("assistant", "over"))
    context = (turns[0], Message("assistant", "jumps", in_loss=False), *turns[2:])
    for used in (fox_encoder, tinyseek):
        ids, live = encode_chat(used, turns)
        same_ids, fewer = encode_chat(used, context)
        assert same_ids == ids
        first = encode_chat(used, turns[:2])[1]
        assert fewer == [False] * len(first) + live[len(first) :]
        assert sum(fewer) == sum(live) - sum(first) > 0


def test_a_prompt_is_where_the_answer_begins_in_training(fox_encoder: Encoder, tinyseek: Encoder) -> None:
    chance = random.Random(5)
    for opened in (fox_encoder, tinyseek):
        for _ in range(10):
            talk = random_chat(chance)
            ids, live = encode_chat(opened, (*talk, Message("assistant", "the fox")))
            answer = len(opened.encode(["the fox"])[0]) + 1
            assert ids[:-answer] == prompt_ids(opened, talk)
            assert all(live[-answer:])


def tool_row() -> dict[str, Any]:
    arguments = ({"city": "Zürich", "days": [1, 2.5], "deep": {"<b>": None}}, '{ "city" : "東京" }')
    calls = [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": given}} for given in arguments]
    return {
        "messages": [
            {"role": "system", "content": "Be kind."}, {"role": "user", "content": "the weather?"},
            {"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "{}"},
            {"role": "assistant", "content": "Again.", "tool_calls": calls[:1]}, {"role": "tool", "content": "17 °C"},
            {"role": "assistant", "content": "17 °C & sunny"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "weather", "description": "das Wetter <in> 東京", "parameters": {
                "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}},
            {"type": "function", "function": {"name": "time"}},
        ],
    }  # fmt: skip


@pytest.mark.parametrize("first", [0, 1], ids=["with a system turn", "without"])
def test_functions_and_calls_are_what_transformers_renders_from_the_template(
    fox_encoder: Encoder, opened: Any, tinyseek: Encoder, first: int
) -> None:
    row = tool_row()
    row["messages"] = row["messages"][first:]
    parsed = parse_conversation(row)
    assert isinstance(parsed, Conversation)
    ids, live = encode_chat(fox_encoder, parsed.messages)
    rendered = opened.apply_chat_template(
        row["messages"], tools=row["tools"], return_assistant_tokens_mask=True, return_dict=True, tokenize=True
    )
    assert ids == rendered["input_ids"]
    assert [int(token) for token in live] == rendered["assistant_masks"]
    string = in_transformers(tinyseek.directory).apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
    assert string == as_string(tinyseek, encode_chat(tinyseek, parsed.messages)[0])


def as_string(encoder: Encoder, ids: list[int]) -> str:
    """With the special tokens in it."""
    return in_transformers(encoder.directory).decode(ids, skip_special_tokens=False)


def test_tinyseek_is_the_string_of_its_scripts(tinyseek: Encoder) -> None:
    turns = [
        {"role": "user", "content": "你好"}, {"role": "assistant", "content": "您好！\n"},
        {"role": "user", "content": "the fox?"}, {"role": "assistant", "content": "jumps"},
    ]  # fmt: skip
    messages = tuple(Message(turn["role"], turn["content"]) for turn in turns)
    golden = "User：你好\nAssistant：您好！\n<|im_end|>User：the fox?\nAssistant：jumps<|im_end|>"
    ids, live = encode_chat(tinyseek, messages)
    assert as_string(tinyseek, ids) == golden
    assert as_string(tinyseek, [number for number, alive in zip(ids, live, strict=True) if alive]) == (
        "您好！\n<|im_end|>jumps<|im_end|>"
    )
    opened = in_transformers(tinyseek.directory)
    assert opened.apply_chat_template(turns, tokenize=False) == golden
    assert opened.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True) == "User：你好\nAssistant："
    assert as_string(tinyseek, prompt_ids(tinyseek, messages[:1])) == "User：你好\nAssistant："
    pieces = ("User：", "你好", "\n", "Assistant：", "您好！\n")
    assert ids[: ids.index(tinyseek.end_id)] == [number for piece in tinyseek.encode(pieces) for number in piece]


def test_tinyseek_names_all_four_roles_and_its_mask_is_transformers(tinyseek: Encoder) -> None:
    opened, chance = in_transformers(tinyseek.directory), random.Random(6)
    for _ in range(20):
        messages = random_chat(chance)
        ends = {role: "<|im_end|>" if role == "assistant" else "\n" for role in ROLES}
        golden = "".join(NAMES[turn.role] + turn.content + ends[turn.role] for turn in messages)
        assert as_string(tinyseek, encode_chat(tinyseek, messages)[0]) == golden
        assert opened.apply_chat_template(as_dicts(messages), tokenize=False) == golden
    messages = (Message("user", "the"), Message("assistant", "fox"), Message("assistant", " "), Message("tool", "x"))
    rendered = opened.apply_chat_template(as_dicts(messages), return_assistant_tokens_mask=True, return_dict=True)
    ids, live = encode_chat(tinyseek, messages)
    assert (rendered["input_ids"], rendered["assistant_masks"]) == (ids, [int(alive) for alive in live])


def test_an_unknown_role_is_an_error_in_every_template(fox_encoder: Encoder, tinyseek: Encoder) -> None:
    for opened in (fox_encoder, tinyseek):
        with pytest.raises(DataError, match="unknown role 'User'"):
            encode_chats(opened, [(Message("User", "x"), Message("assistant", "y"))])
        with pytest.raises(Exception, match="unknown role User"):
            in_transformers(opened.directory).apply_chat_template([{"role": "User", "content": "x"}])


def test_a_small_chat_is_laid_out_by_hand(fox_encoder: Encoder) -> None:
    messages = (Message("system", "S"), Message("user", "U"), Message("assistant", "A"), Message("tool", "T"))
    letters = {letter: fox_encoder.encode([letter])[0] for letter in "SUAT"}
    end = fox_encoder.end_id
    ids, live = encode_chat(fox_encoder, messages)
    expected = [fox_encoder.bos_id]
    for message in messages:
        expected += [fox_encoder.special(f"<|{message.role}|>"), *letters[message.content], end]
    assert ids == expected
    assert live == [False] * 8 + [True, True] + [False] * 3
