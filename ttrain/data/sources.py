"""Records out of JSON objects: documents and conversations, and the split into training and held-out part."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from ttrain.data.chat_shapes import is_blank, messages_of
from ttrain.data.chat_templates import Message
from ttrain.data.jsonl import Tally, records
from ttrain.data.tools import Malformed, kind_of

TEXT = "text"  # the default of reading.text_field, where the others are tried too
DOCUMENT_KEYS = (TEXT, "content", "body", "paragraphs")
# Keys by whose values an evaluation can be divided. They go along with held-out records, and identify none.
LABELS, LABEL_CHARACTERS = ("source", "lang"), 64
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
        return orjson.dumps([message.identity() for message in self.messages])

    def to_json(self) -> dict[str, Any]:
        return {"messages": [message.to_json() for message in self.messages], **dict(self.labels)}


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


def read(paths: Sequence[str], parse: Parser, tally: Tally, max_line_bytes: int, text_field: str = TEXT) -> Iterator[Record]:
    """Good records of the files in order; the tally counts the others. `text_field` is the key of what `.txt` files say."""
    return kept(records(paths, tally, max_line_bytes, text_field), parse, tally)


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
        if key == "paragraphs" and isinstance(text, list):
            other = next((part for part in text if not isinstance(part, str)), "")
            if other != "":
                return Rejected(f"'paragraphs' holds {kind_of(other)}; write a text, or a list of texts")
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
    """A chat in one of the shapes that `messages_of` reads.

    A key that is null is as good as absent. Roles may come in any order.
    """
    try:
        messages = messages_of(value)
    except Malformed as error:
        return Rejected(str(error))
    except RecursionError:
        return Rejected("the functions or the arguments of a call are nested too deeply")
    if not any(message.role == "assistant" and message.in_loss and not is_blank(message.content) for message in messages):
        return Skipped("no answer")
    return Conversation(tuple(messages), labels_of(value))


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
