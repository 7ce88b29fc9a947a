"""Records out of JSON objects: documents and conversations, and the split into training and held-out part."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from ttrain.data import tools
from ttrain.data.chat import Message
from ttrain.data.jsonl import Tally, records
from ttrain.data.templates import ROLES
from ttrain.data.tools import Malformed, kind_of

TEXT = "text"  # the default of reading.text_field, where the others are tried too
DOCUMENT_KEYS = (TEXT, "content", "body", "paragraphs")
SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "function_call": "assistant", "observation": "tool", "tool": "tool",
}  # fmt: skip
# Keys by whose values an evaluation can be divided. They go along with held-out records, and identify none.
LABELS, LABEL_CHARACTERS = ("source", "lang"), 64
CHAT_FIELDS = "'messages' or 'conversations' with role and content, or 'instruction' with 'output'"
# A character that shows: neither white space nor one of no width (soft hyphen, joiners, direction marks, BOM).
VISIBLE = re.compile(r"[^\s\u00ad\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Document:
    """A text to learn from, and what its row says of it."""

    text: str
    labels: Labels = ()

    def content(self) -> bytes:
        """What identifies the record, wherever it stands."""
        return self.text.encode("utf-8")

    def to_json(self) -> dict[str, Any]:
        return {"text": self.text, **dict(self.labels)}


@dataclass(frozen=True)
class Conversation:
    """Turns of system, user, assistant and tool in any order, with at least one answer; and what their row says of them."""

    messages: tuple[Message, ...]
    labels: Labels = ()

    def content(self) -> bytes:
        """What identifies the record, wherever it stands."""
        return orjson.dumps([[message.role, message.content] for message in self.messages])

    def to_json(self) -> dict[str, Any]:
        messages = [{"role": message.role, "content": message.content} for message in self.messages]
        return {"messages": messages, **dict(self.labels)}


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
    return kept(records(paths, tally, max_line_bytes), parse, tally)


def kept(rows: Iterable[tuple[str, int, dict[str, Any]]], parse: Parser, tally: Tally) -> Iterator[Record]:
    """Good records of (path, line number, JSON object) rows; the tally counts the others."""
    for path, number, value in rows:
        parsed = parse(value)
        if isinstance(parsed, Rejected):
            tally.reject(path, number, parsed.reason, _excerpt(value))
        elif isinstance(parsed, Skipped):
            tally.skipped[parsed.rule] += 1
        else:
            tally.kept += 1
            yield parsed


def _excerpt(value: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(value, default=repr)
    except TypeError:  # nested deeper than orjson writes, which is less deep than it reads
        return b""


def is_blank(text: str) -> bool:
    """Whether nothing of the text shows."""
    return VISIBLE.search(text) is None


def document_keys(text_field: str) -> tuple[str, ...]:
    """The keys that a document's text is looked for under, in their order."""
    return DOCUMENT_KEYS if text_field == TEXT else (text_field,)


def document_fields(text_field: str, prefix: str = "reading.") -> str:
    """The same, for a message; `prefix` stands before the name of the setting that says `text_field`."""
    return f"the key {' or '.join(repr(key) for key in document_keys(text_field))} ({prefix}text_field) with a text"


def document_parser(text_field: str) -> Parser:
    """Documents whose text stands under `text_field`; under the first of DOCUMENT_KEYS where that is the default, "text".

    `paragraphs` may be a list of texts, which newlines join.
    """
    keys = document_keys(text_field)
    missing = Rejected(f"no key {' or '.join(repr(key) for key in keys)}")

    def parse(value: dict[str, Any]) -> Record | Skipped | Rejected:
        for key in keys:
            if key in value:
                break
        else:
            return missing
        text = value[key]
        if key == "paragraphs" and isinstance(text, list) and all(isinstance(part, str) for part in text):
            text = "\n".join(text)
        if not isinstance(text, str):
            return Rejected(f"'{key}' is {kind_of(text)}, not text")
        text = text.removeprefix("\ufeff")
        return Skipped("empty text") if is_blank(text) else Document(text, labels_of(value))

    return parse


def labels_of(row: dict[str, Any]) -> Labels:
    """The LABELS that a row has as a short text; a long one tells rows apart and groups none."""
    return tuple(
        (key, value) for key in LABELS if isinstance(value := row.get(key), str) and 0 < len(value) <= LABEL_CHARACTERS
    )


def parse_conversation(value: dict[str, Any]) -> Record | Skipped | Rejected:
    """A chat in one of the known shapes, decided by the first of these keys: messages, conversations, instruction.

    A key that is null is as good as absent. Roles may come in any order.
    """
    try:
        messages = messages_of(value)
    except Malformed as error:
        return Rejected(str(error))
    except RecursionError:
        return Rejected("the functions or the arguments of a call are nested too deeply")
    if not any(message.role == "assistant" and not is_blank(message.content) for message in messages):
        return Skipped("no answer")
    return Conversation(tuple(messages), labels_of(value))


def messages_of(value: dict[str, Any]) -> list[Message]:
    """The turns of a chat in one of the known shapes, with an answer or without. Raises Malformed with the reason."""
    shape = next((key for key in ("messages", "conversations", "instruction") if value.get(key) is not None), None)
    if shape is None:
        raise Malformed("none of the keys 'messages', 'conversations', 'instruction' holds a conversation")
    messages = _alpaca(value) if shape == "instruction" else _turns(value[shape], shape, bool(value.get("tools")))
    system = value.get("system")
    if not (system is None or isinstance(system, str)):
        raise Malformed(f"'system' is {kind_of(system)}, not text")
    if system and not is_blank(system):
        if any(message.role == "system" for message in messages):
            raise Malformed("both the key 'system' and a system turn")
        messages.insert(0, Message("system", system))
    if functions := tools.tools_text(value.get("tools")):
        begins = messages[0].role == "system"
        first = Message("system", tools.with_tools(messages[0].content if begins else "", functions))
        messages[: int(begins)] = [first]
    return messages


def _alpaca(value: dict[str, Any]) -> list[Message]:
    texts = {}
    for key in ("instruction", "output"):
        text = value.get(key)
        if key not in value:
            raise Malformed(f"no key '{key}' beside 'instruction'")
        if not isinstance(text, str):
            raise Malformed(f"'{key}' is {kind_of(text)}, not text")
        if is_blank(text):
            raise Malformed(f"'{key}' is empty")
        texts[key] = text
    extra = value.get("input")
    if not (extra is None or isinstance(extra, str)):
        raise Malformed(f"'input' is {kind_of(extra)}, not text")
    prompt = f"{texts['instruction']}\n\n{extra}" if extra and not is_blank(extra) else texts["instruction"]
    return [Message("user", prompt), Message("assistant", texts["output"])]


def _turns(turns: object, shape: str, has_tools: bool) -> list[Message]:
    if not isinstance(turns, list):
        raise Malformed(f"'{shape}' is {kind_of(turns)}, not a list of turns")
    if not turns:
        raise Malformed(f"'{shape}' has no turns")
    messages: list[Message] = []
    call_ids: set[str] = set()
    called = False
    for turn in turns:
        if not isinstance(turn, dict):
            raise Malformed(f"a turn is {kind_of(turn)}, not an object")
        message, calls = _turn(turn, has_tools)
        if message.role == "tool":
            number = turn.get("tool_call_id")
            if not called:
                raise Malformed("a tool turn without a call before it")
            if number is not None and (not isinstance(number, str) or number not in call_ids):
                raise Malformed(f"tool_call_id {str(number)[:40]!r}, which no call before it has")
        called = called or (message.role == "assistant" and tools.has_calls(message.content))
        call_ids.update(call["id"] for call in calls if isinstance(call.get("id"), str))
        messages.append(message)
    return messages


def _turn(turn: dict[str, Any], has_tools: bool) -> tuple[Message, list[dict[str, Any]]]:
    """The turn and its calls, which the content holds as text."""
    is_sharegpt = "role" not in turn and "from" in turn
    name, key = (turn["from"], "value") if is_sharegpt else (turn.get("role"), "content")
    role = SHAREGPT_ROLES.get(name) if is_sharegpt and isinstance(name, str) else name
    if role not in ROLES:
        raise Malformed(f"unknown role {str(name)[:40]!r}" if "role" in turn or is_sharegpt else "a turn without a role")
    if is_sharegpt and name == "function_call":
        calls = tools.calls_of(turn.get(key), "'function_call'")
        return Message(role, tools.with_calls("", calls)), calls
    calls = tools.calls_of(turn.get("tool_calls"))
    if calls and role != "assistant":
        raise Malformed(f"'tool_calls' on a turn of role '{role}'")
    content = _text(turn, key, role, empty=bool(calls))
    functions = tools.tools_text(turn.get("tools"))
    if functions and (role != "system" or has_tools):
        raise Malformed("'tools' stands on a turn that is not the system's, or twice")
    return Message(role, tools.with_tools(tools.with_calls(content, calls), functions)), calls


def _text(turn: dict[str, Any], key: str, role: str, *, empty: bool) -> str:
    """The text under `key`, also where it comes in parts; `empty`: null is as good as none."""
    content = turn.get(key)
    if content is None and empty:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Malformed(
            f"the content of a turn of role '{role}' is {kind_of(content) if key in turn else 'missing'}, not text"
        )
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            found = repr(str(part.get("type"))[:40]) if isinstance(part, dict) else kind_of(part)
            raise Malformed(f"a content part is {found}, not a text")
    return "".join(part["text"] for part in content)


def content_hash(record: Record) -> bytes:
    """16 bytes that identify what the record says, wherever it stands."""
    return hash_of(record.content())


def hash_of(content: bytes) -> bytes:
    """16 bytes that identify the content of a record."""
    return hashlib.blake2b(content, digest_size=16).digest()


def position(record: Record) -> float:
    """Where the record's content falls in [0, 1): uniform, and the same in whatever file it stands."""
    return int.from_bytes(content_hash(record)[:8], "big") / 2**64


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
