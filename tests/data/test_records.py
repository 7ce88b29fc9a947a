"""Records: the shapes of chats that are known, functions and their calls, what is rejected, and the place by content."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttrain.data.chat_shapes import is_chat, unread_keys
from ttrain.data.chat_templates import Message, is_live
from ttrain.data.json_rows import Tally, parsed
from ttrain.data.records import (
    Conversation,
    Record,
    Rejected,
    Skipped,
    TextDocument,
    accepted,
    content_hash,
    document_fields,
    document_parser,
    heldout_share,
    kind_of_row,
    parse_conversation,
    position,
    split,
)

ADD = {"type": "function", "function": {"name": "add", "description": "à + b", "parameters": {}}}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
SYSTEM = (
    "You may call these functions; put each call as JSON between <tool_call> and </tool_call>.\n<tools>\n"
    '{"type": "function", "function": {"name": "add", "description": "à + b", "parameters": {}}}\n{"name": "sub"}\n</tools>'
)
TALK = Conversation(
    (
        Message("system", f"Be kind.\n\n{SYSTEM}"),
        Message("user", "1+é?"),
        Message("assistant", f"Well.\n{CALLED}\n{CALLED}"),
        Message("tool", "2"),
        Message("assistant", "2."),
    )
)

HELLO = Conversation((Message("user", "Hi"), Message("assistant", "Hello")))


def parsed_with(weight: Any) -> tuple[list[Any], dict[str, int], dict[str, int]]:
    """The records of a document with this weight, and what was skipped and rejected."""
    tally, rows = Tally(), [("a", 1, {"text": "x", "weight": weight})]
    found = [record for _, record in accepted(rows, document_parser("text"), tally)]
    return found, dict(tally.skipped), dict(tally.rejected)


def test_a_row_has_a_weight_that_is_a_number_or_is_rejected_with_the_reason() -> None:
    for weight, expected in ((9, 9.0), (0.5, 0.5), (1, 1.0), (None, 1.0)):
        assert parsed_with(weight) == ([TextDocument("x", weight=expected)], {}, {})
    assert parsed_with(0) == ([], {"weight 0": 1}, {})
    reasons = {
        -1: "negative",
        math.nan: "not finite",
        "9": "text, not a number",
        True: "not a number",
    }
    for weight, reason in reasons.items():
        record, skipped, rejected = parsed_with(weight)
        assert not record and not skipped
        assert re.match(
            rf"'weight' is .*{reason}; write how often the row is drawn, .* or leave the key out",
            *rejected,
        )


def test_the_weight_of_a_row_is_no_part_of_its_identity_nor_that_of_a_turn() -> None:
    talk = chat({"role": "assistant", "content": "Well.", "weight": 0}, weight=3)
    [(_, record)] = accepted([("a", 1, talk)], parse_conversation, Tally())
    assert isinstance(record, Conversation) and (record.weight, record.messages[1].in_loss) == (
        3.0,
        False,
    )
    assert content_hash(record) == content_hash(replace(record, weight=1.0))
    assert "weight" not in record.to_json()


def chat(*turns: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A row of these turns, with a question before and an answer after them."""
    return {
        "messages": [
            {"role": "user", "content": "Hi"},
            *turns,
            {"role": "assistant", "content": "Hello"},
        ],
        **more,
    }


SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
PARTS = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
SHAPES: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
    {"conversations": SHAREGPT},
    {"messages": [SHAREGPT[0], {"role": "assistant", "content": "Hello"}]},
    {"messages": [{"role": "user", "content": PARTS}, {**SHAREGPT[1], "tool_calls": None}]},
    {
        "messages": [SHAREGPT[0], {**SHAREGPT[1], "tool_calls": "null", "function_call": "[]"}],
        "tools": " null",
    },
    {
        "messages": [SHAREGPT[0], {**SHAREGPT[1], "tool_calls": "[]", "function_call": " "}],
        "tools": "[]",
    },
    {"messages": [SHAREGPT[0], {**SHAREGPT[1], "tools": "", "tool_calls": " "}], "tools": ""},
    {"conversations": [{"role": None, "content": None, **turn} for turn in SHAREGPT]},
    {"instruction": "Hi", "output": "Hello"},
    {"instruction": "Hi", "input": " \n", "output": "Hello"},
    {"instruction": "Hi", "input": None, "output": "Hello", "system": None, "tools": []},
    {"messages": SHAREGPT, "conversations": 1, "instruction": "x", "prompt": "y"},
    {"instruction": "Hi", "output": "Hello", "history": None, "prompt": "y", "completion": "z"},
    {"instruction": "Hi", "output": "Hello", "history": []},
    {"instruction": "Hi", "output": "Hello", "history": " "},
    {"prompt": "Hi", "completion": "Hello"},
    {"prompt": SHAREGPT[:1], "completion": "Hello", "tools": None},
    {"prompt": "Hi", "completion": [{"role": "assistant", "content": "Hello", "weight": 1}]},
    {"prompt": " Hi", "completion": [{"role": "user", "content": "Hi"}, SHAREGPT[1]]},
    {"messages": None, "conversations": SHAREGPT, "instruction": "x", "output": "y", "system": ""},
]


def test_every_known_shape_gives_the_same_chat() -> None:
    for row in SHAPES:
        assert parse_conversation(row) == HELLO, row


@pytest.mark.parametrize(
    ("asked", "answered"),
    [("question", "answer"), ("prompt", "response"), ("input", "output"), ("query", "response")],
)
def test_a_question_and_its_answer_are_a_chat_with_or_without_a_system_text(
    asked: str, answered: str
) -> None:
    row = {asked: "Hi", answered: "Hello", "id": "7", "source": None}
    assert is_chat(row) and parse_conversation(row) == HELLO
    assert kind_of_row(row) == "chats" and kind_of_row({**row, "text": "Hi Hello"}) == "documents"
    system = parse_conversation({**row, "system": "S", "history": [["1?", "a"]]})
    assert isinstance(system, Conversation)
    turns = [
        ("system", "S"),
        ("user", "1?"),
        ("assistant", "a"),
        ("user", "Hi"),
        ("assistant", "Hello"),
    ]
    assert [(turn.role, turn.content) for turn in system.messages] == turns
    assert parse_conversation({**row, answered: " "}) == Rejected(
        f"'{answered}' is empty; write a text, or leave the row out"
    )
    assert unread_keys({**row, "rationale": "since"}) == {"rationale"}


def test_a_question_that_needs_more_than_itself_is_no_chat() -> None:
    mores: dict[str, Any] = {
        "choices": ["3", "4"],
        "A": "3",
        "opa": "3",
        "context": "2 and 2",
        "documents": ["2 and 2"],
        "supporting_facts": {"title": ["2"]},
    }
    for key, more in mores.items():
        row = {"question": "2 + 2?", "answer": "B", key: more}
        assert not is_chat(row)
        rejected = parse_conversation(row)
        assert isinstance(rejected, Rejected)
        assert f"'{key}' beside 'question' may be a part of the question" in rejected.reason
    beside = {"context": " ", "choices": [], "tags": ["sums"], "row_metadata": {"by": "me"}}
    assert is_chat({"question": "2 + 2?", "answer": "4", **beside})


def test_a_row_that_older_formats_read_is_read_by_them() -> None:
    alpaca = {
        "instruction": "Add.",
        "input": "2 and 2",
        "output": "4",
        "question": "?",
        "answer": "!",
    }
    parsed = parse_conversation(alpaca)
    assert isinstance(parsed, Conversation)
    assert [turn.content for turn in parsed.messages] == ["Add.\n\n2 and 2", "4"]
    both = {"prompt": "Hi", "completion": "Hello", "question": "?", "answer": "!"}
    assert parse_conversation(both) == HELLO
    assert parse_conversation({"question": "Hi"}) == Rejected("no key 'answer' beside 'question'")


def test_an_alpaca_history_is_the_turns_before_its_instruction() -> None:
    history = [["1?", "a"], ["2?", ""]]
    row = {
        "instruction": "3?",
        "input": "x",
        "output": "c",
        "history": history,
        "system": "S",
        "tools": [],
    }
    texts = ["S", "1?", "a", "2?", "", "3?\n\nx", "c"]
    roles = ["system", *["user", "assistant"] * 3]
    assert parse_conversation(row) == Conversation(tuple(map(Message, roles, texts)))


def test_of_a_prompt_and_its_completion_the_completion_alone_is_learnt() -> None:
    """As TRL trains them by default (`completion_only_loss`), also where the prompt holds answers."""
    before = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "2?"},
    ]
    row = {
        "prompt": before,
        "completion": [{"role": "assistant", "content": "b"}],
        "system": "S",
        "tools": [ADD],
    }
    parsed = parse_conversation(row)
    assert isinstance(parsed, Conversation)
    assert [(turn.role, turn.in_loss) for turn in parsed.messages] == [
        ("system", True),
        ("user", True),
        ("assistant", False),
        ("user", True),
        ("assistant", True),
    ]
    assert parsed.messages[0].content.startswith("S\n\nYou may call these functions")
    assert [turn.content for turn in parsed.messages if is_live(turn)] == ["b"]
    learnt_whole = parse_conversation(
        {"messages": [*before, *row["completion"]], "system": "S", "tools": [ADD]}
    )
    assert isinstance(learnt_whole, Conversation)
    assert content_hash(learnt_whole) != content_hash(parsed), "another loss mask is another row"
    assert parse_conversation(
        {"prompt": before, "completion": [{"role": "user", "content": "b"}]}
    ) == Skipped("no answer")
    called = {"role": "assistant", "tool_calls": [{"id": "1", "name": "f", "arguments": {}}]}
    result = {"role": "tool", "content": "2", "tool_call_id": "1"}
    completion = [result, {"role": "assistant", "content": "2."}]
    parsed = parse_conversation({"prompt": [*before, called], "completion": completion})
    assert isinstance(parsed, Conversation), "a result answers a call that stands in the prompt"


def test_a_weight_of_0_makes_an_answer_context() -> None:
    for turn in (
        {"role": "assistant", "content": "a"},
        {"from": "gpt", "value": "a"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
    ):
        for weight, in_loss in ((0, False), (0.0, False), (False, False), (1, True), (None, True)):
            parsed = parse_conversation(chat({**turn, "weight": weight}))
            assert isinstance(parsed, Conversation)
            assert [message.in_loss for message in parsed.messages] == [True, in_loss, True]
    assert parse_conversation(
        chat({"role": "user", "content": "a", "weight": 7})
    ) != parse_conversation(chat())
    only = {"messages": [{"role": "assistant", "content": "a", "weight": 0}]}
    assert parse_conversation(only) == Skipped("no answer")


def test_a_prompt_alone_makes_no_chat_of_a_document() -> None:
    assert not is_chat({"text": "a", "prompt": "b"})
    assert is_chat({"prompt": "a", "completion": "b"})
    assert is_chat({"history": [], "instruction": "b"})


@pytest.mark.parametrize("role", ["bot", "User", " user", "human", "", None, ["user"]])
def test_an_unknown_role_is_rejected_by_name_and_never_taken_for_another(role: Any) -> None:
    parsed = parse_conversation(
        {"messages": [{"role": role, "content": "x"}, {"role": "assistant", "content": "y"}]}
    )
    assert parsed == Rejected(
        f"unknown role {str(role)!r}; write one of system, user, assistant, tool"
    )
    if role not in ("human", "gpt"):
        parsed = parse_conversation({"conversations": [{"from": role, "value": "x"}]})
        assert isinstance(parsed, Rejected)
        assert parsed.reason.startswith(
            f"unknown role {str(role)!r}; write one of system, human, user, gpt"
        )


def call(**changes: Any) -> dict[str, Any]:
    """An assistant's turn with one call."""
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "name": "f", "arguments": {}, **changes}],
    }


RESULT = {"role": "tool", "content": "2"}
NO_TEXT = "a content part is not an object with a text"
NOT_PAIRS = "'history' is not a list of pairs of texts; write a list of pairs"


def turn(role: str, **more: Any) -> dict[str, Any]:
    return chat({"role": role, **more})


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "none of the keys"),
    ({"messages": []}, "'messages' has no turns"),
    ({"conversations": "Hi"}, "'conversations' is text, not a list of turns"),
    (
        {"messages": [{"content": "x"}]},
        "a turn without a role; write 'role' as one of system, user",
    ),
    (turn("user"), "the 'content' of a turn of role 'user' is missing, not text"),
    (chat({"from": "human", "content": "x"}), "the 'value' of a turn of role 'user' is missing"),
    (
        turn("user", content=[{"type": "image_url", "image_url": {}}]),
        f"{NO_TEXT} (its type: image_url)",
    ),
    (
        turn("user", content=["x"]),
        f'{NO_TEXT} (its type: text); only text is read: write {{"type": "text"',
    ),
    (turn("assistant", content="a", weight=0.5), "the 'weight' of a turn is 0.5; write 1"),
    (chat(system=1), "'system' is a number, not text"),
    (
        chat({"role": "system", "content": "a"}, system="b"),
        "both the key 'system' and a system turn",
    ),
    ({"instruction": "x"}, "no key 'output'"),
    ({"instruction": "x", "output": " "}, "'output' is empty"),
    ({"instruction": "x", "output": "y", "history": [["a", None]]}, NOT_PAIRS),
    ({"prompt": "x"}, "no key 'completion' beside 'prompt'"),
    ({"prompt": 1, "completion": "x"}, "'prompt' is a number, not text or a list of turns"),
    ({"prompt": " ", "completion": "x"}, "'prompt' is empty; write a text"),
    (chat(RESULT, call()), "a tool turn without a call before it"),
    (
        chat(call(), {**RESULT, "tool_call_id": "2"}),
        "tool_call_id '2', which no call before it has",
    ),
    (turn("assistant", tool_calls="f()"), "'tool_calls': not valid JSON"),
    (turn("assistant", tool_calls=[{"function": "f"}]), "a tool call has no name"),
    (chat(call(arguments="{not json")), "the arguments of a tool call: not valid JSON"),
    (chat({**call(), "role": "user", "content": "x"}), "'tool_calls' on a turn of role 'user'"),
    (chat({"from": "function_call", "value": "f()"}), "'function_call': not valid JSON"),
    (chat(tools="{broken"), "'tools': not valid JSON"),
    (chat(tools=[{"type": "function"}]), "a tool has no name"),
    (turn("user", content="s", tools=[ADD]), "'tools' on a turn of role 'user'; write it beside"),
    (
        chat({"role": "system", "content": "s", "tools": [ADD]}, tools=[ADD]),
        "'tools' both beside the turns",
    ),
]


def test_a_wrong_chat_is_rejected_with_its_reason() -> None:
    for row, reason in WRONG:
        parsed = parse_conversation(row)
        assert isinstance(parsed, Rejected) and reason in parsed.reason, row


def test_a_chat_without_an_answer_is_skipped() -> None:
    question = {"role": "user", "content": "Hi"}
    for turns in ([question], [question, {"role": "assistant", "content": "\u200b\ufeff"}]):
        assert parse_conversation({"messages": turns}) == Skipped("no answer")


def test_turns_come_in_any_order_and_may_be_empty_beside_an_answer() -> None:
    for roles in (
        ("assistant", "user", "user"),
        ("user", "assistant", "assistant", "system"),
        ("assistant",),
    ):
        turns = [*(Message(role, role.upper()) for role in roles), Message("user", "")]
        rows = [{"role": turn.role, "content": turn.content} for turn in turns]
        assert parse_conversation({"messages": rows}) == Conversation(tuple(turns))


KEYS = (
    "messages",
    "conversations",
    "role",
    "content",
    "from",
    "value",
    "tools",
    "tool_calls",
    "function",
    "name",
    "arguments",
    "tool_call_id",
    "id",
    "type",
    "text",
    "instruction",
    "input",
    "output",
    "system",
    "history",
    "prompt",
    "completion",
    "weight",
)
WORDS = (
    "user",
    "assistant",
    "tool",
    "system",
    "human",
    "gpt",
    "function_call",
    "observation",
    "text",
    "f",
    "{}",
    "[]",
    "",
)
JSON = st.recursive(
    st.sampled_from([*WORDS, None, True, 1, 1.5]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5)
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(row=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4))
def test_no_row_is_beyond_the_parsers(row: dict[str, Any]) -> None:
    for parse in (parse_conversation, document_parser("text"), document_parser("content")):
        parsed = parse(row)
        if isinstance(parsed, TextDocument | Conversation):
            again = (
                document_parser("text") if isinstance(parsed, TextDocument) else parse_conversation
            )
            assert again(json.loads(json.dumps(parsed.to_json()))) == parsed
        else:
            assert isinstance(parsed, Skipped | Rejected)


ARGUMENTS = {"a": 1, "b": "é"}


def openai(arguments: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    turns = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "1+é?"},
        {"role": "assistant", "content": "Well.", "tool_calls": [call, call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "assistant", "content": "2."},
    ]
    return {"messages": turns, "tools": [ADD, {"name": "sub"}]}


def minimind() -> dict[str, Any]:
    calls = json.dumps([{"name": "add", "arguments": ARGUMENTS}] * 2)
    turns = [
        {"role": "system", "content": "Be kind.", "tools": json.dumps([ADD, {"name": "sub"}])},
        {"role": "user", "content": "1+é?"},
        {"role": "assistant", "content": "Well.", "tool_calls": calls},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2."},
    ]
    return {"conversations": turns}


def test_every_form_of_functions_and_calls_gives_the_same_text() -> None:
    for row in (
        openai(ARGUMENTS),
        openai('{"a": 1, "b": "é"}'),
        minimind(),
        {**minimind(), "tools": None},
    ):
        assert parse_conversation(row) == TALK


def test_sharegpt_calls_are_turns_of_their_own() -> None:
    call = {
        "from": "function_call",
        "value": json.dumps({"name": "add", "arguments": ARGUMENTS}, ensure_ascii=False),
    }
    row = {
        "conversations": [
            {"from": "human", "value": "1+é?"},
            call,
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "2."},
        ],
        "tools": json.dumps([ADD, {"name": "sub"}]),
        "system": "Be kind.",
    }
    expected = (
        TALK.messages[0],
        TALK.messages[1],
        Message("assistant", CALLED),
        *TALK.messages[3:],
    )
    assert parse_conversation(row) == Conversation(expected)
    call["value"] = f"[{call['value']}, {call['value']}]"
    expected = (*expected[:2], Message("assistant", f"{CALLED}\n{CALLED}"), *TALK.messages[3:])
    assert parse_conversation(row) == Conversation(expected)


def test_functions_without_a_system_turn_make_one() -> None:
    row = openai(ARGUMENTS)
    row["messages"][0]["content"] = ""
    parsed = parse_conversation(row)
    del row["messages"][0]
    assert (
        parsed
        == parse_conversation(row)
        == Conversation((Message("system", SYSTEM), *TALK.messages[1:]))
    )


def test_arguments_as_text_stay_as_they_are_written() -> None:
    for arguments in ('{ "a":1,\n "a": 2 }', '{"x": "\\u00e9 </tool_call>"}', "{}"):
        call = {"function": {"name": 'a"b', "arguments": arguments}}
        parsed = parse_conversation({"messages": [{"role": "assistant", "tool_calls": [call]}]})
        text = f'<tool_call>\n{{"name": "a\\"b", "arguments": {arguments}}}\n</tool_call>'
        assert parsed == Conversation((Message("assistant", text),))


def test_a_function_call_beside_a_text_is_a_call_of_its_turn() -> None:
    call = {"name": "add", "arguments": ARGUMENTS}
    for content, value in itertools.product(
        ("Well.", "", None), (call, json.dumps(call), {**call, "arguments": '{"a": 1, "b": "é"}'})
    ):
        turn = {"role": "assistant", "content": content, "function_call": value, "tool_calls": None}
        text = f"Well.\n{CALLED}" if content else CALLED
        assert parse_conversation({"messages": [turn]}) == Conversation(
            (Message("assistant", text),)
        )


def test_no_function_call_is_none_and_a_second_call_rejects_the_row() -> None:
    question, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    for none in (None, "", {}, {"name": None, "arguments": None}):
        assert (
            parse_conversation({"messages": [question, {**answer, "function_call": none}]}) == HELLO
        )
    call = {"name": "f", "arguments": {}}
    for turn, reason in (
        (
            {**answer, "tool_calls": [call], "function_call": call},
            "both 'tool_calls' and 'function_call' on",
        ),
        ({**question, "function_call": call}, "'function_call' on a turn of role 'user'"),
        ({**answer, "function_call": {"name": "f"}}, "the arguments of a tool call are null"),
    ):
        parsed = parse_conversation({"messages": [turn]})
        assert isinstance(parsed, Rejected) and parsed.reason.startswith(reason)


ANSWER = {"role": "assistant", "content": "4"}
UNREAD = [
    ({"messages": [{**ANSWER, "thinking": "2 + 2"}] * 2}, {"thinking"}),
    (
        {"conversations": [{"from": "gpt", "value": "4", "rationale": "2 + 2", "weight": 0}]},
        {"rationale"},
    ),
    ({"instruction": "2 + 2?", "output": "4", "reasoning": "2 + 2", "source": "me"}, {"reasoning"}),
    (
        {"prompt": "2 + 2?", "completion": [{**ANSWER, "reasoning": "2 + 2"}], "think": "2"},
        {"reasoning", "think"},
    ),
    (
        {"prompt": "2 + 2?", "chosen": {**ANSWER, "reasoning": "2 + 2"}, "rejected": "5"},
        {"reasoning"},
    ),
    (
        {
            "messages": [
                {
                    **ANSWER,
                    "id": "a",
                    "reasoning": " ",
                    "tokens": 3,
                    "thought": None,
                    "tool_calls": [],
                }
            ]
        },
        set(),
    ),
    (
        {
            "instruction": "2 + 2?",
            "input": "a",
            "output": "4",
            "history": [["a", "b"]],
            "system": "c",
            "lang": "en",
        },
        set(),
    ),
]


def test_texts_of_an_answer_under_keys_that_are_not_read_are_counted_by_their_key() -> None:
    for row, keys in UNREAD:
        assert unread_keys(row) == keys, row
    rows = [
        ("a.jsonl", number, row)
        for number, row in enumerate([UNREAD[0][0], UNREAD[2][0], UNREAD[2][0]], start=1)
    ]
    tally, total = Tally(), Tally()
    assert len(list(accepted(rows, parse_conversation, tally))) == 3
    total.add(tally)
    assert total.to_json()["unread_keys"] == {"thinking": 1, "reasoning": 2}


def test_reasoning_is_read_of_turns_of_either_form() -> None:
    by_role = {"role": "assistant", "content": "4", "reasoning_content": " 2 + 2 "}
    by_name = {"from": "gpt", "value": "4", "reasoning_content": " 2 + 2 "}
    expected = Conversation((Message("assistant", "<think>\n2 + 2\n</think>\n\n4", thought=24),))
    for row in ({"messages": [by_role]}, {"conversations": [by_name]}):
        assert parse_conversation(row) == expected and not unread_keys(row)


def test_a_key_that_is_null_in_functions_or_arguments_counts_as_absent() -> None:
    schema = {
        "properties": {"city": {"type": "string"}, "time": None},
        "enum": ["a", None],
        "items": {},
    }
    arguments = {
        "city": "Rome",
        "time": None,
        "list": [{"x": 1, "y": None}, None],
        "place": {"z": None},
    }
    calls, tools = (
        [{"name": "f", "id": None, "arguments": arguments}],
        [{"type": None, "name": "f", "parameters": schema}],
    )
    shapes: list[dict[str, Any]] = [
        {"messages": [{"role": "assistant", "tool_calls": calls}], "tools": tools},
        {
            "messages": [{"role": "assistant", "tool_calls": json.dumps(calls)}],
            "tools": json.dumps(tools),
        },
        {
            "messages": [{"role": "assistant", "content": None, "function_call": calls[0]}],
            "tools": tools,
        },
        {"conversations": [{"from": "function_call", "value": json.dumps(calls)}], "tools": tools},
        {
            "prompt": [{"role": "system", "content": "", "tools": tools}],
            "completion": [{"role": "assistant", "tool_calls": calls}],
        },
    ]
    lines = [json.dumps(row).encode() for row in shapes]
    for _, _, row in parsed(enumerate(lines, 1), "a.jsonl", Tally(), 1 << 20):
        conversation = parse_conversation(row)
        assert isinstance(conversation, Conversation), conversation
        system, answer = conversation.messages
        assert '{"city": "Rome", "list": [{"x": 1}, null], "place": {}}' in answer.content
        assert (
            '{"properties": {"city": {"type": "string"}}, "enum": ["a", null], "items": {}}'
            in system.content
        )
        assert '{"name": "f", "parameters"' in system.content


@pytest.mark.parametrize("number", ["98765432109876543210", "1.0"])
def test_numbers_of_functions_and_calls_keep_their_value(number: str) -> None:
    arguments = f'{{"a": {number}, "b": [{number}]}}'
    call = f'{{"name": "f", "arguments": {arguments}}}'
    tool = f'{{"name": "f", "parameters": {{"maximum": {number}}}}}'
    calls = [
        f'{{"role": "assistant", "tool_calls": [{call}]}}',
        f'{{"role": "assistant", "tool_calls": {json.dumps(f"[{call}]")}}}',
        f'{{"role": "assistant", "tool_calls": [{{"name": "f", "arguments": {json.dumps(arguments)}}}]}}',
        f'{{"from": "function_call", "value": {json.dumps(call)}}}',
    ]
    rows = [f'{{"messages": [{turn}], "tools": [{tool}]}}' for turn in calls]
    rows.append(
        f'{{"messages": [{{"role": "system", "content": "", "tools": {json.dumps(f"[{tool}]")}}}, {calls[0]}]}}'
    )
    for _, _, row in parsed(
        enumerate((row.encode() for row in rows), 1), "a.jsonl", Tally(), 1 << 20
    ):
        conversation = parse_conversation(row)
        assert isinstance(conversation, Conversation), conversation
        system, answer = conversation.messages
        assert f"{tool}\n" in system.content
        assert answer.content == f"<tool_call>\n{call}\n</tool_call>"


def test_arguments_nested_without_end_are_rejected() -> None:
    nested: Any = {}
    for _ in range(2000):
        nested = {"a": nested}
    assert parse_conversation(chat(call(arguments=nested))) == Rejected(
        "the functions or the arguments of a call are nested too deeply"
    )
    assert isinstance(
        parse_conversation(chat(call(arguments='{"a":' * 2000 + "1" + "}" * 2000))), Rejected
    )


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "a"}, TextDocument("a")),
        ({"text": "\ufeffa\ufeff"}, TextDocument("a\ufeff")),
        ({"text": "\0"}, TextDocument("\0")),
        ({"text": "a", "content": "b"}, TextDocument("a")),
        ({"paragraphs": ["x"], "body": "c", "content": "b"}, TextDocument("b")),
        ({"paragraphs": ["x", "", "y z"]}, TextDocument("x\n\ny z")),
        ({"paragraphs": "x"}, TextDocument("x")),
        ({"paragraphs": ["", " "]}, Skipped("empty text")),
        ({"text": " \n\t\u3000\x85"}, Skipped("empty text")),
        ({"text": "\u200b\u200d\ufeff \u2060"}, Skipped("empty text")),
        ({"text": None, "content": "b"}, Rejected("'text' is null, not text")),
        ({"text": 1}, Rejected("'text' is a number, not text")),
        ({"text": ["a"]}, Rejected("'text' is a list, not text")),
        ({"content": {"t": "x"}}, Rejected("'content' is an object, not text")),
        (
            {"paragraphs": ["a", 1]},
            Rejected("'paragraphs' holds a number; write a text, or a list of texts"),
        ),
        ({"Text": "a"}, Rejected("no key 'text' or 'content' or 'body' or 'paragraphs'")),
    ],
)
def test_a_document_is_a_text_under_its_field(
    row: dict[str, Any], expected: Record | Skipped | Rejected
) -> None:
    assert document_parser("text")(row) == expected


def test_the_field_of_a_document_has_the_name_that_is_asked_for_and_no_other() -> None:
    assert document_parser("body")({"body": "a", "text": 1}) == TextDocument("a")
    assert document_parser("body")({"text": "a", "content": "b"}) == Rejected("no key 'body'")
    assert document_parser("content")({"text": "a", "content": "b"}) == TextDocument("b")
    assert document_fields("body") == "the key 'body' (reading.text_field) with a text"


def heldout(rows: list[TextDocument], fraction: float) -> set[Record]:
    return {record for held, record in split(iter(rows), fraction) if held}


@pytest.mark.parametrize(
    ("count", "fraction"),
    [
        (300, 0.1),
        (4000, 0.01),
        (4000, 0.5),
        (5, 0.01),
        (40, 0.001),
        (2, 0.9),
        (1, 1e-6),
        (29, 1e-6),
        (20, 0.0),
        (0, 0.1),
    ],
)
def test_the_split_loses_nothing_depends_on_no_order_and_holds_at_least_one_row_out(
    count: int, fraction: float
) -> None:
    """Copies of a row go where it goes, also when it is the one that is held out for want of others."""
    rows = [TextDocument(f"document {number}") for number in range(count)]
    expected = heldout(rows, fraction)
    assert abs(len(expected) - count * fraction) < 5 * max(1.0, count * fraction) ** 0.5
    assert expected or not (count and fraction)
    if count and fraction < 1 / count:
        assert expected <= {min(rows, key=position)}
    for seed in range(3):
        shuffled = random.Random(seed).sample(rows * 3, 3 * count)
        sides = [*split(iter(shuffled), fraction)]
        assert sorted((record for _, record in sides), key=position) == sorted(
            rows * 3, key=position
        )
        assert {record for held, record in sides if held} == expected
        assert not expected & {record for held, record in sides if not held}
    assert heldout(rows, fraction / 2) <= expected, "a larger part contains the smaller"


def test_a_place_depends_on_the_content_alone() -> None:
    assert position(HELLO) == position(Conversation(HELLO.messages))
    assert position(HELLO) != position(
        Conversation((Message("user", "HiHello"), Message("assistant", "")))
    )
    assert len(content_hash(HELLO)) == 16
    assert position(HELLO) == int.from_bytes(content_hash(HELLO)[:8], "big") / 2**64


def documents(count: int) -> list[TextDocument]:
    return [TextDocument(f"document {number}") for number in range(count)]


def heldout_of(rows: list[TextDocument]) -> set[str]:
    share = heldout_share(rows)
    return {row.text for row in rows if position(row) < share}


@pytest.mark.parametrize(
    ("count", "share"),
    [
        (0, 0.2),
        (1, 0.2),
        (40, 0.2),
        (250, 0.2),
        (500, 0.1),
        (2000, 0.025),
        (2500, 0.02),
        (9000, 0.02),
    ],
)
def test_a_fifth_is_held_out_of_few_rows_fifty_of_more_and_two_percent_of_many(
    count: int, share: float
) -> None:
    assert heldout_share(documents(count)) == pytest.approx(share)


def test_of_a_hundred_rows_on_at_least_as_many_are_held_out_as_a_verdict_needs() -> None:
    shares = []
    for seed in range(40):
        rows = [TextDocument(f"{seed}: {number}") for number in range(100)]
        held_out = heldout_of(rows)
        shares.append(heldout_share(rows))
        assert 20 <= len(held_out) <= 40
        assert {record.text for held, record in split(iter(rows), shares[-1]) if held} == held_out
    assert max(shares) > 0.2, "else the rows below 20 % were enough in each of them"


def test_no_row_that_was_trained_on_is_held_out_of_a_set_that_has_grown() -> None:
    rows, trained_on = documents(3000), set[str]()
    for count in (100, 110, 180, 300, 700, 2499, 2500, 3000):
        held_out = heldout_of(rows[:count])
        assert not trained_on & held_out
        trained_on |= {row.text for row in rows[:count]} - held_out


def test_rows_that_repeat_others_and_rows_beyond_the_limit_do_not_count() -> None:
    rows = documents(40)
    assert heldout_share(rows * 100) == heldout_share(rows) == 0.2
    assert heldout_share(documents(2000), limit=250) == 0.2
    assert heldout_share(documents(200), limit=9000) == heldout_share(documents(200))


def test_of_many_rows_no_more_are_read_than_decide() -> None:
    rows = iter(documents(9000))
    assert heldout_share(rows) == 0.02
    assert len(list(rows)) == 9000 - 2500
