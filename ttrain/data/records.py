"""Parse documents, conversations and preferences from JSON objects, and split them into training and held-out part."""

from __future__ import annotations

import hashlib
import math
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal

import orjson

from ttrain.config import Reading
from ttrain.config.nightly import FEWEST_RECORDS
from ttrain.config.rules import AUTO
from ttrain.core import redact
from ttrain.core.files import JsonDict
from ttrain.data import tools
from ttrain.data.chat_shapes import CHAT_FIELDS, is_blank, is_chat, messages_of, unread_keys
from ttrain.data.chat_templates import Messages
from ttrain.data.preferences import PREFERENCE_FIELDS, Labels, Preference, is_preference, preference_of
from ttrain.data.tools import Malformed, kind_of
from ttrain.errors import DataError

TEXT = "text"  # the default of reading.text_field, with which the other keys are tried too

DOCUMENT_KEYS = (TEXT, "content", "body", "paragraphs")
# Keys whose values can group an evaluation. They are stored with held-out records, but are not part of their identity.
LABELS, LABEL_CHARACTERS = ("source", "lang"), 64

WEIGHT = "weight"  # key of a row; that of a turn of a chat says whether it is learnt

TOO_DEEP = "the functions or the arguments of a call are nested too deeply"
PLACE_BYTES = 8  # of a content hash: they decide whether a record is held out

TURN_KEYS = frozenset({"messages", "conversations", "prompt", "chosen"})

Row = tuple[str, int, JsonDict]  # path, number of the line, JSON object


@dataclass(frozen=True)
class TextDocument:
    """A text to learn from, with the labels of its row."""

    text: str
    labels: Labels = ()
    weight: float = 1.0

    def content(self) -> bytes:
        """What identifies the record, wherever it stands."""
        return self.text.encode("utf-8")

    def to_json(self) -> JsonDict:
        return {"text": self.text, **dict(self.labels)}


@dataclass(frozen=True)
class Conversation:
    """Turns of system, user, assistant and tool in any order, with at least one answer; with the labels of their row."""

    messages: Messages
    labels: Labels = ()
    weight: float = 1.0

    def content(self) -> bytes:
        """What identifies the record, wherever it stands."""
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


def read(paths: Sequence[str], parse: Parser, tally: Tally, max_line_bytes: int, text_field: str = TEXT) -> Iterator[Record]:
    """Good records of the files in order; the tally counts the others. `text_field` is the key for text of `.txt` files."""
    return (record for _, record in accepted(records(paths, tally, max_line_bytes, text_field), parse, tally))


def accepted(rows: Iterable[Row], parse: Parser, tally: Tally) -> Iterator[tuple[int, Record]]:
    """(line number, good record) of the rows; the tally counts the others."""
    for path, number, value in rows:
        parsed = parse(value)
        if value.get(WEIGHT) is not None and not isinstance(parsed, Skipped | Rejected):
            parsed = _weighted(parsed, value[WEIGHT])
        if isinstance(parsed, Rejected):
            tally.reject(path, number, parsed.reason, _excerpt(value))
        elif isinstance(parsed, Skipped):
            tally.skipped[parsed.reason] += 1
        else:
            tally.kept += 1
            if not isinstance(parsed, TextDocument):
                for key in unread_keys(value):
                    _count(tally.unread_keys, key, 1, OTHER_KEYS)
                tally.with_reasoning += any(turn.thought for turn in parsed.messages)
            yield number, parsed


def _weighted(record: Record, weight: object) -> Record | Skipped | Rejected:
    """The record with the weight of its row: how often it is drawn, compared with a row of weight 1."""
    fix = "write how often the row is drawn, compared with one of weight 1, or leave the key out"
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        return Rejected(f"'{WEIGHT}' is {kind_of(weight)}, not a number; {fix}")
    if not 0 <= weight < math.inf:
        return Rejected(f"'{WEIGHT}' is {'negative' if weight < 0 else 'not finite'}; {fix}")
    return replace(record, weight=float(weight)) if weight else Skipped("weight 0")


def _excerpt(value: JsonDict) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # a number beyond 64 bits, or nested deeper than orjson writes
        return b""


def document_keys(text_field: str) -> tuple[str, ...]:
    """The keys under which a document's text is searched for, in order."""
    return DOCUMENT_KEYS if text_field == TEXT else (text_field,)


def document_fields(text_field: str, prefix: str = "reading.") -> str:
    """`document_keys` as part of a message; `prefix` comes before the name of the setting `text_field`."""
    return f"the key {' or '.join(repr(key) for key in document_keys(text_field))} ({prefix}text_field) with a text"


def document_parser(text_field: str) -> Callable[[JsonDict], TextDocument | Skipped | Rejected]:
    """A parser of documents with their text under `text_field`; for the default, "text", under the first of DOCUMENT_KEYS.

    `paragraphs` may be a list of texts, which are joined by newlines.
    """
    keys = document_keys(text_field)
    missing = Rejected(f"no key {' or '.join(repr(key) for key in keys)}")

    def parse(value: JsonDict) -> TextDocument | Skipped | Rejected:
        key = next((key for key in keys if key in value), None)
        if key is None:
            return missing
        text = value[key]
        if key == "paragraphs" and isinstance(text, list):
            for paragraph in text:
                if not isinstance(paragraph, str):
                    return Rejected(f"'paragraphs' holds {kind_of(paragraph)}; write a text, or a list of texts")
            text = "\n".join(text)
        if not isinstance(text, str):
            return Rejected(f"'{key}' is {kind_of(text)}, not text")
        text = text.removeprefix("\ufeff")
        return Skipped("empty text") if is_blank(text) else TextDocument(text, labels_of(value))

    return parse


def labels_of(row: JsonDict) -> Labels:
    """The LABELS of a row that are short texts; a long text would be different in every row."""
    return tuple(
        (key, value) for key in LABELS if isinstance(value := row.get(key), str) and 0 < len(value) <= LABEL_CHARACTERS
    )


def parse_conversation(value: JsonDict) -> Conversation | Skipped | Rejected:
    """Parse a chat in one of the formats that `messages_of` reads.

    A key that is null counts as absent. Roles may come in any order.
    """
    try:
        messages = messages_of(value)
    except Malformed as error:
        return Rejected(str(error))
    except RecursionError:
        return Rejected(TOO_DEEP)
    if not any(message.role == "assistant" and message.in_loss and not is_blank(message.content) for message in messages):
        return Skipped("no answer")
    return Conversation(tuple(messages), labels_of(value))


def parse_preference(value: JsonDict) -> Preference | Rejected:
    """Parse a preference in one of the formats that `preference_of` reads. A row without two different answers is bad."""
    try:
        return preference_of(value, labels_of(value))
    except Malformed as error:
        return Rejected(str(error))
    except RecursionError:
        return Rejected(TOO_DEEP)


def parser_of(kind: str, text_field: str) -> Parser:
    """The parser of the records of a kind."""
    return {"chats": parse_conversation, "pairs": parse_preference}.get(kind) or document_parser(text_field)


def without_reasoning_loss(parse: Parser) -> Parser:
    """A parser of chats or pairs whose reasoning is context of the answers, and not trained on."""

    def masked(messages: Messages) -> Messages:
        return tuple(replace(turn, thought_in_loss=False) if turn.thought else turn for turn in messages)

    def parse_masked(value: JsonDict) -> Record | Skipped | Rejected:
        record = parse(value)
        if isinstance(record, Conversation):
            return replace(record, messages=masked(record.messages))
        if isinstance(record, Preference):
            return replace(record, chosen=masked(record.chosen), rejected=masked(record.rejected))
        return record

    return parse_masked


def expected_fields(kind: str, text_field: str) -> str:
    """What a row of a kind holds, as part of a message."""
    return {"chats": CHAT_FIELDS, "pairs": PREFERENCE_FIELDS}.get(kind) or document_fields(text_field)


def kind_of_row(row: JsonDict) -> Kind:
    """The kind of record that the keys of a row mean."""
    return "pairs" if is_preference(row) else "chats" if is_chat(row) else "documents"


def content_hash(record: Record) -> bytes:
    """16 bytes that identify the content of a record.

    Half of the 16 bytes of a preference are its prompt's, so that pairs of one prompt are on the same side of a split.
    """
    if isinstance(record, Preference):
        return hash_of(record.prompt_content())[:PLACE_BYTES] + hash_of(record.content())[PLACE_BYTES:]
    return hash_of(record.content())


def hash_of(content: bytes) -> bytes:
    """16-byte hash, such as of the content of a record."""
    return hashlib.blake2b(content, digest_size=16).digest()


def place(record: Record) -> int:
    """A number below 2**64 by the record's content: uniform, and the same in every file."""
    return int.from_bytes(content_hash(record)[:PLACE_BYTES], "big")


def position(record: Record) -> float:
    """The same as a number in [0, 1)."""
    return place(record) / 2**64


def split(rows: Iterator[Record], fraction: float) -> Iterator[tuple[bool, Record]]:
    """(held out?, record): held out are positions below `fraction`, so no record moves when files are added.

    If there are none, the lowest row (and its copies) is held out, so that a small set can be evaluated too; it is yielded
    last.
    """
    lowest: list[Record] = []
    lowest_place = 1.0
    any_heldout = fraction == 0
    for record in rows:
        record_position = position(record)
        if record_position < fraction:
            any_heldout = True
            yield True, record
        elif any_heldout or record_position > lowest_place:
            yield False, record
        else:
            if record_position < lowest_place:
                yield from ((False, earlier) for earlier in lowest)
                lowest, lowest_place = [], record_position
            lowest.append(record)
    yield from ((not any_heldout, record) for record in lowest)


LEAST_SHARE, MOST_SHARE, ENOUGH_ROWS = 0.02, 0.2, 50  # of reading.heldout_fraction=auto


def with_heldout_share(reading: Reading, paths: Sequence[str], parse: Parser) -> Reading:
    """The settings with the number that `auto` means for the rows of these files."""
    if reading.heldout_fraction != AUTO:
        return reading
    rows = read(paths, parse, Tally(), reading.max_line_bytes, reading.text_field)
    limit = reading.limit * reading.rounds if reading.limit else None
    return reading.model_copy(update={"heldout_fraction": heldout_share(rows, limit)})


def heldout_share(rows: Iterable[Record], limit: int | None = None) -> float:
    """The share of the distinct rows that `auto` holds out: max(2 %, min(50 rows, 20 %)), of at most `limit` rows.

    It is 2 % from 2,500 rows on, so that many are read. While a data set grows it does not rise, so that no row that was
    trained on is held out later; but once, at 100 rows. From there on at least 20 rows are held out, which the models need
    to be judged: of sets of 100 rows, 46 % have fewer below 20 %.
    """
    most = min(round(ENOUGH_ROWS / LEAST_SHARE), limit or math.inf)
    places = set[int]()
    for record in rows:
        places.add(place(record))
        if len(places) >= most:
            break
    count = max(1, len(places))
    share = max(LEAST_SHARE, min(ENOUGH_ROWS / count, MOST_SHARE))
    is_whole_set = count < most
    if is_whole_set and count * MOST_SHARE >= FEWEST_RECORDS:
        place_of_last = sorted(places)[FEWEST_RECORDS - 1]
        share = max(share, math.nextafter(place_of_last / 2**64, 1.0))
    return share


KEYS_LOOKED_AT, KEYS_OF_A_ROW, KEY_CHARACTERS = 1000, 100, 40

REASONS, OTHER_REASONS = 100, "other reasons"  # distinct reasons at most, since one may quote a value of its row
OTHER_KEYS = "other keys"  # beyond as many

FIRST_REJECTED = 5
COUNTS = ("rows", "kept", "skipped", "rejected", "keys_seen", "unread_keys", "lines", "with_reasoning")

EXCERPT_CHARACTERS = 200

TOO_LONG = "line longer than reading.max_line_bytes={}; raise it, or split the text"

NULS = "not valid JSON: only NUL bytes, as a crash of the writing machine leaves; write the line again"

NOT_UTF8 = "not valid UTF-8; write the row again as UTF-8, or convert the file with iconv"


@dataclass
class Tally:
    """Counts of the rows by outcome: rows = kept + skipped + rejected, the latter two by rule or reason."""

    rows: int = 0
    kept: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    keys_seen: Counter[str] = field(default_factory=Counter)
    first_rejected: list[str] = field(default_factory=list)
    quarantine: Callable[[JsonDict], object] | None = None
    lines: int = 0  # rows and blank lines
    bad_rows: Counter[str] = field(default_factory=Counter)  # by location
    unread_keys: Counter[str] = field(default_factory=Counter)  # kept rows with text of an answer under a key, by the key
    with_reasoning: int = 0  # kept rows with the reasoning of an answer

    def reject(self, path: str, line: int, reason: str, raw: bytes = b"") -> None:
        """Count a bad row and pass it to the quarantine."""
        _count(self.rejected, reason, 1, OTHER_REASONS)
        self.bad_rows[path] += 1
        row: JsonDict = {"file": redact.url(path), "line": line, "reason": reason}
        if raw:
            row["text"] = raw[: 4 * EXCERPT_CHARACTERS].decode("utf-8", "replace")[:EXCERPT_CHARACTERS]
        self._list(row)

    def _list(self, row: JsonDict) -> None:
        if len(self.first_rejected) < FIRST_REJECTED:
            self.first_rejected.append(f"{row['file']}:{row['line']}: {row['reason']}")
        if self.quarantine:
            self.quarantine(row)

    def see(self, row: JsonDict) -> None:
        """Count the keys of a row, if it is among the first KEYS_LOOKED_AT."""
        if self.rows <= KEYS_LOOKED_AT:
            self.keys_seen.update(key[:KEY_CHARACTERS] for key in islice(row, KEYS_OF_A_ROW))

    def leave_out(self, rule: str, rows: int) -> None:
        """Count kept rows as skipped by a rule."""
        if rows:
            self.kept -= rows
            self.skipped[rule] += rows

    def add(self, tally: Tally) -> None:
        """Add the counts of another tally."""
        for name in ("rows", "kept", "lines", "with_reasoning"):
            setattr(self, name, getattr(self, name) + getattr(tally, name))
        for reason, rows in tally.rejected.items():
            _count(self.rejected, reason, rows, OTHER_REASONS)
        for key, rows in tally.unread_keys.items():
            _count(self.unread_keys, key, rows, OTHER_KEYS)
        self.skipped.update(tally.skipped)
        self.keys_seen.update(tally.keys_seen)
        self.bad_rows.update(tally.bad_rows)
        self.first_rejected = (self.first_rejected + tally.first_rejected)[:FIRST_REJECTED]

    def add_block(self, block: Tally, bad_rows: Iterable[JsonDict], path: str) -> None:
        """Add the counts of the next block of a file, and number its bad rows, which are numbered by block, by file."""
        lines_before = self.lines
        self.add(replace(block, first_rejected=[], bad_rows=Counter({path: block.rejected.total()})))
        for row in bad_rows:
            self._list({**row, "file": redact.url(path), "line": row["line"] + lines_before})

    def counts(self) -> JsonDict:
        """What `of_counts` reads: all but the places of bad rows."""
        return {name: getattr(self, name) for name in COUNTS}

    @classmethod
    def of_counts(cls, counts: JsonDict) -> Tally:
        """The tally of a block that was counted before."""
        named: JsonDict = {name: Counter(count) if isinstance(count, dict) else count for name, count in counts.items()}
        return cls(**named)

    def to_json(self) -> JsonDict:
        """Counts for the manifest and the summary."""
        counts = {"rows": self.rows, "kept": self.kept, "skipped": dict(self.skipped), "rejected": dict(self.rejected)}
        more = {name: getattr(self, name) for name in ("first_rejected", "unread_keys", "with_reasoning")}
        return counts | {name: value for name, value in more.items() if value}

    def check(self, setting: str, limit: float, expected_fields: str, prefix: str = "reading.") -> None:
        """Raise DataError if more than the share `limit` of the rows is bad, or no row was kept."""
        self.check_bad(setting, limit, expected_fields, prefix)
        if not self.kept:
            skipped = "".join(f"; {count} skipped: {rule}" for rule, count in self.skipped.items())
            advice = f". {self._looked_for(expected_fields)}" if self.rejected or not self.rows else ""
            raise DataError(f"{setting}: no rows are left of {self.rows}{skipped}{advice}")

    def check_bad(self, setting: str, limit: float, expected_fields: str, prefix: str = "reading.") -> None:
        """Raise DataError if more than the share `limit` of the rows is bad.

        `prefix` comes before the name of the setting of `limit`. Files whose own bad rows are too many are at fault.
        """
        bad = self.rejected.total()
        if bad > limit * self.rows:
            raise DataError(
                f"{setting}: {bad} of {self.rows} rows are bad, more than {prefix}rejected_fraction={limit}; "
                f"the first is {self.first_rejected[0]}. {self._looked_for(expected_fields)}",
                [location for location, count in self.bad_rows.items() if count > limit * self.rows],
            )

    def _looked_for(self, expected_fields: str) -> str:
        keys_seen = ", ".join(key for key, _ in self.keys_seen.most_common(8)) or "none"
        return f"ttrain looked for one JSON object a line, with {expected_fields}; keys seen: {keys_seen}"


def _count(counts: Counter[str], name: str, rows: int, others: str) -> None:
    counts[name if name in counts or len(counts) < REASONS else others] += rows


def records(paths: Sequence[str], tally: Tally, max_line_bytes: int, text_field: str = TEXT) -> Iterator[Row]:
    """(path, line number from 1, JSON object) of every good line of every file; blank lines do not count as rows.

    Each element of a JSON array is a line; a `.txt` file is one line, with its text under `text_field`.
    Raises DataError for a file that is truncated, corrupt, unreadable, in another encoding or of another format.
    """
    from ttrain.data import streams

    for path in paths:
        with streams.noting_faults(path):
            yield from parsed(numbered_lines(path, max_line_bytes, text_field), path, tally, max_line_bytes)


def numbered_lines(path: str, max_line_bytes: int, text_field: str) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers from 1."""
    from ttrain.data import streams

    if streams.is_parquet(path):
        return streams.parquet_lines(path, 0)
    return lines(streams.json_lines(path, text_field), max_line_bytes)


def parsed(numbered: Iterable[tuple[int, bytes]], path: str, tally: Tally, max_line_bytes: int) -> Iterator[Row]:
    """(path, line number, JSON object) of the good lines."""
    loads, number = orjson.loads, 0
    for number, line in numbered:
        if len(line) > max_line_bytes:
            tally.rows += 1
            tally.reject(path, number, TOO_LONG.format(max_line_bytes), line[:1000])
            continue
        if not line or line.isspace():  # seen before an error of the parser, which takes six times as long as the rest
            continue
        try:
            value = loads(line)
        except orjson.JSONDecodeError as error:
            tally.rows += 1
            tally.reject(path, number, _reason(line, str(error)), line)
            continue
        tally.rows += 1
        if not isinstance(value, dict):
            tally.reject(path, number, f"not a JSON object but {kind_of(value)}", line)
            continue
        if _is_written_again(value, line):
            try:
                value = tools.without_null_keys(line)
            except RecursionError:
                tally.reject(path, number, TOO_DEEP, line)
                continue
        tally.see(value)
        yield path, number, value
    tally.lines += number


def _is_written_again(value: JsonDict, line: bytes) -> bool:
    """Whether JSON of the row becomes text: functions and calls, and the answer to a question."""
    if "tools" in value or "question" in value:
        return True
    is_chat_of_turns = not TURN_KEYS.isdisjoint(value)  # the search takes a chat 1 us a kB, and a document nothing
    return is_chat_of_turns and (b"_call" in line or b'"tools"' in line)


def lines(chunks: Iterable[bytes], max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line without its end). A line that is too long is cut to max_line_bytes + 1 bytes, which shows it."""
    number = 1
    pending = b""
    for chunk in chunks:
        *whole, pending = (pending + chunk).split(b"\n")
        for line in whole:
            yield number, line[: max_line_bytes + 1]
            number += 1
        pending = pending[: max_line_bytes + 1]
    if pending:
        yield number, pending


def _reason(line: bytes, error: str) -> str:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return NOT_UTF8
    if not line.strip(b"\0\r"):
        return NULS
    if b"\0" in line[:4]:  # between the letters, as UTF-16 has them
        return NOT_UTF8
    if line.startswith(BOM_UTF8):
        return "not valid JSON: a byte order mark, which may stand at the start of a file only"
    return f"not valid JSON: {error.split(': line')[0]}"
