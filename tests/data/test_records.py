"""Records: known formats of chats, function calls, rejected rows, and the held-out split."""

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

from ttrain.data import json_rows
from ttrain.data.chat_shapes import is_chat, unread_keys
from ttrain.data.chat_templates import Message, is_live
from ttrain.data.json_rows import Tally
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

Json = dict[str, Any]

QUESTION, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
HELLO = Conversation((Message("user", "Hi"), Message("assistant", "Hello")))
HUMAN, GPT = SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
PARTS = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
INSTRUCTION = {"instruction": "Hi", "output": "Hello"}
SAME_CHAT: list[Json] = [
    {"messages": [QUESTION, ANSWER]},
    {"conversations": SHAREGPT},
    {"messages": [HUMAN, ANSWER]},
    {"messages": [{"role": "user", "content": PARTS}, {**GPT, "tool_calls": None}]},
    {"messages": [HUMAN, {**GPT, "tool_calls": "null", "function_call": "[]"}], "tools": " null"},
    {"messages": [HUMAN, {**GPT, "tool_calls": "[]", "function_call": " "}], "tools": "[]"},
    {"messages": [HUMAN, {**GPT, "tools": "", "tool_calls": " "}], "tools": ""},
    {"conversations": [{"role": None, "content": None, **turn} for turn in SHAREGPT]},
    INSTRUCTION,
    {**INSTRUCTION, "input": " \n"},
    {**INSTRUCTION, "input": None, "system": None, "tools": []},
    {"messages": SHAREGPT, "conversations": 1, "instruction": "x", "prompt": "y"},
    {**INSTRUCTION, "history": None, "prompt": "y", "completion": "z"},
    {**INSTRUCTION, "history": []},
    {**INSTRUCTION, "history": " "},
    {"prompt": "Hi", "completion": "Hello"},
    {"prompt": [HUMAN], "completion": "Hello", "tools": None},
    {"prompt": "Hi", "completion": [{**ANSWER, "weight": 1}]},
    {"prompt": " Hi", "completion": [QUESTION, GPT]},
    {"messages": None, "conversations": SHAREGPT, "instruction": "x", "output": "y", "system": ""},
    {"prompt": "Hi", "completion": "Hello", "question": "?", "answer": "!"},
    *({"messages": [QUESTION, {**ANSWER, "function_call": none}]} for none in (None, "", {})),
    {"messages": [QUESTION, {**ANSWER, "function_call": {"name": None, "arguments": None}}]},
]

ADD = {"type": "function", "function": {"name": "add", "description": "à + b", "parameters": {}}}
SUB = {"name": "sub"}
ARGUMENTS = {"a": 1, "b": "é"}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
CALLED_TWICE = f"{CALLED}\n{CALLED}"
TOOLS_TEXT = """\
You may call these functions; put each call as JSON between <tool_call> and </tool_call>.
<tools>
{"type": "function", "function": {"name": "add", "description": "à + b", "parameters": {}}}
{"name": "sub"}
</tools>"""
CALLING = (
    Message("system", f"Be kind.\n\n{TOOLS_TEXT}"),
    Message("user", "1+é?"),
    Message("assistant", f"Well.\n{CALLED_TWICE}"),
    Message("tool", "2"),
    Message("assistant", "2."),
)

RESULT = {"role": "tool", "content": "2"}
EMPTY_CALL = {"id": "1", "name": "f", "arguments": {}}
NO_TEXT = "a content part is not an object with a text"
KEYS = (
    "messages conversations role content from value tools tool_calls function name arguments "
    "tool_call_id id type text instruction input output system history prompt completion weight"
)
WORDS = "user assistant tool system human gpt function_call observation text f {} []"
JSON = st.recursive(
    st.sampled_from([*WORDS.split(), "", None, True, 1, 1.5]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS.split()), inner, max_size=5)
    ),
    max_leaves=12,
)


def chat(*turns: Json, **more: Any) -> Json:
    return {"messages": [QUESTION, *turns, ANSWER], **more}


def turn(role: str, **more: Any) -> Json:
    return chat({"role": role, **more})


def call(**changes: Any) -> Json:
    return {"role": "assistant", "content": None, "tool_calls": [{**EMPTY_CALL, **changes}]}


def parsed(row: Json) -> Conversation:
    conversation = parse_conversation(row)
    assert isinstance(conversation, Conversation), conversation
    return conversation


def reason_of(row: Json) -> str:
    rejected = parse_conversation(row)
    assert isinstance(rejected, Rejected)
    return rejected.reason


def contents(row: Json) -> list[str]:
    return [message.content for message in parsed(row).messages]


def documents(count: int) -> list[TextDocument]:
    return [TextDocument(f"document {number}") for number in range(count)]


# --- the weight of a row and of a turn


def parsed_with(weight: Any) -> tuple[list[Record], Json, Json]:
    tally, rows = Tally(), [("a", 1, {"text": "x", "weight": weight})]
    records = [record for _, record in accepted(rows, document_parser("text"), tally)]
    return records, dict(tally.skipped), dict(tally.rejected)


def test_a_row_has_a_weight() -> None:
    for weight, expected in ((9, 9.0), (0.5, 0.5), (1, 1.0), (None, 1.0)):
        assert parsed_with(weight) == ([TextDocument("x", weight=expected)], {}, {})
    assert parsed_with(0) == ([], {"weight 0": 1}, {})


def test_a_weight_that_is_no_number_rejects_the_row() -> None:
    reasons = {-1: "negative", math.nan: "not finite", "9": "text, not a", True: "not a number"}
    fix = "write how often the row is drawn, .* or leave the key out"
    for weight, reason in reasons.items():
        records, skipped, rejected = parsed_with(weight)
        assert not records and not skipped
        assert re.match(rf"'weight' is .*{reason}.*; {fix}", *rejected)


def test_the_weight_of_a_row_is_no_part_of_its_identity_nor_that_of_a_turn() -> None:
    talk = chat({"role": "assistant", "content": "Well.", "weight": 0}, weight=3)
    [(_, record)] = accepted([("a", 1, talk)], parse_conversation, Tally())
    assert isinstance(record, Conversation)
    assert (record.weight, record.messages[1].in_loss) == (3.0, False)
    assert content_hash(record) == content_hash(replace(record, weight=1.0))
    assert "weight" not in record.to_json()


def test_a_weight_of_0_makes_an_answer_context() -> None:
    called = {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}
    weights = [(0, False), (0.0, False), (False, False), (1, True), (None, True)]
    for answer, (weight, in_loss) in itertools.product((ANSWER, GPT, called), weights):
        messages = parsed(chat({**answer, "weight": weight})).messages
        assert [message.in_loss for message in messages] == [True, in_loss, True]


def test_the_weight_of_a_question_means_nothing() -> None:
    assert parsed(turn("user", content="a", weight=7)) == parsed(turn("user", content="a"))
    only = {"messages": [{"role": "assistant", "content": "a", "weight": 0}]}
    assert parse_conversation(only) == Skipped("no answer")


# --- formats of chats


@pytest.mark.parametrize("row", SAME_CHAT)
def test_every_known_format_gives_the_same_chat(row: Json) -> None:
    assert parse_conversation(row) == HELLO


@pytest.mark.parametrize(
    ("question", "answer"),
    [("question", "answer"), ("prompt", "response"), ("input", "output"), ("query", "response")],
)
def test_a_question_and_its_answer_are_a_chat(question: str, answer: str) -> None:
    row = {question: "Hi", answer: "Hello", "id": "7", "source": None}
    assert is_chat(row) and parse_conversation(row) == HELLO
    assert kind_of_row(row) == "chats" and kind_of_row({**row, "text": "Hi Hello"}) == "documents"
    turns = ["system S", "user 1?", "assistant a", "user Hi", "assistant Hello"]
    messages = parsed({**row, "system": "S", "history": [["1?", "a"]]}).messages
    assert [f"{message.role} {message.content}" for message in messages] == turns
    reason = f"'{answer}' is empty; write a text, or leave the row out"
    assert reason_of({**row, answer: " "}) == reason
    assert unread_keys({**row, "rationale": "since"}) == {"rationale"}


def test_a_question_that_needs_more_than_itself_is_no_chat() -> None:
    parts = {"choices": ["3", "4"], "A": "3", "opa": "3", "context": "2 and 2", "documents": ["2"]}
    for key, value in {**parts, "supporting_facts": {"title": ["2"]}}.items():
        row = {"question": "2 + 2?", "answer": "B", key: value}
        assert not is_chat(row)
        assert f"'{key}' beside 'question' may be a part of the question" in reason_of(row)
    more = {"context": " ", "choices": [], "tags": ["sums"], "row_metadata": {"by": "me"}}
    assert is_chat({"question": "2 + 2?", "answer": "4", **more})


def test_a_row_that_older_formats_read_is_read_by_them() -> None:
    alpaca = {"instruction": "Add.", "input": "2 and 2", "output": "4"}
    assert contents({**alpaca, "question": "?", "answer": "!"}) == ["Add.\n\n2 and 2", "4"]
    assert parse_conversation({"question": "Hi"}) == Rejected("no key 'answer' beside 'question'")


def test_an_alpaca_history_is_the_turns_before_its_instruction() -> None:
    history = [["1?", "a"], ["2?", ""]]
    row = {"instruction": "3?", "input": "x", "output": "c", "system": "S", "tools": []}
    texts = ["S", "1?", "a", "2?", "", "3?\n\nx", "c"]
    roles = ["system", *["user", "assistant"] * 3]
    assert parsed({**row, "history": history}).messages == tuple(map(Message, roles, texts))


def test_of_a_prompt_and_its_completion_the_completion_alone_is_trained_on() -> None:
    """As TRL does by default (`completion_only_loss`), also where the prompt holds answers."""
    roles = ["user", "assistant", "user"]
    before = [{"role": role, "content": text} for role, text in zip(roles, "1a2", strict=True)]
    answer = {"role": "assistant", "content": "b"}
    more = {"system": "S", "tools": [ADD]}
    conversation = parsed({"prompt": before, "completion": [answer], **more})
    assert [message.role for message in conversation.messages] == ["system", *roles, "assistant"]
    assert [message.in_loss for message in conversation.messages] == [True, True, False, True, True]
    assert conversation.messages[0].content.startswith("S\n\nYou may call these functions")
    assert [message.content for message in conversation.messages if is_live(message)] == ["b"]
    all_trained_on = parsed({"messages": [*before, answer], **more})
    assert content_hash(all_trained_on) != content_hash(conversation), "another mask, another row"
    question = {"role": "user", "content": "b"}
    assert parse_conversation({"prompt": before, "completion": [question]}) == Skipped("no answer")
    result = {**RESULT, "tool_call_id": "1"}
    assert parsed({"prompt": [*before, call()], "completion": [result, answer]})


def test_a_prompt_alone_makes_no_chat_of_a_document() -> None:
    assert not is_chat({"text": "a", "prompt": "b"})
    assert is_chat({"prompt": "a", "completion": "b"})
    assert is_chat({"history": [], "instruction": "b"})


def test_a_chat_without_an_answer_is_skipped() -> None:
    for turns in ([QUESTION], [QUESTION, {"role": "assistant", "content": "\u200b\ufeff"}]):
        assert parse_conversation({"messages": turns}) == Skipped("no answer")


@pytest.mark.parametrize(
    "roles", ["assistant user user", "user assistant assistant system", "assistant"]
)
def test_turns_come_in_any_order_and_may_be_empty_beside_an_answer(roles: str) -> None:
    turns = [*(Message(role, role.upper()) for role in roles.split()), Message("user", "")]
    rows = [{"role": message.role, "content": message.content} for message in turns]
    assert parsed({"messages": rows}).messages == tuple(turns)


# --- rejected chats


@pytest.mark.parametrize("role", ["bot", "User", " user", "human", "", None, ["user"]])
def test_an_unknown_role_is_rejected_by_name_and_never_taken_for_another(role: Any) -> None:
    unknown = f"unknown role {str(role)!r}; write one of system, "
    row = {"messages": [{"role": role, "content": "x"}, ANSWER]}
    assert reason_of(row) == f"{unknown}user, assistant, tool"
    if role != "human":
        row = {"conversations": [{"from": role, "value": "x"}]}
        assert reason_of(row).startswith(f"{unknown}human, user, gpt")


WRONG: list[tuple[Json, str]] = [
    ({}, "none of the keys"),
    ({"messages": []}, "'messages' has no turns"),
    ({"conversations": "Hi"}, "'conversations' is text, not a list of turns"),
    (
        {"messages": [{"content": "x"}]},
        "a turn without a role; write 'role' as one of system, user",
    ),
    (turn("user"), "the 'content' of a turn of role 'user' is missing, not text"),
    (chat({"from": "human", "content": "x"}), "the 'value' of a turn of role 'user' is missing"),
    (turn("user", content=[{"type": "image_url"}]), f"{NO_TEXT} (its type: image_url)"),
    (turn("user", content=["x"]), f'{NO_TEXT} (its type: text); only text is read: write {{"type"'),
    (turn("assistant", content="a", weight=0.5), "the 'weight' of a turn is 0.5; write 1"),
    (chat(system=1), "'system' is a number, not text"),
    (turn("system", content="a") | {"system": "b"}, "both the key 'system' and a system turn"),
    ({"instruction": "x"}, "no key 'output'"),
    ({"instruction": "x", "output": " "}, "'output' is empty"),
    ({**INSTRUCTION, "history": [["a", None]]}, "'history' is not a list of pairs of texts; write"),
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
    (turn("system", content="s", tools=[ADD]) | {"tools": [ADD]}, "'tools' both beside the turns"),
    (
        turn("assistant", content="a", tool_calls=[EMPTY_CALL], function_call=EMPTY_CALL),
        "both 'tool_calls' and 'function_call' on",
    ),
    (
        turn("user", content="s", function_call=EMPTY_CALL),
        "'function_call' on a turn of role 'user'",
    ),
    (
        turn("assistant", content="a", function_call={"name": "f"}),
        "the arguments of a tool call are null",
    ),
]


@pytest.mark.parametrize(("row", "reason"), WRONG)
def test_a_wrong_chat_is_rejected_with_its_reason(row: Json, reason: str) -> None:
    assert reason in reason_of(row)


def test_arguments_nested_without_end_are_rejected() -> None:
    nested: Json = {}
    for _ in range(2000):
        nested = {"a": nested}
    too_deep = "the functions or the arguments of a call are nested too deeply"
    assert reason_of(chat(call(arguments=nested))) == too_deep
    assert reason_of(chat(call(arguments='{"a":' * 2000 + "1" + "}" * 2000)))


@settings(max_examples=60, deadline=None)
@given(row=st.dictionaries(st.sampled_from(KEYS.split()), JSON, max_size=4))
def test_no_row_is_beyond_the_parsers(row: Json) -> None:
    for parse in (parse_conversation, document_parser("text"), document_parser("content")):
        record = parse(row)
        if isinstance(record, TextDocument | Conversation):
            is_document = isinstance(record, TextDocument)
            again = document_parser("text") if is_document else parse_conversation
            assert again(json.loads(json.dumps(record.to_json()))) == record
        else:
            assert isinstance(record, Skipped | Rejected)


# --- functions and their calls


def openai(arguments: Any) -> Json:
    function = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    turns = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "1+é?"},
        {"role": "assistant", "content": "Well.", "tool_calls": [function, function]},
        {**RESULT, "tool_call_id": "c1"},
        {"role": "assistant", "content": "2."},
    ]
    return {"messages": turns, "tools": [ADD, SUB]}


def minimind() -> Json:
    system, question, calling, _, answer = openai(ARGUMENTS)["messages"]
    system["tools"] = json.dumps([ADD, SUB])
    calling["tool_calls"] = json.dumps([{"name": "add", "arguments": ARGUMENTS}] * 2)
    return {"conversations": [system, question, calling, RESULT, answer]}


def test_every_form_of_functions_and_calls_gives_the_same_text() -> None:
    as_text = openai('{"a": 1, "b": "é"}')
    for row in (openai(ARGUMENTS), as_text, minimind(), {**minimind(), "tools": None}):
        assert parsed(row).messages == CALLING


@pytest.mark.parametrize(("form", "called"), [("{0}", CALLED), ("[{0}, {0}]", CALLED_TWICE)])
def test_sharegpt_calls_are_turns_of_their_own(form: str, called: str) -> None:
    function = json.dumps({"name": "add", "arguments": ARGUMENTS}, ensure_ascii=False)
    names = ("human", "function_call", "observation", "gpt")
    values = ("1+é?", form.format(function), "2", "2.")
    turns = [{"from": name, "value": value} for name, value in zip(names, values, strict=True)]
    row = {"conversations": turns, "tools": json.dumps([ADD, SUB]), "system": "Be kind."}
    assert parsed(row).messages == (*CALLING[:2], Message("assistant", called), *CALLING[3:])


def test_functions_without_a_system_turn_make_one() -> None:
    empty, without = openai(ARGUMENTS), openai(ARGUMENTS)
    empty["messages"][0]["content"] = ""
    del without["messages"][0]
    expected = (Message("system", TOOLS_TEXT), *CALLING[1:])
    assert parsed(empty).messages == parsed(without).messages == expected


def test_arguments_as_text_stay_as_they_are_written() -> None:
    for arguments in ('{ "a":1,\n "a": 2 }', '{"x": "\\u00e9 </tool_call>"}', "{}"):
        function = {"function": {"name": 'a"b', "arguments": arguments}}
        text = f'<tool_call>\n{{"name": "a\\"b", "arguments": {arguments}}}\n</tool_call>'
        row = {"messages": [{"role": "assistant", "tool_calls": [function]}]}
        assert parsed(row).messages == (Message("assistant", text),)


def test_a_function_call_beside_a_text_is_a_call_of_its_turn() -> None:
    function = {"name": "add", "arguments": ARGUMENTS}
    forms = (function, json.dumps(function), {**function, "arguments": '{"a": 1, "b": "é"}'})
    for content, form in itertools.product(("Well.", "", None), forms):
        answer = {"role": "assistant", "content": content, "function_call": form}
        text = f"Well.\n{CALLED}" if content else CALLED
        row = {"messages": [{**answer, "tool_calls": None}]}
        assert parsed(row).messages == (Message("assistant", text),)


def through_json(*rows: str) -> list[tuple[str, str]]:
    """(system turn, answer) of each row, as they come out of a file."""
    lines = enumerate((row.encode() for row in rows), 1)
    values = [value for _, _, value in json_rows.parsed(lines, "a.jsonl", Tally(), 1 << 20)]
    assert len(values) == len(rows)
    return [(system, answer) for system, answer in map(contents, values)]


def test_a_key_that_is_null_in_functions_or_arguments_counts_as_absent() -> None:
    city = {"city": {"type": "string"}, "time": None}
    arguments = {"city": "Rome", "time": None, "list": [{"x": 1, "y": None}, None]}
    arguments["place"] = {"z": None}
    schema = {"properties": city, "enum": ["a", None], "items": {}}
    calls = [{"name": "f", "id": None, "arguments": arguments}]
    tools = [{"type": None, "name": "f", "parameters": schema}]
    answer = {"role": "assistant", "tool_calls": calls}
    as_json = {**answer, "tool_calls": json.dumps(calls)}
    old = {"role": "assistant", "content": None, "function_call": calls[0]}
    rows: list[Json] = [
        {"messages": [answer], "tools": tools},
        {"messages": [as_json], "tools": json.dumps(tools)},
        {"messages": [old], "tools": tools},
        {"conversations": [{"from": "function_call", "value": json.dumps(calls)}], "tools": tools},
        {"prompt": [{"role": "system", "content": "", "tools": tools}], "completion": [answer]},
    ]
    properties = '{"properties": {"city": {"type": "string"}}, "enum": ["a", null], "items": {}}'
    for system, called in through_json(*map(json.dumps, rows)):
        assert '{"city": "Rome", "list": [{"x": 1}, null], "place": {}}' in called
        assert f'{{"name": "f", "parameters": {properties}' in system


@pytest.mark.parametrize("number", ["98765432109876543210", "1.0"])
def test_numbers_of_functions_and_calls_keep_their_value(number: str) -> None:
    arguments = f'{{"a": {number}, "b": [{number}]}}'
    function = f'{{"name": "f", "arguments": {arguments}}}'
    tool = f'{{"name": "f", "parameters": {{"maximum": {number}}}}}'
    with_text = f'{{"name": "f", "arguments": {json.dumps(arguments)}}}'
    calling = '{{"role": "assistant", "tool_calls": {}}}'
    forms = (f"[{function}]", json.dumps(f"[{function}]"), f"[{with_text}]")
    turns = [*map(calling.format, forms)]
    turns.append(f'{{"from": "function_call", "value": {json.dumps(function)}}}')
    rows = [f'{{"messages": [{one_turn}], "tools": [{tool}]}}' for one_turn in turns]
    system = f'{{"role": "system", "content": "", "tools": {json.dumps(f"[{tool}]")}}}'
    for system_text, called in through_json(*rows, f'{{"messages": [{system}, {turns[0]}]}}'):
        assert f"{tool}\n" in system_text
        assert called == f"<tool_call>\n{function}\n</tool_call>"


# --- reasoning, and texts of answers under keys that are not read

FOUR = {"role": "assistant", "content": "4"}
SUM = {"instruction": "2 + 2?", "output": "4"}
UNREAD: list[tuple[Json, set[str]]] = [
    ({"messages": [{**FOUR, "thinking": "2 + 2"}] * 2}, {"thinking"}),
    ({"conversations": [{**GPT, "rationale": "2 + 2", "weight": 0}]}, {"rationale"}),
    ({**SUM, "reasoning": "2 + 2", "source": "me"}, {"reasoning"}),
    ({"prompt": "?", "completion": [{**FOUR, "thought": "2"}], "think": "2"}, {"thought", "think"}),
    ({"prompt": "?", "chosen": {**FOUR, "reasoning": "2"}, "rejected": "5"}, {"reasoning"}),
    ({"messages": [{**FOUR, "id": "a", "reasoning": " ", "tokens": 3, "thought": None}]}, set()),
    ({"messages": [{**FOUR, "tool_calls": []}]}, set()),
    ({**SUM, "input": "a", "history": [["a", "b"]], "system": "c", "lang": "en"}, set()),
]


def test_texts_under_keys_that_are_not_read_are_known_and_counted_by_row() -> None:
    assert [unread_keys(row) for row, _ in UNREAD] == [keys for _, keys in UNREAD]
    rows = [("a.jsonl", number, UNREAD[at][0]) for number, at in enumerate((0, 2, 2), start=1)]
    tally, total = Tally(), Tally()
    assert len(list(accepted(rows, parse_conversation, tally))) == 3
    total.add(tally)
    assert total.to_json()["unread_keys"] == {"thinking": 1, "reasoning": 2}


def test_reasoning_is_read_of_turns_of_either_form() -> None:
    thought = {"reasoning_content": " 2 + 2 "}
    expected = Conversation((Message("assistant", "<think>\n2 + 2\n</think>\n\n4", thought=24),))
    sharegpt = {"conversations": [{"from": "gpt", "value": "4", **thought}]}
    for row in ({"messages": [{**FOUR, **thought}]}, sharegpt):
        assert parse_conversation(row) == expected and not unread_keys(row)


# --- documents


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
def test_a_document_has_its_field(row: Json, expected: Record | Skipped | Rejected) -> None:
    assert document_parser("text")(row) == expected


def test_the_field_of_a_document_has_the_name_of_the_setting_and_no_other() -> None:
    assert document_parser("body")({"body": "a", "text": 1}) == TextDocument("a")
    assert document_parser("body")({"text": "a", "content": "b"}) == Rejected("no key 'body'")
    assert document_parser("content")({"text": "a", "content": "b"}) == TextDocument("b")
    assert document_fields("body") == "the key 'body' (reading.text_field) with a text"


# --- the place of a record, and the split by it


def heldout(rows: list[TextDocument], fraction: float) -> set[Record]:
    return {record for held, record in split(iter(rows), fraction) if held}


SPLITS = [(300, 0.1), (4000, 0.01), (4000, 0.5), (5, 0.01), (40, 0.001)]
SPLITS += [(2, 0.9), (1, 1e-6), (29, 1e-6), (20, 0.0), (0, 0.1)]


@pytest.mark.parametrize(("count", "fraction"), SPLITS)
def test_the_split_loses_nothing_in_any_order(count: int, fraction: float) -> None:
    """Copies of a row go where it goes, also if it is the only one that is held out."""
    rows = documents(count)
    expected = heldout(rows, fraction)
    assert abs(len(expected) - count * fraction) < 5 * max(1.0, count * fraction) ** 0.5
    assert expected or not (count and fraction)
    if count and fraction < 1 / count:
        assert expected <= {min(rows, key=position)}
    for seed in range(3):
        shuffled = random.Random(seed).sample(rows * 3, 3 * count)
        sides = [*split(iter(shuffled), fraction)]
        records = sorted((record for _, record in sides), key=position)
        assert records == sorted(rows * 3, key=position)
        assert {record for held, record in sides if held} == expected
        assert not expected & {record for held, record in sides if not held}
    assert heldout(rows, fraction / 2) <= expected, "a larger part contains the smaller"


def test_a_place_depends_on_the_content_alone() -> None:
    same_text = Conversation((Message("user", "HiHello"), Message("assistant", "")))
    assert position(HELLO) == position(Conversation(HELLO.messages)) != position(same_text)
    assert len(content_hash(HELLO)) == 16
    assert position(HELLO) == int.from_bytes(content_hash(HELLO)[:8], "big") / 2**64


def heldout_of(rows: list[TextDocument]) -> set[str]:
    share = heldout_share(rows)
    return {row.text for row in rows if position(row) < share}


def test_how_much_is_held_out_of_how_many_rows() -> None:
    shares = {0: 0.2, 1: 0.2, 40: 0.2, 250: 0.2, 500: 0.1, 2000: 0.025, 2500: 0.02, 9000: 0.02}
    assert {count: heldout_share(documents(count)) for count in shares} == pytest.approx(shares)
    # Rows that repeat others and rows beyond the limit do not count.
    assert heldout_share(documents(40) * 100) == heldout_share(documents(40)) == 0.2
    assert heldout_share(documents(2000), limit=250) == 0.2
    assert heldout_share(documents(200), limit=9000) == heldout_share(documents(200))
    rows = iter(documents(9000))
    assert heldout_share(rows) == 0.02
    assert len(list(rows)) == 9000 - 2500, "no more are read than decide"


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
