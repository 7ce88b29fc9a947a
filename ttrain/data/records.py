"""Parse documents, conversations and preferences from JSON objects, and split them."""

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import orjson

from ttrain.config import Reading
from ttrain.config.nightly import FEWEST_RECORDS
from ttrain.config.rules import AUTO
from ttrain.core.files import JsonDict
from ttrain.data import json_rows
from ttrain.data.chat_shapes import CHAT_FIELDS, is_blank, is_chat, messages_of, unread_keys
from ttrain.data.chat_templates import Messages
from ttrain.data.json_rows import TEXT, TOO_DEEP, Row, Tally, count
from ttrain.data.preferences import (
    PREFERENCE_FIELDS,
    Labels,
    Preference,
    is_preference,
    preference_of,
)
from ttrain.data.tools import Malformed, kind_of

DOCUMENT_KEYS = (TEXT, "content", "body", "paragraphs")
# Keys whose values can group an evaluation, and the licence, for the model's card. They are stored
# with held-out records, but are not part of their identity.
LABELS = ("source", "lang", "license")
LABEL_CHARACTERS = 64

WEIGHT = "weight"  # key of a row; that of a turn of a chat says whether it is trained on

LEAST_SHARE, MOST_SHARE, ENOUGH_ROWS = 0.02, 0.2, 50  # of reading.heldout_fraction=auto

PLACE_BYTES = 8  # of a content hash: they decide whether a record is held out


@dataclass(frozen=True)
class TextDocument:
    """A text to train on, with the labels of its row."""

    text: str
    labels: Labels = ()
    weight: float = 1.0

    def content(self) -> bytes:
        """What identifies the record."""
        return self.text.encode("utf-8")

    def to_json(self) -> JsonDict:
        return {"text": self.text, **dict(self.labels)}


@dataclass(frozen=True)
class Conversation:
    """Turns in any order, with at least one answer, and the labels of their row."""

    messages: Messages
    labels: Labels = ()
    weight: float = 1.0

    def content(self) -> bytes:
        """What identifies the record."""
        return orjson.dumps([message.identity() for message in self.messages])

    def to_json(self) -> JsonDict:
        return {"messages": [message.to_json() for message in self.messages], **dict(self.labels)}


Record = TextDocument | Conversation | Preference

Kind = Literal["documents", "chats", "pairs"]

Parser = Callable[[JsonDict], "Record | Skipped | Rejected"]


@dataclass(frozen=True)
class Skipped:
    """A row that a documented rule leaves out; the rule is the reason."""

    reason: str


@dataclass(frozen=True)
class Rejected:
    """A malformed row."""

    reason: str


def read(
    paths: Sequence[str], parse: Parser, tally: Tally, max_line_bytes: int, text_field: str = TEXT
) -> Iterator[Record]:
    """Good records of the files in order; the tally counts the others."""
    rows = json_rows.read(paths, tally, max_line_bytes, text_field)
    return (record for _, record in accepted(rows, parse, tally))


def accepted(rows: Iterable[Row], parse: Parser, tally: Tally) -> Iterator[tuple[int, Record]]:
    """(line number, good record) of the rows; the tally counts the others."""
    for path, number, value in rows:
        parsed = parse(value)
        if value.get(WEIGHT) is not None and not isinstance(parsed, Skipped | Rejected):
            parsed = _weighted(parsed, value[WEIGHT])
        if isinstance(parsed, Rejected):
            tally.reject(path, number, parsed.reason, value)
        elif isinstance(parsed, Skipped):
            tally.skipped[parsed.reason] += 1
        else:
            tally.kept += 1
            if not isinstance(parsed, TextDocument):
                count(tally.unread_keys, dict.fromkeys(unread_keys(value), 1))
                tally.with_reasoning += any(turn.thought for turn in parsed.messages)
            yield number, parsed


def _weighted(record: Record, weight: object) -> Record | Skipped | Rejected:
    fix = "write how often the row is drawn, compared with one of weight 1, or leave the key out"
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        return Rejected(f"'{WEIGHT}' is {kind_of(weight)}, not a number; {fix}")
    if not 0 <= weight < math.inf:
        return Rejected(f"'{WEIGHT}' is {'negative' if weight < 0 else 'not finite'}; {fix}")
    return replace(record, weight=float(weight)) if weight else Skipped("weight 0")


def document_keys(text_field: str) -> tuple[str, ...]:
    """The keys under which a document's text is searched for, in order."""
    return DOCUMENT_KEYS if text_field == TEXT else (text_field,)


def document_fields(text_field: str, prefix: str = "reading.") -> str:
    """`document_keys` as part of a message; `prefix` comes before `text_field`."""
    return (
        f"the key {' or '.join(map(repr, document_keys(text_field)))} "
        f"({prefix}text_field) with a text"
    )


def document_parser(text_field: str) -> Callable[[JsonDict], TextDocument | Skipped | Rejected]:
    """A parser of documents with their text under `text_field`, or the first of DOCUMENT_KEYS.

    `paragraphs` may be a list of texts, which are joined by newlines.
    """
    keys = document_keys(text_field)

    def parse(value: JsonDict) -> TextDocument | Skipped | Rejected:
        key = next((key for key in keys if key in value), None)
        if key is None:
            return Rejected(f"no key {' or '.join(map(repr, keys))}")
        text = value[key]
        if key == "paragraphs" and isinstance(text, list):
            if wrong := [paragraph for paragraph in text if not isinstance(paragraph, str)]:
                return Rejected(
                    f"'paragraphs' holds {kind_of(wrong[0])}; write a text, or a list of texts"
                )
            text = "\n".join(text)
        if not isinstance(text, str):
            return Rejected(f"'{key}' is {kind_of(text)}, not text")
        text = text.removeprefix("\ufeff")
        return Skipped("empty text") if is_blank(text) else TextDocument(text, labels_of(value))

    return parse


def labels_of(row: JsonDict) -> Labels:
    """The LABELS of a row that are short texts."""
    return tuple(
        (key, value)
        for key in LABELS
        if isinstance(value := row.get(key), str) and 0 < len(value) <= LABEL_CHARACTERS
    )


def _rejecting(parse: Callable[[JsonDict], Record | Skipped]) -> Parser:
    @functools.wraps(parse)
    def parse_or_reject(value: JsonDict) -> Record | Skipped | Rejected:
        try:
            return parse(value)
        except Malformed as error:
            return Rejected(str(error))
        except RecursionError:
            return Rejected(TOO_DEEP)

    return parse_or_reject


@_rejecting
def parse_conversation(value: JsonDict) -> Conversation | Skipped:
    """Parse a chat in one of the formats that `messages_of` reads."""
    messages = messages_of(value)
    if all(
        is_blank(turn.content) for turn in messages if turn.role == "assistant" and turn.in_loss
    ):
        return Skipped("no answer")
    return Conversation(tuple(messages), labels_of(value))


@_rejecting
def parse_preference(value: JsonDict) -> Preference:
    """Parse a preference in one of the formats that `preference_of` reads."""
    return preference_of(value, labels_of(value))


def parser_of(kind: str, text_field: str) -> Parser:
    """The parser of the records of a kind."""
    return {"chats": parse_conversation, "pairs": parse_preference}.get(kind) or document_parser(
        text_field
    )


def without_reasoning_loss(record: Conversation | Preference) -> Conversation | Preference:
    """The chat or pair with its reasoning as context, not trained on."""
    names = ("messages",) if isinstance(record, Conversation) else ("chosen", "rejected")
    masked: dict[str, Any] = {}
    for name in names:
        masked[name] = tuple(replace(t, thought_in_loss=False) for t in getattr(record, name))
    return replace(record, **masked)


def expected_fields(kind: str, text_field: str) -> str:
    """What a row of a kind holds, as part of a message."""
    return {"chats": CHAT_FIELDS, "pairs": PREFERENCE_FIELDS}.get(kind) or document_fields(
        text_field
    )


def kind_of_row(row: JsonDict) -> Kind:
    """The kind of record that the keys of a row mean."""
    if is_preference(row):
        return "pairs"
    return "chats" if is_chat(row) else "documents"


def content_hash(record: Record) -> bytes:
    """16 bytes that identify a record's content; of a preference, half are its prompt's."""
    if isinstance(record, Preference):  # pairs of one prompt are on the same side of a split
        return (
            hash_of(record.prompt_content())[:PLACE_BYTES] + hash_of(record.content())[PLACE_BYTES:]
        )
    return hash_of(record.content())


def hash_of(content: bytes) -> bytes:
    """16-byte hash."""
    return hashlib.blake2b(content, digest_size=16).digest()


def position(record: Record) -> float:
    """A number in [0, 1) by the record's content: uniform, and the same in every file."""
    return int.from_bytes(content_hash(record)[:PLACE_BYTES], "big") / 2**64


def split(rows: Iterator[Record], fraction: float) -> Iterator[tuple[bool, Record]]:
    """(held out?, record): held out are positions below `fraction`.

    If there are none, the lowest row and its copies are held out and come last.
    """
    # By content, so that no record moves when files are added.
    lowest: list[Record] = []
    lowest_place = 1.0
    for record in rows:
        record_position = position(record)
        if record_position < fraction:
            lowest_place = 0.0
            yield True, record
        elif fraction == 0 or record_position > lowest_place:
            yield False, record
        else:
            if record_position < lowest_place:
                yield from ((False, earlier) for earlier in lowest)
                lowest = []
                lowest_place = record_position
            lowest.append(record)
    yield from ((lowest_place > 0, record) for record in lowest)


def with_heldout_share(reading: Reading, paths: Sequence[str], parse: Parser) -> Reading:
    """The settings with the number that `auto` means for these rows."""
    if reading.heldout_fraction != AUTO:
        return reading
    rows = read(paths, parse, Tally(), reading.max_line_bytes, reading.text_field)
    return reading.replaced({"heldout_fraction": heldout_share(rows, reading.limit)})


def heldout_share(rows: Iterable[Record], limit: int | None = None) -> float:
    """The fraction of distinct rows that `auto` holds out: max(2 %, min(50 rows, 20 %)).

    Reads at most `limit` rows, and 2,500, from which on it is 2 %.
    """
    # While a data set grows the fraction does not rise, so that no row that was trained on is held
    # out later; but once, at 100 rows. From there on at least 20 rows are held out, which a verdict
    # needs: of sets of 100 rows, 46 % have fewer below 20 %.
    most = min(round(ENOUGH_ROWS / LEAST_SHARE), limit or math.inf)
    positions = set[float]()
    for record in rows:
        positions.add(position(record))
        if len(positions) >= most:
            break
    count = max(1, len(positions))
    share = max(LEAST_SHARE, min(ENOUGH_ROWS / count, MOST_SHARE))
    if count < most and count * MOST_SHARE >= FEWEST_RECORDS:  # all rows were read
        share = max(share, math.nextafter(sorted(positions)[FEWEST_RECORDS - 1], 1.0))
    return share
