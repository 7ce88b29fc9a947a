"""Find evaluation items that training documents contain, in whole or in large part, and report where.

A document contains an item if it has half of the item's 13-grams of words (`ttrain.data.overlap`).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ttrain.core.files import JsonDict, read_object, write_json
from ttrain.data import locations, overlap, records, shards
from ttrain.data.chat_templates import Messages
from ttrain.data.overlap import GramIndex, TextMatch
from ttrain.data.preferences import Preference, is_preference
from ttrain.errors import DataError

MAX_LINE_BYTES = 32 << 20

EXCERPT_LETTERS = 80

MOST_PLACES = 3  # reported per item

REPORT = Path("run", "contamination.json")  # of a set of shards: it has names of files, so no stage may read it
# What evaluations read: digests of the items that training documents contain.
ITEM_SHARES = Path("heldout", "contamination.json")

OVERLAPS = "overlaps with evaluation items"


@dataclass(frozen=True)
class EvaluationItem:
    """An evaluation item: its location ("file:line"), the beginning of its text, its words."""

    task: str
    location: str
    excerpt: str
    text: bytes

    @property
    def digest(self) -> str:
        """Digest of the plain text, which does not depend on punctuation."""
        return digest_of_text(self.text.replace(b" ", b""))


@dataclass(frozen=True)
class OverlapCheck:
    """Items that training documents are checked against, and whether documents that contain one are removed.

    share       of an item's n-grams, from which a document contains it
    left_out    rows of each task's files that are not items
    """

    items: tuple[EvaluationItem, ...]
    share: float
    remove: bool
    left_out: Mapping[str, int]

    @property
    def texts(self) -> tuple[bytes, ...]:
        """Distinct texts of the items."""
        return tuple(dict.fromkeys(item.text for item in self.items))


def item_of(task: str, location: str, text: str) -> EvaluationItem:
    """Make an item of a text."""
    return EvaluationItem(task, location, " ".join(text.split())[:EXCERPT_LETTERS], overlap.spaced(text))


def digest_of_text(plain: bytes) -> str:
    """Digest of a plain text."""
    return records.hash_of(plain).hex()


def read_items(path: str, task: str) -> tuple[list[EvaluationItem], records.Tally]:
    """Read (items, tally of the rows) from an evaluation file in the format of any task type.

    The text of an item is what a leak of it would contain: the question with the right answer, the passage with its last
    word, the whole document, the turns of a chat but the system's. Raises DataError if the file has no item.
    """
    tally = records.Tally()
    items = []
    for name, line, record in records.records([path], tally, MAX_LINE_BYTES):
        text = of_row(record)
        if text is None:
            tally.reject(name, line, NO_TEXT)
        else:
            tally.kept += 1
            items.append(item_of(task, f"{locations.name(name)}:{line}", text))
    if not items:
        raise DataError(f"{path} has no item of an evaluation: no row has {ITEM_KEYS}")
    return items, tally


def overlap_check(files: Sequence[str], share: float, *, remove: bool) -> OverlapCheck:
    """Read the items of all files; each task is named after its file. Raises DataError if a file has no item."""
    items: list[EvaluationItem] = []
    left_out: Counter[str] = Counter()
    for file in files:
        task = locations.name(file)
        file_items, tally = read_items(file, task)
        items += file_items
        left_out[task] += tally.rejected.total()
    return OverlapCheck(tuple(items), share, remove, left_out)


def scan(path: str, tokenizer: str, texts: tuple[bytes, ...], share: float) -> list[TextMatch]:
    """Find the texts of items in one shard that was encoded with the tokenizer in that directory.

    Takes 100 to 200 MB, whatever the size of the shard, unless one record is longer than a chunk.
    """
    index, token_bytes = _index_of(texts), overlap.token_bytes_of(tokenizer)
    column = shards.read_shard(Path(path))
    matches = []
    for first, last in overlap.chunks(column):
        for match in index.find(overlap.records(column, token_bytes, first, last)):
            if match.share >= share:
                matches.append(match._replace(record=first + match.record))
    return matches


@lru_cache(maxsize=1)
def _index_of(texts: tuple[bytes, ...]) -> GramIndex:
    """The index of the texts, cached since a worker gets the same texts for every shard."""
    return GramIndex(texts)


def read_item_shares(directory: Path) -> dict[str, float]:
    """{digest: share} of the checked items that the training shards in this directory contain."""
    return read_object(directory / ITEM_SHARES)


def write_item_shares(directory: Path, items: Mapping[str, float]) -> None:
    """Write what `read_item_shares` reads; remove the file if there are no items."""
    (directory / ITEM_SHARES).unlink(missing_ok=True)
    if items:
        write_json(directory / ITEM_SHARES, dict(sorted(items.items())))


def report(against: OverlapCheck, scans: Iterable[tuple[Mapping[str, Any], Sequence[TextMatch]]]) -> JsonDict:
    """Report on all shards, as JSON. `scans` has, for each shard, fields to add to its matches.

    {"removed", "documents": number with an item, "share",
     "tasks": {task: {"items", "too_short", "overlapping", "share", "left_out"}},
     "items": [{"task", "where", "digest", "text", "share", "documents", "places": [{..., "record",
      "share"}]}], the largest share first}
    """
    places_of: defaultdict[int, list[JsonDict]] = defaultdict(list)
    documents = 0
    for origin, matches in scans:
        documents += len({match.record for match in matches})
        for match in matches:
            places_of[match.text].append({**origin, "record": match.record, "share": round(match.share, 4)})
    totals = _index_of(against.texts).totals
    number_of = {text: number for number, text in enumerate(against.texts)}
    tasks: dict[str, JsonDict] = {}
    lines = []
    for item in against.items:
        number = number_of[item.text]
        task = tasks.setdefault(item.task, dict.fromkeys(("items", "too_short", "overlapping"), 0))
        task["items"] += 1
        task["too_short"] += int(not totals[number])
        task["overlapping"] += int(number in places_of)
        if number not in places_of:
            continue
        places = sorted(places_of[number], key=lambda place: -place["share"])
        lines.append({
            "task": item.task, "where": item.location, "digest": item.digest, "text": item.excerpt,
            "share": places[0]["share"], "documents": len(places), "places": places[:MOST_PLACES],
        })  # fmt: skip
    for name, task in tasks.items():
        task["share"] = task["overlapping"] / task["items"]
        task["left_out"] = against.left_out.get(name, 0)
    lines.sort(key=lambda line: (-line["share"], line["where"]))
    return {
        "share": against.share, "removed": against.remove, "documents": documents, "tasks": tasks, "items": lines,
    }  # fmt: skip


NO_TEXT = "no text of an evaluation item"

ITEM_KEYS = "'question' with 'choices' or 'answer', 'context' with 'target', 'text', a chat, or a pair of answers"


def of_row(record: Mapping[str, Any]) -> str | None:
    """The text of an evaluation row; None if it is not one."""
    question, answer, context = (record.get(name) for name in ("question", "answer", "context"))
    if isinstance(question, str):
        choices = record.get("choices")
        if isinstance(choices, list):
            return f"{question}\n{_right_choice(choices, answer)}"
        answers = (str(text) for text in (answer, record.get("final")) if isinstance(text, str | int | float))
        return "\n".join([question, *[text for text in answers if text.strip()][:1]])
    if isinstance(context, str):
        return f"{context}{record.get('target') or ''}"
    if is_preference(record):
        pair = records.parse_preference(dict(record))
        return of_chat((*pair.prompt, *(pair.chosen or pair.rejected))) if isinstance(pair, Preference) else None
    for parse in (records.parse_conversation, records.document_parser(records.TEXT)):
        parsed = parse(dict(record))
        if isinstance(parsed, records.Conversation):
            return of_chat(parsed.messages)
        if isinstance(parsed, records.TextDocument):
            return parsed.text
    return None


def of_chat(messages: Messages) -> str:
    """The turns of a chat without its system turn: data sets have the same one, or the same functions, in many chats, which
    would be most of an item (every document seemed to contain 23 of 24 chats with functions, 15 of 150 short ones)."""
    return "\n".join(message.content for message in messages if message.role != "system")


def _right_choice(choices: Sequence[object], answer: object) -> object:
    """The right choice, given as its number, its letter or its text."""
    if isinstance(answer, str) and re.fullmatch(r"\s*[A-Za-z]\s*", answer) and answer not in choices:
        answer = ord(answer.strip().upper()) - ord("A")
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if isinstance(answer, int) and 0 <= answer < len(choices):
        return choices[answer]
    return answer if isinstance(answer, str) else ""
