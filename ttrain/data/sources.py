"""Records out of JSON objects: documents and conversations, and the split into training and held-out part."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from ttrain.data.chat import ROLES, Message
from ttrain.data.jsonl import Tally, records

ROLE_NAMES = {**{role: role for role in ROLES}, "human": "user", "gpt": "assistant"}  # the last two are ShareGPT's
TOOL_ROLES = ("function_call", "observation")  # ShareGPT's too
DOCUMENT_FIELDS = "the key '{}' (reading.text_field) with a text"
CHAT_FIELDS = "'messages' or 'conversations' with role and content, or 'instruction' with 'output'"


@dataclass(frozen=True)
class Document:
    """A text to learn from."""

    text: str

    def content(self) -> bytes:
        """What identifies the record, wherever it stands."""
        return self.text.encode("utf-8")

    def to_json(self) -> dict[str, Any]:
        return {"text": self.text}


@dataclass(frozen=True)
class Conversation:
    """Turns of system, user, assistant and tool, with at least one answer."""

    messages: tuple[Message, ...]

    def content(self) -> bytes:
        """What identifies the record, wherever it stands."""
        return orjson.dumps([[message.role, message.content] for message in self.messages])

    def to_json(self) -> dict[str, Any]:
        return {"messages": [{"role": message.role, "content": message.content} for message in self.messages]}


Record = Document | Conversation
Parser = Callable[[dict[str, Any]], "Record | Skipped | Rejected"]


@dataclass(frozen=True)
class Skipped:
    """A row left out by a documented rule."""

    rule: str


@dataclass(frozen=True)
class Rejected:
    """A row that is wrong."""

    reason: str


def read(paths: Sequence[str], parse: Parser, tally: Tally, max_line_bytes: int) -> Iterator[Record]:
    """Good records of the files in order; the tally counts the others."""
    for path, number, value in records(paths, tally, max_line_bytes):
        parsed = parse(value)
        if isinstance(parsed, Rejected):
            tally.reject(path, number, parsed.reason)
        elif isinstance(parsed, Skipped):
            tally.skipped[parsed.rule] += 1
        else:
            tally.kept += 1
            yield parsed


def document_parser(text_field: str) -> Parser:
    """Documents whose text stands under `text_field`."""

    def parse(value: dict[str, Any]) -> Record | Skipped | Rejected:
        if text_field not in value:
            return Rejected(f"no key '{text_field}'")
        text = value[text_field]
        if not isinstance(text, str):
            return Rejected(f"'{text_field}' is {type(text).__name__}, not text")
        return Document(text) if text.strip() else Skipped("empty text")

    return parse


def parse_conversation(value: dict[str, Any]) -> Record | Skipped | Rejected:
    """A chat in one of the known shapes, decided by its keys: messages, conversations, then instruction with output."""
    turns = value.get("messages", value.get("conversations"))
    if turns is None and "instruction" in value:
        turns = _alpaca(value)
    if turns is None:
        return Rejected("none of the keys 'messages', 'conversations', 'instruction'")
    if not isinstance(turns, list) or not turns:
        return Rejected("the conversation is not a list of turns")
    messages: list[Message] = []
    for turn in turns:
        if not isinstance(turn, dict):
            return Rejected("a turn is not an object")
        name, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if name in TOOL_ROLES:
            return Skipped("tool calls, which are not supported yet")
        if not isinstance(name, str) or name not in ROLE_NAMES:
            return Rejected(f"unknown role {str(name)[:40]!r}")
        if turn.get("tool_calls"):
            return Skipped("tool calls, which are not supported yet")
        if not isinstance(content, str):
            return Rejected(f"the content of a turn is {type(content).__name__}, not text")
        messages.append(Message(ROLE_NAMES[name], content))
    if not any(message.role == "assistant" and message.content.strip() for message in messages):
        return Skipped("no answer")
    return Conversation(tuple(messages))


def _alpaca(value: dict[str, Any]) -> list[Any]:
    prompt, extra = value["instruction"], value.get("input")
    if isinstance(prompt, str) and isinstance(extra, str) and extra.strip():
        prompt = f"{prompt}\n\n{extra}"
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": value.get("output")}]


def position(record: Record) -> float:
    """Where the record's content falls in [0, 1): uniform, and the same in whatever file it stands."""
    return int.from_bytes(hashlib.blake2b(record.content(), digest_size=8).digest()) / 2**64


def split(rows: Iterator[Record], fraction: float) -> Iterator[tuple[bool, Record]]:
    """(held out?, record): held out is what falls below `fraction`, so nothing moves when files are added.

    Where that is nothing, the lowest row (and its copies) is held out, so that a small set can be evaluated too; it is kept
    back until then.
    """
    lowest: list[Record] = []
    lowest_place = 1.0
    any_heldout = fraction == 0
    for record in rows:
        place = position(record)
        if place < fraction:
            any_heldout = True
            yield True, record
        elif any_heldout or place > lowest_place:
            yield False, record
        else:
            if place < lowest_place:
                yield from ((False, other) for other in lowest)
                lowest, lowest_place = [], place
            lowest.append(record)
    yield from ((not any_heldout, record) for record in lowest)
