"""Report evaluation items that training rows contain, in large part or completely.

The measure is the fraction of an item's word n-grams that occur in a row; at SHARE or more the row
contains the item. n is 13, as for GPT-3 (https://arxiv.org/abs/2005.14165, appendix C).
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ttrain.core.files import JsonDict, read_object, write_json
from ttrain.data import blocks, json_rows, locations, records
from ttrain.data.chat_templates import Messages
from ttrain.data.packing import Words
from ttrain.data.plain_text import words_of
from ttrain.data.preferences import Preference
from ttrain.errors import DataError

EXCERPT_LETTERS = 80
MOST_PLACES = 3  # reported per item
# Of a set of shards: it has names of files, so no stage may read it.
REPORT = Path("run", "contamination.json")
# What evaluations read: digests of the items that training documents contain.
ITEM_SHARES = Path("heldout", "contamination.json")
OVERLAPS = "overlaps with evaluation items"
ITEM_KEYS = (
    "'question' with 'choices' or 'answer', 'context' with 'target', 'text', a chat, "
    "or a pair of answers"
)
GRAM_WORDS = 13  # of one n-gram; a shorter item is one n-gram
SHARE = 0.5  # of an item's n-grams, from which a document contains it
FEWEST_WORDS = 8  # of an item; what is shorter stands everywhere
# An n-gram of more items than that identifies none of them, such as an instruction before each
# question. Up to 16 questions may share a passage.
MOST_ALIKE = 16
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, without a pattern: of the golden ratio


class TextMatch(NamedTuple):
    """A row's line, the number of a text, and the share of its n-grams in the row."""

    line: int
    text: int
    share: float


class GramIndex:
    """The hashed n-grams of texts.

    totals    number of n-grams that identify each text; a text without one never matches
    """

    def __init__(self, texts: Sequence[str]) -> None:
        texts_of: defaultdict[int, list[int]] = defaultdict(list)
        self._sizes = set[int]()
        for number, text in enumerate(texts):
            words = words_of(text)
            if len(words) >= FEWEST_WORDS:
                size = min(GRAM_WORDS, len(words))
                self._sizes.add(size)
                for gram in grams_of(words, [size]):
                    texts_of[gram].append(number)
        self._texts_of = {
            gram: numbers for gram, numbers in texts_of.items() if len(numbers) <= MOST_ALIKE
        }
        self.totals = Counter(number for numbers in self._texts_of.values() for number in numbers)

    def find(self, text: str) -> dict[int, float]:
        """{number of a text: share of its n-grams that this text has}, without zeros."""
        known = self._texts_of.keys() & grams_of(words_of(text), self._sizes)
        counts = Counter(number for gram in known for number in self._texts_of[gram])
        return {number: count / self.totals[number] for number, count in sorted(counts.items())}


def grams_of(words: Sequence[str], sizes: Iterable[int]) -> set[int]:
    """Hashes of the n-grams of these sizes; they differ between processes, as `hash` does."""
    hashes: Words = np.fromiter(map(hash, words), np.int64, len(words)).view(np.uint64)
    grams = set[int]()
    for size in sizes:
        count = max(0, len(words) - size + 1)
        sums = np.full(count, size, np.uint64)
        for at in range(size):
            sums = (sums * FACTOR) ^ hashes[at : at + count]
        grams.update(sums.tolist())
    return grams


@dataclass(frozen=True)
class EvaluationItem:
    """An evaluation item: its task, its location ("file:line"), its words."""

    task: str
    location: str
    text: str

    @property
    def digest(self) -> str:
        """Digest of the plain text, which does not depend on punctuation."""
        return digest_of_text(self.text.replace(" ", "").encode("utf-8"))


@dataclass(frozen=True)
class OverlapCheck:
    """Items to check training documents against, and whether to remove documents with one.

    left_out    rows of each task's files that are not items
    """

    items: Sequence[EvaluationItem]
    remove: bool
    left_out: Mapping[str, int]

    @property
    def texts(self) -> tuple[str, ...]:
        """Distinct texts of the items."""
        return tuple(dict.fromkeys(item.text for item in self.items))


def digest_of_text(plain: bytes) -> str:
    """Digest of a plain text."""
    return records.hash_of(plain).hex()


def read_items(path: str, left_out: Counter[str]) -> list[EvaluationItem]:
    """Read the items of an evaluation file of any task type; the task is named after the file.

    Counts rows that are no items in `left_out`. Raises DataError if the file has no item.
    """
    items: list[EvaluationItem] = []
    task = locations.name(path)
    tally = json_rows.Tally()
    for _, line, record in json_rows.read([path], tally, json_rows.MAX_LINE_BYTES):
        if (text := of_row(record)) is not None:
            items.append(EvaluationItem(task, f"{task}:{line}", " ".join(words_of(text))))
    left_out[task] += tally.rows - len(items)
    if not items:
        raise DataError(f"{path} has no item of an evaluation: no row has {ITEM_KEYS}")
    return items


def scan(
    block: blocks.Block, recipe: blocks.BlockRecipe, texts: tuple[str, ...]
) -> list[TextMatch]:
    """Find the texts of items in the good rows of a block, which is read again."""
    index = _index_of(texts)
    matches: list[TextMatch] = []
    for line, record in blocks.records(blocks.read(block), block, recipe, json_rows.Tally()):
        text = record.text if isinstance(record, records.TextDocument) else of_chat(record.messages)
        matches += [
            TextMatch(line, *found) for found in index.find(text).items() if found[1] >= SHARE
        ]
    return matches


# A worker gets the same texts for every block.
_index_of = lru_cache(maxsize=1)(GramIndex)


def read_item_shares(directory: Path) -> dict[str, float]:
    """{digest: share} of the items that these training shards contain."""
    return read_object(directory / ITEM_SHARES)


def write_item_shares(directory: Path, items: Mapping[str, float]) -> None:
    """Write what `read_item_shares` reads; no file if there are no items."""
    if items:
        write_json(directory / ITEM_SHARES, dict(sorted(items.items())))


def report(against: OverlapCheck, matches: Sequence[tuple[str, TextMatch]]) -> JsonDict:
    """Report on all matches, each with the name of its file, as JSON.

    {"removed", "documents": number with an item, "share",
     "tasks": {task: {"items", "too_short", "overlapping", "left_out"}},
     "items": [{"task", "where", "digest", "text", "share", "documents",
      "places": [{"file", "line", "share"}]}], the largest share first}
    """
    texts = against.texts
    places_of: defaultdict[str, list[JsonDict]] = defaultdict(list)
    for file, match in sorted(matches, key=lambda found: -found[1].share):
        places_of[texts[match.text]].append(
            {"file": file, "line": match.line, "share": round(match.share, 4)}
        )
    lines: list[JsonDict] = []
    totals = _index_of(texts).totals
    too_short = {text for number, text in enumerate(texts) if number not in totals}
    tasks = {task: Counter(left_out=rows) for task, rows in against.left_out.items()}
    for item in against.items:
        places = places_of[item.text]
        tasks[item.task].update(
            items=1, too_short=int(item.text in too_short), overlapping=int(bool(places))
        )
        if places:
            lines.append(
                {
                    "task": item.task,
                    "where": item.location,
                    "digest": item.digest,
                    "text": item.text[:EXCERPT_LETTERS],
                    "share": places[0]["share"],
                    "documents": len(places),
                    "places": places[:MOST_PLACES],
                }
            )
    lines.sort(key=lambda line: (-line["share"], line["where"]))
    return {
        "share": SHARE,
        "removed": against.remove,
        "documents": len({(file, match.line) for file, match in matches}),
        "tasks": tasks,
        "items": lines,
    }


def of_row(record: JsonDict) -> str | None:
    """The text of an evaluation row; None if it is not one."""
    question, answer, context = (record.get(name) for name in ("question", "answer", "context"))
    if isinstance(question, str):
        choices = record.get("choices")
        if isinstance(choices, list):
            answer = _right_choice(choices, answer)
        else:
            answers = (answer, record.get("final"))
            texts = (str(text) for text in answers if isinstance(text, str | int | float))
            answer = next((text for text in texts if text.strip()), "")
        return f"{question}\n{answer}"
    if isinstance(context, str):
        return f"{context}{record.get('target') or ''}"
    row = records.parser_of(records.kind_of_row(record), json_rows.TEXT)(record)
    if isinstance(row, records.TextDocument):
        return row.text
    if isinstance(row, Preference):
        return of_chat((*row.prompt, *(row.chosen or row.rejected)))
    return of_chat(row.messages) if isinstance(row, records.Conversation) else None


def of_chat(messages: Messages) -> str:
    """The turns of a chat without its system turn."""
    # Many chats of a data set have the same system turn or functions, which would be most of an
    # item: every document seemed to contain 23 of 24 chats with functions, 15 of 150 short ones.
    return "\n".join(message.content for message in messages if message.role != "system")


def _right_choice(choices: Sequence[object], answer: object) -> object:
    if (
        isinstance(answer, str)
        and re.fullmatch(r"\s*[A-Za-z]\s*", answer)
        and answer not in choices
    ):
        answer = ord(answer.strip().upper()) - ord("A")
    if isinstance(answer, int) and 0 <= answer < len(choices):
        return choices[answer]
    return answer if isinstance(answer, str) else ""
