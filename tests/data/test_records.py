"""Records: the shapes of chats that are known, the rules for those that are not, and the split by content."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat_turns import ADD, chat

from ttrain.data.chat_shapes import is_chat
from ttrain.data.chat_templates import Message, is_live
from ttrain.data.jinja_templates import ROLES
from ttrain.data.records import (
    Conversation,
    Record,
    Rejected,
    Skipped,
    TextDocument,
    content_hash,
    document_fields,
    document_parser,
    parse_conversation,
    position,
    split,
)

HELLO = Conversation((Message("user", "Hi"), Message("assistant", "Hello")))


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
        {"conversations": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"messages": [{"from": "human", "value": "Hi"}, {"role": "assistant", "content": "Hello"}]},
        {"messages": [
            {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
            {"role": "assistant", "content": "Hello", "tool_calls": None},
        ]},
        {"instruction": "Hi", "output": "Hello"},
        {"instruction": "Hi", "input": " \n", "output": "Hello"},
        {"instruction": "Hi", "input": None, "output": "Hello", "system": None, "tools": []},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "conversations": 1,
         "instruction": "x", "prompt": "y"},
        {"instruction": "Hi", "output": "Hello", "history": None, "prompt": "y", "completion": "z"},
        {"instruction": "Hi", "output": "Hello", "history": []},
        {"instruction": "Hi", "output": "Hello", "history": " "},
        {"prompt": "Hi", "completion": "Hello"},
        {"prompt": [{"from": "human", "value": "Hi"}], "completion": "Hello", "tools": None},
        {"prompt": "Hi", "completion": [{"role": "assistant", "content": "Hello", "weight": 1}]},
        {"messages": None, "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}],
         "instruction": "x", "output": "y", "tools": None, "system": ""},
    ],
    ids=["messages", "conversations", "sharegpt", "mixed", "parts", "alpaca", "blank input", "null input",
         "messages come first", "instruction comes first", "no history", "blank history", "prompt", "turns and a text",
         "a text and turns", "null is as good as absent"],
)  # fmt: skip
def test_every_known_shape_gives_the_same_chat(row: dict[str, Any]) -> None:
    assert parse_conversation(row) == HELLO


def test_an_alpaca_history_is_the_turns_before_its_instruction() -> None:
    row = {
        "instruction": "3?",
        "input": "x",
        "output": "c",
        "history": [["1?", "a"], ["2?", ""]],
        "system": "S",
        "tools": [],
    }
    turns = [("system", "S"), ("user", "1?"), ("assistant", "a"), ("user", "2?"), ("assistant", ""), ("user", "3?\n\nx"),
             ("assistant", "c")]  # fmt: skip
    assert parse_conversation(row) == Conversation(tuple(Message(*turn) for turn in turns))


def test_of_a_prompt_and_its_completion_the_completion_alone_is_learnt() -> None:
    """As TRL trains them by default (`completion_only_loss`), also where the prompt holds answers."""
    before = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "2?"}]
    row = {"prompt": before, "completion": [{"role": "assistant", "content": "b"}], "system": "S", "tools": [ADD]}
    parsed = parse_conversation(row)
    assert isinstance(parsed, Conversation)
    assert [(turn.role, turn.in_loss) for turn in parsed.messages] == [
        ("system", True), ("user", True), ("assistant", False), ("user", True), ("assistant", True),
    ]  # fmt: skip
    assert parsed.messages[0].content.startswith("S\n\nYou may call these functions")
    assert [turn.content for turn in parsed.messages if is_live(turn)] == ["b"]
    learnt_whole = parse_conversation({"messages": [*before, *row["completion"]], "system": "S", "tools": [ADD]})
    assert isinstance(learnt_whole, Conversation)
    assert content_hash(learnt_whole) != content_hash(parsed), "another loss mask is another row"
    assert parse_conversation({"prompt": before, "completion": [{"role": "user", "content": "b"}]}) == Skipped("no answer")
    called = {"role": "assistant", "tool_calls": [{"id": "1", "name": "f", "arguments": {}}]}
    result = {"role": "tool", "content": "2", "tool_call_id": "1"}
    parsed = parse_conversation(
        {"prompt": [*before, called], "completion": [result, {"role": "assistant", "content": "2."}]}
    )
    assert isinstance(parsed, Conversation), "a result answers a call that stands in the prompt"


def test_a_weight_of_0_makes_an_answer_context() -> None:
    for turn in ({"role": "assistant", "content": "a"}, {"from": "gpt", "value": "a"},
                 {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}):  # fmt: skip
        for weight, in_loss in ((0, False), (0.0, False), (False, False), (1, True), (None, True)):
            parsed = parse_conversation(chat({**turn, "weight": weight}))
            assert isinstance(parsed, Conversation)
            assert [message.in_loss for message in parsed.messages] == [True, in_loss, True]
    assert parse_conversation(chat({"role": "user", "content": "a", "weight": 7})) != parse_conversation(chat())
    only = {"messages": [{"role": "assistant", "content": "a", "weight": 0}]}
    assert parse_conversation(only) == Skipped("no answer")


def test_a_prompt_alone_makes_no_chat_of_a_document() -> None:
    assert not is_chat({"text": "a", "prompt": "b"})
    assert is_chat({"prompt": "a", "completion": "b"})
    assert is_chat({"history": [], "instruction": "b"})


@pytest.mark.parametrize("role", ["bot", "User", " user", "human", "", None, ["user"]])
def test_an_unknown_role_is_rejected_by_name_and_never_taken_for_another(role: Any) -> None:
    parsed = parse_conversation({"messages": [{"role": role, "content": "x"}, {"role": "assistant", "content": "y"}]})
    assert parsed == Rejected(f"unknown role {str(role)!r}; write one of system, user, assistant, tool")
    if role not in ("human", "gpt"):
        parsed = parse_conversation({"conversations": [{"from": role, "value": "x"}]})
        assert isinstance(parsed, Rejected)
        assert parsed.reason.startswith(f"unknown role {str(role)!r}; write one of system, human, user, gpt")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "none of the keys"),
        ({"messages": []}, "'messages' has no turns"),
        ({"conversations": "Hi"}, "'conversations' is text, not a list of turns"),
        ({"messages": ["Hi"]}, "a turn is text, not an object"),
        ({"messages": [{"content": "x"}]}, "a turn without a role; write 'role' as one of system, user, assistant, tool"),
        (chat({"role": "user"}), "the 'content' of a turn of role 'user' is missing, not text"),
        (chat({"from": "human", "content": "x"}), "the 'value' of a turn of role 'user' is missing, not text"),
        (chat({"role": "system", "content": None}), "the 'content' of a turn of role 'system' is null, not text"),
        (chat({"role": "user", "content": {"text": "x"}}), "is an object, not text"),
        (chat({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}),
         "the 'type' of a content part is 'image_url'; only text is read: write"),
        (chat({"role": "user", "content": [{"type": "text", "text": 1}]}),
         "the 'text' of a content part is a number; write {\"type\": \"text\""),
        (chat({"role": "user", "content": ["x"]}), 'a content part is a bare text; write {"type": "text", "text": "..."}'),
        (chat({"role": "user", "content": [{"text": "x"}]}), "the 'type' of a content part is missing; only text"),
        (chat({"role": "assistant", "content": "a", "weight": 0.5}), "the 'weight' of a turn is 0.5; write 1"),
        (chat(system=1), "'system' is a number, not text"),
        (chat({"role": "system", "content": "a"}, system="b"), "both the key 'system' and a system turn"),
        ({"instruction": "x"}, "no key 'output'"),
        ({"instruction": "x", "output": " "}, "'output' is empty"),
        ({"instruction": ["x"], "input": "y", "output": "x"}, "'instruction' is a list, not text"),
        ({"instruction": "x", "output": "y", "history": "z"}, "'history' is text; write a list of pairs"),
        ({"instruction": "x", "output": "y", "history": ["a", "b"]}, "'history' holds text; write a list of pairs"),
        ({"instruction": "x", "output": "y", "history": [["a"]]}, "'history' holds a list of 1; write a list of pairs"),
        ({"instruction": "x", "output": "y", "history": [["a", None]]}, "'history' holds a pair with null; write"),
        ({"prompt": "x"}, "no key 'completion' beside 'prompt'"),
        ({"completion": "x"}, "no key 'prompt' beside 'completion'"),
        ({"prompt": 1, "completion": "x"}, "'prompt' is a number, not text or a list of turns"),
        ({"prompt": " ", "completion": "x"}, "'prompt' is empty; write a text"),
        ({"prompt": ["x"], "completion": "x"}, "a turn is text, not an object such as"),
        ({"instruction": "x", "input": 1, "output": "x"}, "'input' is a number, not text"),
    ],
)  # fmt: skip
def test_a_wrong_chat_is_rejected_with_its_reason(row: dict[str, Any], reason: str) -> None:
    parsed = parse_conversation(row)
    assert isinstance(parsed, Rejected)
    assert reason in parsed.reason


@pytest.mark.parametrize(
    "turns",
    [
        [("user", "Hi")],
        [("user", "Hi"), ("assistant", "\u200b\ufeff")],
        [("assistant", ""), ("user", "Hi")],
    ],
)
def test_a_chat_without_an_answer_is_skipped(turns: list[tuple[str, str]]) -> None:
    assert parse_conversation({"messages": [{"role": a, "content": b} for a, b in turns]}) == Skipped("no answer")


def test_turns_come_in_any_order_and_may_be_empty_beside_an_answer() -> None:
    for roles in (("assistant", "user", "user"), ("user", "assistant", "assistant", "system"), ("assistant",)):
        turns = [*(Message(role, role.upper()) for role in roles), Message("user", "")]
        rows = [{"role": turn.role, "content": turn.content} for turn in turns]
        assert parse_conversation({"messages": rows}) == Conversation(tuple(turns))


KEYS = (
    "messages", "conversations", "role", "content", "from", "value", "tools", "tool_calls", "function", "name", "arguments",
    "tool_call_id", "id", "type", "text", "instruction", "input", "output", "system", "history",
    "prompt", "completion", "weight",
)  # fmt: skip
WORDS = ("user", "assistant", "tool", "system", "human", "gpt", "function_call", "observation", "text", "f", "{}", "[]", "")
JSON = st.recursive(
    st.sampled_from([*WORDS, None, True, 1, 1.5]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(row=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4))
def test_no_row_is_beyond_the_parsers(row: dict[str, Any]) -> None:
    for parse in (parse_conversation, document_parser("text"), document_parser("content")):
        parsed = parse(row)
        if isinstance(parsed, TextDocument | Conversation):
            again = document_parser("text") if isinstance(parsed, TextDocument) else parse_conversation
            assert again(parsed.to_json()) == parsed
        else:
            assert isinstance(parsed, Skipped | Rejected)


@settings(max_examples=50, deadline=None)
@given(
    turns=st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(ROLES), "content": st.sampled_from(["", " ", "x", None])}, optional={
            "tool_calls": st.sampled_from([None, [], [{"name": "f", "arguments": {}}], [{"name": "f", "arguments": 1}]]),
            "tools": st.sampled_from([None, "[]", [{"name": "f"}]]), "weight": st.sampled_from([None, 0, 1.0, True, 2]),
        }), max_size=5,
    )
)  # fmt: skip
def test_what_is_kept_is_read_back_equal(turns: list[dict[str, Any]]) -> None:
    parsed = parse_conversation({"messages": turns})
    if isinstance(parsed, Conversation):
        written = json.loads(json.dumps(parsed.to_json()))
        assert parse_conversation(written) == parsed
        assert tuple(map(Message.from_json, written["messages"])) == parsed.messages
        assert {message.role for message in parsed.messages} <= set(ROLES)


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
        ({"paragraphs": ["a", 1]}, Rejected("'paragraphs' holds a number; write a text, or a list of texts")),
        ({"Text": "a"}, Rejected("no key 'text' or 'content' or 'body' or 'paragraphs'")),
    ],
)
def test_a_document_is_a_text_under_its_field(row: dict[str, Any], expected: Record | Skipped | Rejected) -> None:
    assert document_parser("text")(row) == expected


def test_the_field_of_a_document_has_the_name_that_is_asked_for_and_no_other() -> None:
    assert document_parser("body")({"body": "a", "text": 1}) == TextDocument("a")
    assert document_parser("body")({"text": "a", "content": "b"}) == Rejected("no key 'body'")
    assert document_parser("content")({"text": "a", "content": "b"}) == TextDocument("b")
    assert document_fields("body") == "the key 'body' (reading.text_field) with a text"


# --- the split


def documents(count: int) -> list[TextDocument]:
    return [TextDocument(f"document {number}") for number in range(count)]


def heldout(rows: list[TextDocument], fraction: float) -> set[Record]:
    return {record for held, record in split(iter(rows), fraction) if held}


def test_the_split_loses_nothing_and_does_not_depend_on_the_order_of_the_rows() -> None:
    for count, fraction in ((300, 0.1), (5, 0.01), (40, 0.001), (2, 0.9), (0, 0.1)):
        rows = documents(count)
        assert sorted((record for _, record in split(iter(rows), fraction)), key=position) == sorted(rows, key=position)
        expected = heldout(rows, fraction)
        for seed in range(5):
            shuffled = random.Random(seed).sample(rows, count)
            assert heldout(shuffled, fraction) == expected


def test_the_fraction_is_respected() -> None:
    rows = documents(4000)
    for fraction in (0.01, 0.1, 0.5):
        expected = 4000 * fraction
        assert abs(len(heldout(rows, fraction)) - expected) < 5 * expected**0.5
    assert heldout(rows, 0.0) == set()
    assert heldout(rows, 0.01) < heldout(rows, 0.1) < heldout(rows, 0.5), "a larger part contains the smaller"


def test_at_least_one_row_is_held_out_of_a_small_set() -> None:
    for count in (1, 2, 3, 29):
        rows = documents(count)
        assert heldout(rows, 1e-6) == {min(rows, key=position)}


@pytest.mark.parametrize("fraction", [1e-6, 0.02, 0.3])
def test_no_content_stands_on_both_sides(fraction: float) -> None:
    """Copies of a row go where it goes, also when it is the one that is held out for want of others."""
    for count in (1, 3, 20):
        for seed in range(3):
            rows = random.Random(seed).sample(documents(count) * 3, 3 * count)
            sides: dict[bool, set[Record]] = {True: set(), False: set()}
            for held, record in split(iter(rows), fraction):
                sides[held].add(record)
            assert not sides[True] & sides[False]


def test_a_place_depends_on_the_content_alone() -> None:
    assert position(HELLO) == position(Conversation(HELLO.messages))
    assert position(HELLO) != position(Conversation((Message("user", "HiHello"), Message("assistant", ""))))
    assert len(content_hash(HELLO)) == 16
    assert position(HELLO) == int.from_bytes(content_hash(HELLO)[:8], "big") / 2**64
