"""Make python.jsonl.zst, the quickstart's text, from the documentation of the Python that runs this script.

    .venv/bin/python configs/quickstart/make.py     # in the checkout; the file that ships was made by CPython 3.11.7

A row has a set, such as "sft" or "sft_heldout", and is else as the data set has it:

    pretrain    docstrings and the language reference
    sft         questions about functions, classes and modules, answered from signatures and docstrings
    dpo         pairs of answers to questions of these chats: the right answer, and that to another question about the same
                object. The right one is the longer in half of the pairs.
    lora        letters of the European alphabets as Unicode describes them: U+00E9, its name, case and UTF-8 bytes.
                SFT has nothing like it, the form of an answer is learnable in a few hundred rows, and the letters
                asked for in the held-out rows are others than those of the training rows (and so are their capitals).

Groups are held out as a whole, so that the held-out part asks about unseen code: a module with its
twins, such as `heapq` and `_heapq`, a topic of the reference, a letter with its capital. What is left
of repetition between groups is removed: items by word 8-grams, documents by the search of
`shards.decontaminate`. With neither, 21 % of the held-out docstrings stood in the training part word
for word; with the twins together 6 % still did, with the 8-grams alone 11 of 626.

Every choice depends on the sha256 of a name, never on a random state, on set order or on which modules are imported: the
same Python always makes the same file.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
from chats import chats_about
from reading import DocumentedItem, order, pick, read_python

from ttrain.data import python_docs
from ttrain.data.contamination import GramIndex

CHAT_ROWS = 10_000  # of 36,000
TAKEN_CHATS = 4_000  # by the quickstart; pairs are made of these
HELDOUT_FRACTION, HELDOUT_FLOOR_BYTES = 0.055, 100_000  # of the documents
HELDOUT_CHATS, HELDOUT_PAIRS, HELDOUT_LETTERS = 220, 300, 100
OBJECT = re.compile(r"`([^`]+)`")  # the first name in a chat's first question
NGRAM_WORDS = 8
SHARE = 0.5  # of the 13-grams of a document, from which another contains it
DOCUMENT_BYTES = 2_000  # about three rows of 256 tokens; longer texts are cut between paragraphs
ALPHABETS = ("LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "GEORGIAN")
LETTER_QUESTIONS = ("Describe the letter {letter}.", "Which letter is {code}?", "Describe {name}.")
Row = dict[str, Any]


def main() -> None:
    items, unreadable = read_python()
    distinct = drop_exact(items)
    originals = drop_near(distinct)
    packed = pack_documents(originals)
    documents = drop_contained(packed)
    rows = split_parts(documents, list(islice(chats_about(originals), CHAT_ROWS)), make_letters())
    lines = [
        json.dumps({"set": name, **row}, ensure_ascii=False) + "\n"
        for name, part in rows.items()
        for row in part
    ]
    data = "".join(lines).encode()
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else python_docs.text_file()
    file.write_bytes(pa.Codec("zstd", compression_level=22).compress(data, asbytes=True))
    print(
        f"Python {sys.version.split()[0]}: {file}, {file.stat().st_size:,} bytes of {len(data):,}"
    )
    for name, part in rows.items():
        print(f"{name}: {len(part):,} rows, {python_docs.count_bytes(part):,} bytes of text")
    print(
        f"left out: {unreadable} unreadable files, {len(items) - len(distinct)} repeated items, ",
        end="",
    )
    print(
        f"{len(distinct) - len(originals)} copies by 8-grams, {len(packed) - len(documents)} documents within others"
    )


def split_parts(documents: list[Row], chats: list[Row], letters: list[Row]) -> dict[str, list[Row]]:
    """The rows of each data set and of its held-out part, without their groups."""
    groups = choose_groups(documents, HELDOUT_FRACTION)
    pretrain, pretrain_heldout = split(documents, groups)
    sft, heldout_chats = split(chats, groups)
    answers = {answer for row in sft[:TAKEN_CHATS] for answer in answers_of(row)}
    unseen_chats = [row for row in heldout_chats if answers.isdisjoint(answers_of(row))]
    lora, lora_heldout = split(letters, {row["group"] for row in letters[:HELDOUT_LETTERS]})
    parts = {
        "pretrain": pretrain,
        "pretrain_heldout": pretrain_heldout,
        "sft": sft,
        "sft_heldout": unseen_chats[:HELDOUT_CHATS],
        "dpo": make_pairs(sft[:TAKEN_CHATS]),
        "dpo_heldout": islice(make_pairs(unseen_chats), HELDOUT_PAIRS),
        "lora": lora,
        "lora_heldout": lora_heldout[:HELDOUT_LETTERS],
    }
    return {name: [without_group(row) for row in part] for name, part in parts.items()}


def without_group(row: Row) -> Row:
    return {name: value for name, value in row.items() if name != "group"}


def choose_groups(documents: Iterable[Row], heldout_fraction: float) -> set[str]:
    """Whole groups in hashed order until fraction and floor are reached; none larger than a quarter of the aim."""
    group_bytes: Counter[str] = Counter()
    for row in documents:
        group_bytes[row["group"]] += python_docs.count_bytes([row])
    aim = max(HELDOUT_FLOOR_BYTES, heldout_fraction * group_bytes.total())
    chosen: set[str] = set()
    for group in sorted(group_bytes, key=lambda group: sha256(group.encode()).digest()):
        if sum(group_bytes[name] for name in chosen) < aim and group_bytes[group] <= aim / 4:
            chosen.add(group)
    return chosen


def split(rows: Iterable[Row], groups: set[str]) -> tuple[list[Row], list[Row]]:
    """(training rows, rows of the held-out groups)."""
    parts: tuple[list[Row], list[Row]] = [], []
    for row in rows:
        parts[row["group"] in groups].append(row)
    return parts


def answers_of(row: Row) -> list[str]:
    return [message["content"] for message in row["messages"] if message["role"] == "assistant"]


def make_pairs(chats: Iterable[Row]) -> Iterator[Row]:
    """Pairs of answers to each question that has a wrong answer: the right one, and that to another question about the same
    object, within these chats. Neither is the beginning of the other, and the right one is the longer in half of the pairs.
    """
    turns = [turn for row in chats for turn in turns_of(row)]
    answers: dict[str, dict[str, None]] = defaultdict(dict)
    for subject, _, answer, _ in turns:
        answers[subject][answer] = None
    for subject, prompt, answer, source in turns:
        others = (
            other
            for other in answers[subject]
            if not (other.startswith(answer) or answer.startswith(other))
        )
        rejected = min(
            others,
            key=lambda other: sha256(f"{prompt[-1]['content']}{other}".encode()).digest(),
            default=None,
        )
        if rejected is not None:
            yield {"prompt": prompt, "chosen": answer, "rejected": rejected, "source": source}


def turns_of(row: Row) -> Iterator[tuple[str, list[Row], str, str]]:
    """(the object that the chat is about, all before the answer, answer, source) of each answer; none without a name."""
    messages = row["messages"]
    if named := OBJECT.search(next(turn["content"] for turn in messages if turn["role"] == "user")):
        for number, turn in enumerate(messages):
            if turn["role"] == "assistant":
                yield named[1], messages[:number], turn["content"], row["source"]


def drop_exact(items: list[DocumentedItem]) -> list[DocumentedItem]:
    """Remove repeated texts, ignoring white space; the first in the order of topics, then of hashed modules, stays."""
    items = sorted(items, key=lambda item: b"" if item.origin == "reference" else order(item.group))
    first: dict[str, DocumentedItem] = {}
    for item in items:
        first.setdefault(" ".join(item.doc.split()), item)
    return list(first.values())


def shingles(text: str) -> set[str]:
    """Word 8-grams, without case and punctuation."""
    tokens = re.findall(r"\w+", text.lower())
    return {
        " ".join(tokens[start : start + NGRAM_WORDS])
        for start in range(len(tokens) - NGRAM_WORDS + 1)
    }


def drop_near(items: list[DocumentedItem]) -> list[DocumentedItem]:
    """Remove items of which other groups have more than half of the 8-grams, the shortest first, until none is left."""
    grams = {item: shingles(item.doc) for item in items}
    groups_of: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for item in items:
        for gram in grams[item]:
            groups_of[gram][item.group] += 1
    dropped: set[DocumentedItem] = set()
    for item in sorted(items, key=lambda item: len(grams[item])):
        repeated = sum(
            any(count for group, count in groups_of[gram].items() if group != item.group)
            for gram in grams[item]
        )
        if repeated > 0.5 * len(grams[item]):
            dropped.add(item)
            for gram in grams[item]:
                groups_of[gram][item.group] -= 1
    return [item for item in items if item not in dropped]


def pack_documents(items: list[DocumentedItem]) -> list[Row]:
    """One document per docstring, without the name of its object, and a few per topic; shuffled by hash.

    Names and signatures as headings made text that is harder to learn: 2.08 bits per byte on held-out documents after
    1.1 M tokens against 2.01 for docstrings alone (1 M parameters, vocabulary 2048); xz -9e takes 2.14 and 2.28.
    """
    parts: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for item in items:
        qualname = item.qualname if item.origin == "docstring" else ""
        parts[item.group, item.origin, item.module, qualname] += item.doc.split("\n\n")
    return shuffled(
        {"group": group, "text": text, "source": f"{origin}:{module}"}
        for (group, origin, module, _), texts in parts.items()
        for text in pack(texts)
    )


def pack(parts: Iterable[str]) -> Iterator[str]:
    """Join neighbouring parts by blank lines, up to DOCUMENT_BYTES; a larger part stays alone."""
    pending: list[str] = []
    size = 0
    for text in parts:
        length = len(text.encode()) + 2
        if pending and size + length > DOCUMENT_BYTES:
            yield "\n\n".join(pending)
            pending, size = [], 0
        pending.append(text)
        size += length
    if pending:
        yield "\n\n".join(pending)


def shuffled(rows: Iterable[Row]) -> list[Row]:
    """The rows in the order of the hashes of their texts, each text once, ignoring white space."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(" ".join(row["text"].split()), row)
    return sorted(first.values(), key=lambda row: order(row["text"]))


def drop_contained(documents: list[Row]) -> list[Row]:
    """Remove documents of which half stands in a longer document of another group, until none does."""
    while contained := contained_documents(documents):
        documents = [row for number, row in enumerate(documents) if number not in contained]
    return documents


def contained_documents(documents: list[Row]) -> set[int]:
    """Numbers of the documents of which the search of `shards.decontaminate` finds SHARE in a document of another group.

    Of two that contain each other only the shorter is listed.
    """
    texts = [row["text"] for row in documents]
    index = GramIndex(texts)
    shares = {
        (record, text): share
        for record, row in enumerate(texts)
        for text, share in index.find(row).items()
    }
    contained: set[int] = set()
    for (record, text), share in shares.items():
        is_copy = share >= SHARE and documents[record]["group"] != documents[text]["group"]
        is_mutual = shares.get((text, record), 0) >= SHARE
        if is_copy and not (is_mutual and (len(texts[text]), text) > (len(texts[record]), record)):
            contained.add(text)
    return contained


def make_letters() -> list[Row]:
    """A row of each letter; a letter and its capital, 3 in 4 characters of the answer alike, stand together as a group."""
    pairs: dict[str, list[str]] = defaultdict(list)
    for letter in map(chr, range(0xC0, 0x2000)):
        if unicodedata.category(letter) in ("Lu", "Ll") and unicodedata.name(letter).startswith(
            ALPHABETS
        ):
            pairs[letter.upper()].append(letter)
    return [letter_row(letter, pair) for pair in sorted(pairs, key=order) for letter in pairs[pair]]


def letter_row(letter: str, pair: str) -> Row:
    """Code point, name, script, case, counterpart and bytes of a letter, asked for in one of three ways."""
    name, code = unicodedata.name(letter), f"U+{ord(letter):04X}"
    case, other_case, change = (
        ("small", "capital", letter.upper())
        if letter.islower()
        else ("capital", "small", letter.lower())
    )
    answer = f"{letter} is {code}, {name}: a {case} letter of the {name.partition(' ')[0].capitalize()} script. "
    if len(change) == 1 and change != letter:
        answer += f"Its {other_case} letter is {change}, U+{ord(change):04X}. "
    answer += f"In UTF-8 it is {letter.encode().hex(' ').upper()}."
    question = LETTER_QUESTIONS[pick(name, len(LETTER_QUESTIONS))].format(
        letter=letter, code=code, name=name
    )
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"group": pair, "messages": messages, "source": f"letter:{code}"}


if __name__ == "__main__":
    main()
