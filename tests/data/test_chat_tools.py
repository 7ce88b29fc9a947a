"""Functions and their calls in chats: every form gives the same text, and a broken one is rejected with its reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.chat_turns import ADD, CALLED, SYSTEM, TALK, chat

from ttrain.data.chat_templates import Message
from ttrain.data.records import Conversation, Rejected, parse_conversation

ARGUMENTS = {"a": 1, "b": "é"}


def openai(arguments: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    turns = [
        {"role": "system", "content": "Be kind."}, {"role": "user", "content": "1+é?"},
        {"role": "assistant", "content": "Well.", "tool_calls": [call, call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"}, {"role": "assistant", "content": "2."},
    ]  # fmt: skip
    return {"messages": turns, "tools": [ADD, {"name": "sub"}]}


def minimind() -> dict[str, Any]:
    calls = json.dumps([{"name": "add", "arguments": ARGUMENTS}] * 2)
    turns = [
        {"role": "system", "content": "Be kind.", "tools": json.dumps([ADD, {"name": "sub"}])},
        {"role": "user", "content": "1+é?"}, {"role": "assistant", "content": "Well.", "tool_calls": calls},
        {"role": "tool", "content": "2"}, {"role": "assistant", "content": "2."},
    ]  # fmt: skip
    return {"conversations": turns}


@pytest.mark.parametrize(
    "row",
    [openai(ARGUMENTS), openai('{"a": 1, "b": "é"}'), minimind(), {**minimind(), "tools": None}],
    ids=["arguments as an object", "arguments as text", "MiniMind", "null beside"],
)
def test_every_form_of_functions_and_calls_gives_the_same_text(row: dict[str, Any]) -> None:
    assert parse_conversation(row) == TALK


def test_sharegpt_calls_are_turns_of_their_own() -> None:
    call = {"from": "function_call", "value": json.dumps({"name": "add", "arguments": ARGUMENTS}, ensure_ascii=False)}
    row = {
        "conversations": [
            {"from": "human", "value": "1+é?"}, call, {"from": "observation", "value": "2"}, {"from": "gpt", "value": "2."},
        ],
        "tools": json.dumps([ADD, {"name": "sub"}]), "system": "Be kind.",
    }  # fmt: skip
    expected = (TALK.messages[0], TALK.messages[1], Message("assistant", CALLED), *TALK.messages[3:])
    assert parse_conversation(row) == Conversation(expected)
    call["value"] = f"[{call['value']}, {call['value']}]"
    expected = (*expected[:2], Message("assistant", f"{CALLED}\n{CALLED}"), *TALK.messages[3:])
    assert parse_conversation(row) == Conversation(expected)


def test_functions_without_a_system_turn_make_one() -> None:
    row = openai(ARGUMENTS)
    row["messages"][0]["content"] = ""
    parsed = parse_conversation(row)
    del row["messages"][0]
    assert parsed == parse_conversation(row) == Conversation((Message("system", SYSTEM), *TALK.messages[1:]))


def test_arguments_as_text_stay_as_they_are_written() -> None:
    for arguments in ('{ "a":1,\n "a": 2 }', '{"x": "\\u00e9 </tool_call>"}', "{}"):
        call = {"function": {"name": 'a"b', "arguments": arguments}}
        parsed = parse_conversation({"messages": [{"role": "assistant", "tool_calls": [call]}]})
        text = f'<tool_call>\n{{"name": "a\\"b", "arguments": {arguments}}}\n</tool_call>'
        assert parsed == Conversation((Message("assistant", text),))


def test_a_call_is_an_answer_also_where_nothing_is_said() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for content in ({"content": None}, {"content": ""}, {}):
        turn = {"role": "assistant", **content, "tool_calls": [{"name": "f", "arguments": {}}]}
        assert parse_conversation({"messages": [turn]}) == Conversation((Message("assistant", text),))


def test_an_empty_text_for_functions_or_calls_is_none() -> None:
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2."}]
    plain = parse_conversation({"messages": turns})
    assert isinstance(plain, Conversation)
    exported = [{**turn, "tools": "", "tool_calls": " "} for turn in turns]
    assert parse_conversation({"messages": exported, "tools": ""}) == plain


def call(**changes: Any) -> dict[str, Any]:
    """An assistant's turn with one call."""
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "name": "f", "arguments": {}, **changes}]}


RESULT = {"role": "tool", "content": "2"}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (chat(RESULT, call()), "a tool turn without a call before it"),
        (chat(call(), {**RESULT, "tool_call_id": "2"}), "tool_call_id '2', which no call before it has"),
        (chat(call(), {**RESULT, "tool_call_id": ["1"]}), "which no call before it has"),
        (chat({**call(), "tool_calls": "f()"}), "'tool_calls': not valid JSON"),
        (chat({**call(), "tool_calls": '{"name": "f"}'}), "'tool_calls' is an object, not a list"),
        (chat({**call(), "tool_calls": ["f"]}), "a tool call is text, not an object"),
        (chat({**call(), "tool_calls": [{"function": "f"}]}), "a tool call has no name"),
        (chat(call(arguments="{not json")), "the arguments of a tool call: not valid JSON"),
        (chat(call(arguments="[1]")), "the arguments of a tool call are a list, not an object"),
        (chat({**call(), "role": "user", "content": "x"}), "'tool_calls' on a turn of role 'user'"),
        (chat({"from": "function_call", "value": "f()"}), "'function_call': not valid JSON"),
        (chat({"from": "function_call", "value": ""}), "'function_call': not valid JSON"),
        (chat({"from": "function_call", "value": None}), "'function_call' is null, not a list of calls"),
        (chat(tools="{broken"), "'tools': not valid JSON"),
        (chat(tools={"name": "f"}), "'tools' is an object, not a list"),
        (chat(tools=[{"type": "function"}]), "a tool has no name"),
        (chat(tools=["f"]), "a tool is text, not an object"),
        (chat({"role": "user", "content": "s", "tools": [ADD]}), "'tools' on a turn of role 'user'; write it beside"),
        (chat({"role": "system", "content": "s", "tools": [ADD]}, tools=[ADD]), "'tools' both beside the turns and on"),
    ],
)
def test_broken_calls_are_rejected_with_their_reason(row: dict[str, Any], reason: str) -> None:
    parsed = parse_conversation(row)
    assert isinstance(parsed, Rejected)
    assert reason in parsed.reason


def test_arguments_nested_without_end_are_rejected() -> None:
    nested: Any = {}
    for _ in range(2000):
        nested = {"a": nested}
    assert parse_conversation(chat(call(arguments=nested))) == Rejected(
        "the functions or the arguments of a call are nested too deeply"
    )
    assert isinstance(parse_conversation(chat(call(arguments='{"a":' * 2000 + "1" + "}" * 2000))), Rejected)
