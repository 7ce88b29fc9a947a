"""Records: the shapes of chats that are known, the rules for those that are not, and the split by content."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from ttrain.data.chat import Message
from ttrain.data.jsonl import Tally
from ttrain.data.sources import (
    Conversation,
    Document,
    Record,
    Rejected,
    Skipped,
    document_parser,
    parse_conversation,
    position,
    read,
    split,
)

HELLO = Conversation((Message("user", "Hi"), Message("assistant", "Hello")))
ROLES = ("system", "user", "assistant", "tool")

NO_TOOLS = "tool calls, which are not supported yet"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
        {"conversations": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"messages": [{"from": "human", "value": "Hi"}, {"role": "assistant", "content": "Hello"}]},
        {"instruction": "Hi", "output": "Hello"},
        {"instruction": "Hi", "input": "", "output": "Hello"},
        {"instruction": "Hi", "input": None, "output": "Hello"},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "instruction": "x"},
    ],
    ids=["messages", "conversations", "sharegpt", "mixed", "alpaca", "empty input", "null input", "messages come first"],
)
def test_every_known_shape_gives_the_same_chat(row: dict[str, Any]) -> None:
    assert parse_conversation(row) == HELLO


def test_an_alpaca_input_follows_its_instruction() -> None:
    parsed = parse_conversation({"instruction": "Add", "input": "1 2", "output": "3"})
    assert parsed == Conversation((Message("user", "Add\n\n1 2"), Message("assistant", "3")))


def test_all_four_roles_keep_their_turns_in_order() -> None:
    turns = [{"role": role, "content": role.upper()} for role in (*ROLES, "user", "assistant")]
    parsed = parse_conversation({"messages": turns})
    assert parsed == Conversation(tuple(Message(turn["role"], turn["content"]) for turn in turns))


@pytest.mark.parametrize("role", ["bot", "User", "ASSISTANT", " user", "", "humans", None, 3, ["user"], {"a": 1}])
def test_an_unknown_role_is_rejected_by_name_and_never_taken_for_another(role: Any) -> None:
    parsed = parse_conversation({"messages": [{"role": role, "content": "x"}, {"role": "assistant", "content": "y"}]})
    assert isinstance(parsed, Rejected)
    assert "unknown role" in parsed.reason
    assert str(role)[:5] in parsed.reason


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "none of the keys"),
        ({"text": "a"}, "none of the keys"),
        ({"messages": None}, "none of the keys"),
        ({"messages": []}, "not a list of turns"),
        ({"messages": "Hi"}, "not a list of turns"),
        ({"messages": {"role": "user"}}, "not a list of turns"),
        ({"messages": ["Hi"]}, "a turn is not an object"),
        ({"messages": [{"content": "x"}]}, "unknown role"),
        ({"messages": [{"role": "user"}]}, "NoneType, not text"),
        ({"messages": [{"role": "user", "content": 1}]}, "int, not text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, "list, not text"),
        ({"messages": [{"role": "assistant", "content": None}]}, "NoneType, not text"),
        ({"instruction": "x"}, "NoneType, not text"),
        ({"instruction": None, "output": "x"}, "NoneType, not text"),
        ({"instruction": ["x"], "input": "y", "output": "x"}, "list, not text"),
    ],
)
def test_a_wrong_chat_is_rejected_with_its_reason(row: dict[str, Any], reason: str) -> None:
    parsed = parse_conversation(row)
    assert isinstance(parsed, Rejected)
    assert reason in parsed.reason


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"messages": [{"role": "user", "content": "Hi"}]}, "no answer"),
        ({"messages": [{"role": "system", "content": "Hi"}]}, "no answer"),
        ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " \n"}]}, "no answer"),
        ({"instruction": "x", "output": ""}, "no answer"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]}, NO_TOOLS),
    ],
)
def test_a_chat_without_anything_to_learn_is_skipped_by_a_named_rule(row: dict[str, Any], rule: str) -> None:
    assert parse_conversation(row) == Skipped(rule)


def test_an_empty_turn_beside_an_answer_is_kept() -> None:
    turns = [("system", ""), ("user", ""), ("assistant", "Hello")]
    parsed = parse_conversation({"messages": [{"role": role, "content": content} for role, content in turns]})
    assert parsed == Conversation(tuple(Message(*turn) for turn in turns))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "a"}, Document("a")),
        ({"text": " a\n"}, Document(" a\n")),
        ({"text": "\u200b"}, Document("\u200b")),
        ({"text": ""}, Skipped("empty text")),
        ({"text": " \n\t"}, Skipped("empty text")),
        ({"text": None}, Rejected("'text' is NoneType, not text")),
        ({"text": 1}, Rejected("'text' is int, not text")),
        ({"text": True}, Rejected("'text' is bool, not text")),
        ({"text": ["a"]}, Rejected("'text' is list, not text")),
        ({"Text": "a"}, Rejected("no key 'text'")),
    ],
)
def test_a_document_is_a_text_under_its_field(row: dict[str, Any], expected: Record | Skipped | Rejected) -> None:
    assert document_parser("text")(row) == expected


def test_the_field_of_a_document_has_the_name_that_is_asked_for() -> None:
    assert document_parser("body")({"body": "a", "text": 1}) == Document("a")


def test_every_row_is_kept_skipped_or_rejected(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": ""}, {"text": 1}, {"txt": "b"}, {"text": "c"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tally = Tally()
    assert list(read([str(path)], document_parser("text"), tally, 1000)) == [Document("a"), Document("c")]
    assert tally.to_json() == {
        "rows": 5, "kept": 2, "skipped": {"empty text": 1},
        "rejected": {"'text' is int, not text": 1, "no key 'text'": 1},
    }  # fmt: skip


def test_a_record_written_as_json_is_read_back_equal() -> None:
    document = Document("a\u2028b")
    assert document_parser("text")(document.to_json()) == document
    assert parse_conversation(HELLO.to_json()) == HELLO


# --- the split


def documents(count: int, prefix: str = "document") -> list[Document]:
    return [Document(f"{prefix} {number}") for number in range(count)]


def heldout(rows: list[Document], fraction: float) -> set[Record]:
    return {record for held, record in split(iter(rows), fraction) if held}


def test_the_split_loses_and_doubles_nothing() -> None:
    for count in (0, 1, 2, 3, 50, 500):
        for fraction in (0.0, 0.001, 0.1, 0.9):
            rows = documents(count)
            after = [record for _, record in split(iter(rows), fraction)]
            assert sorted(after, key=position) == sorted(rows, key=position)


def test_the_split_does_not_depend_on_the_order_of_the_rows() -> None:
    for count, fraction in ((300, 0.1), (5, 0.01), (40, 0.001)):
        rows = documents(count)
        expected = heldout(rows, fraction)
        for seed in range(5):
            shuffled = random.Random(seed).sample(rows, count)
            assert heldout(shuffled, fraction) == expected


def test_files_that_are_added_move_no_row_to_the_other_side() -> None:
    before, more = documents(300), documents(300, "another")
    assert heldout(more + before, 0.1) == heldout(before, 0.1) | heldout(more, 0.1)


def test_the_fraction_is_respected() -> None:
    rows = documents(20_000)
    for fraction in (0.01, 0.1, 0.5):
        expected = 20_000 * fraction
        assert abs(len(heldout(rows, fraction)) - expected) < 5 * expected**0.5
    assert heldout(rows, 0.0) == set()
    assert heldout(rows, 0.01) < heldout(rows, 0.1) < heldout(rows, 0.5), "a larger part contains the smaller"


def test_at_least_one_row_is_held_out_of_a_small_set() -> None:
    for count in range(1, 30):
        rows = documents(count)
        assert heldout(rows, 1e-6) == {min(rows, key=position)}


@pytest.mark.parametrize("fraction", [1e-6, 0.02, 0.3])
def test_no_content_stands_on_both_sides(fraction: float) -> None:
    """Copies of a row go where it goes, also when it is the one that is held out for want of others."""
    for count in (1, 3, 20):
        for seed in range(10):
            rows = random.Random(seed).sample(documents(count) * 3, 3 * count)
            sides: dict[bool, set[Record]] = {True: set(), False: set()}
            for held, record in split(iter(rows), fraction):
                sides[held].add(record)
            assert not sides[True] & sides[False]


def test_a_place_depends_on_the_content_alone_and_is_uniform() -> None:
    assert position(Document("a")) == position(Document("a")) != position(Document("b"))
    assert position(HELLO) == position(Conversation(HELLO.messages))
    assert position(HELLO) != position(Conversation((Message("user", "HiHello"), Message("assistant", ""))))
    places = sorted(position(row) for row in documents(5000))
    assert max(abs(place - number / 5000) for number, place in enumerate(places)) < 0.03
