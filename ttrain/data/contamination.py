"""Evaluation items that stand in training documents, at least in good part: found, counted, told where.

A document holds an item where parts of 32 bytes and more that both have make up half of the item's plain text. 32 bytes of
UTF-8 are six English words or eleven Chinese characters: bytes, since to `xz` a byte of Chinese says about as much as one of
English (3.5 bits and 2.4), while a character says over four times as much. Measured on 2,409 items that are not in 36 MB of
documents: with parts of 24, 32, 40 and 50 bytes 258, 24, 8 and 1 items have some in common with a document, but with none
half of the text. With one letter in 50 bytes changed, 1, 3, 8 and 16 % of English items are missed (5, 12, 23 and 36 % of
Chinese ones, where a letter is three bytes). GPT-3 took 13 words (https://arxiv.org/abs/2005.14165, appendix C), Llama 3
the share of the text that 8-grams of tokens cover (https://arxiv.org/abs/2407.21783, section 5.1.4).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ttrain.core.files import read_object, write_json
from ttrain.data import item_text, jsonl, locations, plain_text, shards
from ttrain.data.overlap import Texts
from ttrain.errors import DataError

NGRAM_BYTES, SHARE = 32, 0.5
MAX_LINE_BYTES = 32 << 20
DIGEST_BYTES = 16
BEGINNING_TOKENS, EXCERPT_LETTERS = 40, 80
MOST_PLACES = 3  # of an item that are told
REPORT = Path("run", "contamination.json")  # of a set of shards: with names of files, so that no stage may read it
KNOWN = Path("heldout", "contamination.json")  # what evaluations read: digests of the items that training documents hold
OVERLAPS = "overlaps with evaluation items"


@dataclass(frozen=True)
class Rule:
    """From how many bytes on a part counts, and which share of an item's plain text makes a document hold it."""

    ngram_bytes: int = NGRAM_BYTES
    share: float = SHARE


@dataclass(frozen=True)
class Item:
    """What is looked for: where it stands ("file:line"), what it says (its beginning), its plain text."""

    task: str
    where: str
    excerpt: str
    text: bytes

    @property
    def digest(self) -> str:
        """What identifies it, however it is punctuated."""
        return digest_of_text(self.text)


@dataclass(frozen=True)
class Against:
    """What training documents are checked against, and whether those that hold an item are left out.

    left_out    rows of each task's files that are no items
    """

    items: tuple[Item, ...]
    rule: Rule
    remove: bool
    left_out: Mapping[str, int]

    @property
    def texts(self) -> tuple[bytes, ...]:
        """Plain text of the items, each once: what shards are searched for."""
        return tuple(dict.fromkeys(item.text for item in self.items))


class Place(NamedTuple):
    """A record of a shard that holds an item, by the number of its text: the share of it, its longest part in bytes, how the
    record begins."""

    record: int
    text: int
    share: float
    longest: int
    beginning: str


class Scanned(NamedTuple):
    """What one shard has in common with the items: in how many records each has some part, and the records that hold one."""

    touched: dict[int, int]
    places: list[Place]


def item_of(task: str, where: str, text: str) -> Item:
    """An item of this text."""
    return Item(task, where, " ".join(text.split())[:EXCERPT_LETTERS], plain_text.plain(text))


def digest_of_text(plain: bytes) -> str:
    """Of a plain text."""
    return hashlib.blake2b(plain, digest_size=DIGEST_BYTES).hexdigest()


def read_items(path: str, task: str) -> tuple[list[Item], jsonl.Tally]:
    """(the items of a file of an evaluation, by any of the shapes that its tasks have; the tally of the other rows).

    The text of an item is all that a leak would have of it: the question with the right answer, the passage with its last
    word, the whole document, the turns of a chat but the system's. Raises DataError where the file has no item.
    """
    tally = jsonl.Tally()
    found = []
    for name, line, record in jsonl.records([path], tally, MAX_LINE_BYTES):
        text = item_text.of_row(record)
        if text is None:
            tally.reject(name, line, item_text.NONE)
        else:
            tally.kept += 1
            found.append(item_of(task, f"{locations.name(name)}:{line}", text))
    if not found:
        raise DataError(f"{path} has no item of an evaluation: no row has {item_text.WANTED}")
    return found, tally


def against(files: Sequence[str], rule: Rule, *, remove: bool) -> Against:
    """The items of all the files; a task is called as its file is. Raises DataError where one has none."""
    items: list[Item] = []
    left_out: Counter[str] = Counter()
    for file in files:
        task = locations.name(file)
        found, tally = read_items(file, task)
        items += found
        left_out[task] += sum(tally.rejected.values())
    return Against(tuple(items), rule, remove, left_out)


def scan(path: str, tokenizer: str, texts: tuple[bytes, ...], rule: Rule) -> Scanned:
    """What one shard, made with the tokenizer of that directory, has in common with plain texts.

    100 to 200 MB, whatever the size of the shard, unless one record is longer than a chunk.
    """
    wanted, token_bytes = _prepared(texts, rule.ngram_bytes), plain_text.token_bytes_of(tokenizer)
    column = shards.read_shard(Path(path))
    touched: Counter[int] = Counter()
    places = []
    for first, last in plain_text.chunks(column):
        data, begins = plain_text.records(column, token_bytes, first, last)
        for found in wanted.find(data, begins):
            touched[found.text] += 1
            share = found.bytes / int(wanted.lengths[found.text])
            if share >= rule.share:
                start, end = column.offsets[first + found.record : first + found.record + 2]
                beginning = token_bytes.text(column.tokens[start : min(end, start + BEGINNING_TOKENS)])
                places.append(Place(first + found.record, found.text, share, found.longest, beginning[:EXCERPT_LETTERS]))
    return Scanned(dict(touched), places)


@lru_cache(maxsize=1)
def _prepared(texts: tuple[bytes, ...], ngram_bytes: int) -> Texts:
    """A worker is given the same ones again and again."""
    return Texts(texts, ngram_bytes)


def known(directory: Path) -> dict[str, float]:
    """{digest: share} of the items that the training shards in this directory hold, as far as they were looked for."""
    found: dict[str, float] = read_object(directory / KNOWN)
    return found


def write_known(directory: Path, items: Mapping[str, float]) -> None:
    """Leave the same, where there is any."""
    (directory / KNOWN).unlink(missing_ok=True)
    if items:
        write_json(directory / KNOWN, dict(sorted(items.items())))


def report(against: Against, found: Iterable[tuple[Mapping[str, Any], Scanned]]) -> dict[str, Any]:
    """What became of all shards, as JSON. `found` has, for each, what is told of the places in it.

    {"removed", "documents": how many hold an item, "tasks": {task: {"items", "too_short", "touched", "overlapping", "share",
     "left_out"}},
     "items": [{"task", "where", "digest", "text", "share", "documents", "places": [{..., "record", "share", "longest_bytes",
     "begins"}]}], the largest share first}
    """
    items, rule = against.items, against.rule
    best: dict[int, list[dict[str, Any]]] = {}
    touched: set[int] = set()
    counts: Counter[int] = Counter()
    documents = 0
    for where, scanned in found:
        touched.update(scanned.touched)
        documents += len({place.record for place in scanned.places})
        for place in scanned.places:
            counts[place.text] += 1
            told = {"record": place.record, "share": round(place.share, 4), "longest_bytes": place.longest}
            best.setdefault(place.text, []).append({**where, **told, "begins": place.beginning})
    searchable = _prepared(against.texts, rule.ngram_bytes).searchable
    number_of = {text: number for number, text in enumerate(against.texts)}
    tasks: dict[str, dict[str, Any]] = {}
    lines = []
    for item in items:
        number = number_of[item.text]
        task = tasks.setdefault(item.task, dict.fromkeys(("items", "too_short", "touched", "overlapping"), 0))
        task["items"] += 1
        task["too_short"] += int(not searchable[number])
        task["touched"] += int(number in touched)
        task["overlapping"] += int(number in best)
        if number not in best:
            continue
        places = sorted(best[number], key=lambda place: -place["share"])
        lines.append({
            "task": item.task, "where": item.where, "digest": item.digest, "text": item.excerpt,
            "share": places[0]["share"], "documents": counts[number], "places": places[:MOST_PLACES],
        })  # fmt: skip
    for name, task in tasks.items():
        task["share"] = task["overlapping"] / task["items"]
        task["left_out"] = against.left_out.get(name, 0)
    lines.sort(key=lambda line: (-line["share"], line["where"]))
    return {
        "ngram_bytes": rule.ngram_bytes, "share": rule.share, "removed": against.remove, "documents": documents,
        "tasks": tasks, "items": lines,
    }  # fmt: skip
