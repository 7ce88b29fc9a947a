"""Make the quickstart's data without a network: the documentation of the running Python, as JSONL.

Three data sets, each with a held-out part:

    pretrain    docstrings and the language reference; a share of it may be source code
    sft         questions about functions, classes and modules, answered from signatures and docstrings
    lora        letters of the European alphabets as Unicode describes them: U+00E9, its name, case and UTF-8 bytes.
                SFT has nothing like it, the form of an answer is learnable in a few hundred rows, and the letters
                asked for in the held-out rows are others than those of the training rows (and so are their capitals).

Documents and chats are split by module, topics by topic, so that the held-out part asks about unseen code. Twins such
as `heapq` and `_heapq` count as one module; what is left of repetition is removed by word 8-grams. With neither, 21 %
of the held-out docstrings stood in the training part word for word; with the twins together 6 % still did.

Every choice depends on the sha256 of a name, never on a random state, on set order or on which modules are imported:
the same Python always writes the same bytes.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from ttrain.data.python_chats import make_chats
from ttrain.data.python_reading import DocumentedItem, group_of, order, pick, plain, read_python
from ttrain.errors import UsageError

HELDOUT_FLOOR_ROWS = 100


def build(
    output: Path,
    *,
    document_bytes: int,
    chat_rows: int,
    domain_rows: int,
    heldout_fraction: float,
    source_code_fraction: float = 0.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Write the six files under `output`; returns rows and UTF-8 bytes of each, and what was removed.

    `document_bytes` bounds training and held-out documents together; `source_code_fraction` of them is source code, all
    of it in the training part. `chat_rows` and `domain_rows` bound the training rows. The held-out part is
    `heldout_fraction` of each, at least 100 kB of documents and 100 rows. `progress` gets files done and files in all.
    """
    if not 0 < heldout_fraction < 1 or not 0 <= source_code_fraction <= 1:
        raise UsageError(
            f"heldout_fraction is {heldout_fraction} and source_code_fraction is {source_code_fraction}, "
            "but they must lie within 0 and 1; try 0.06 and 0.0"
        )
    output.mkdir(parents=True, exist_ok=True)
    items, code, unreadable_files = read_python(progress, with_code=source_code_fraction > 0)
    items, exact = drop_exact(items)
    train, heldout, near = split(items, heldout_fraction)
    heldout_documents = pack_documents(heldout)
    room = max(0, document_bytes - count_bytes(heldout_documents))
    code_bytes = min(room, round(document_bytes * source_code_fraction))
    documents = take_bytes(pack_documents(train), room - code_bytes)
    documents += take_bytes(clean_code(code, train, heldout), code_bytes)
    documents.sort(key=lambda row: order(row["text"]))
    heldout_chat_rows, heldout_domain_rows = (
        max(HELDOUT_FLOOR_ROWS, round(rows * heldout_fraction)) for rows in (chat_rows, domain_rows)
    )
    chats, heldout_chats = make_chats(train, heldout, chat_rows, heldout_chat_rows)
    letters, heldout_letters = make_letters(domain_rows, heldout_domain_rows)
    return {
        "pretrain": write(output / "pretrain.jsonl", documents),
        "pretrain_heldout": write(output / "pretrain_heldout.jsonl", heldout_documents),
        "sft": write(output / "sft.jsonl", chats),
        "sft_heldout": write(output / "sft_heldout.jsonl", heldout_chats),
        "lora": write(output / "lora.jsonl", letters),
        "lora_heldout": write(output / "lora_heldout.jsonl", heldout_letters),
        "removed": {"exact_duplicates": exact, "near_duplicates": near, "unreadable_files": unreadable_files},
    }


def write(path: Path, rows: list[dict[str, Any]]) -> dict[str, int]:
    """One JSON object per line; returns rows and UTF-8 bytes of the text."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return {"rows": len(rows), "bytes": count_bytes(rows)}


ALPHABETS = ("LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "GEORGIAN")

LETTER_QUESTIONS = ("Describe the letter {letter}.", "Which letter is {code}?", "Describe {name}.")


def make_letters(rows: int, heldout_rows: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out rows; a letter and its capital, 3 in 4 characters of the answer alike, stay together."""
    pairs: dict[str, list[str]] = defaultdict(list)
    for letter in map(chr, range(0xC0, 0x2000)):
        if unicodedata.category(letter) in ("Lu", "Ll") and unicodedata.name(letter).startswith(ALPHABETS):
            pairs[letter.upper()].append(letter)
    train: list[str] = []
    heldout: list[str] = []
    for pair in sorted(pairs, key=order):
        (train if len(heldout) >= heldout_rows else heldout).extend(pairs[pair])
    train, heldout = sorted(train[:rows], key=order), sorted(heldout[:heldout_rows], key=order)
    return [letter_row(letter) for letter in train], [letter_row(letter) for letter in heldout]


def letter_row(letter: str) -> dict[str, Any]:
    """Code point, name, script, case, counterpart and bytes of a letter, asked for in one of three ways."""
    name, code = unicodedata.name(letter), f"U+{ord(letter):04X}"
    case, other_case, change = (
        ("small", "capital", letter.upper()) if letter.islower() else ("capital", "small", letter.lower())
    )
    answer = f"{letter} is {code}, {name}: a {case} letter of the {name.partition(' ')[0].capitalize()} script. "
    if len(change) == 1 and change != letter:
        answer += f"Its {other_case} letter is {change}, U+{ord(change):04X}. "
    answer += f"In UTF-8 it is {letter.encode().hex(' ').upper()}."
    question = LETTER_QUESTIONS[pick(name, len(LETTER_QUESTIONS))].format(letter=letter, code=code, name=name)
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "source": f"letter:{code}"}


DOCUMENT_BYTES = 2_000  # about three rows of 256 tokens; longer texts are cut between paragraphs


def pack_documents(items: list[DocumentedItem]) -> list[dict[str, Any]]:
    """One document per docstring, without the name of its object, and a few per topic; shuffled by hash.

    Names and signatures as headings made text that is harder to learn: 2.08 bits per byte on held-out documents after
    1.1 M tokens against 2.01 for docstrings alone (1 M parameters, vocabulary 2048); xz -9e takes 2.14 and 2.28.
    """
    parts: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for item in items:
        qualname = item.qualname if item.origin == "docstring" else ""
        parts[item.origin, item.module, qualname] += item.doc.split("\n\n")
    return shuffled(
        (text, f"{origin}:{module}") for (origin, module, _), texts in parts.items() for text in pack(texts, DOCUMENT_BYTES)
    )


def shuffled(pieces: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    """Rows of text and source in the order of their hashes, each text once, ignoring white space."""
    first: dict[str, tuple[str, str]] = {}
    for text, source in pieces:
        first.setdefault(" ".join(text.split()), (text, source))
    return [{"text": text, "source": source} for text, source in sorted(first.values(), key=lambda row: order(row[0]))]


def clean_code(
    code: dict[str, list[str]], train: list[DocumentedItem], heldout: list[DocumentedItem]
) -> list[dict[str, Any]]:
    """Source of training modules, shuffled by hash; pieces that share an 8-gram with held-out text are left out."""
    heldout_grams = {gram for item in heldout for gram in shingles(item.doc)}
    groups = {item.group for item in train}
    return shuffled(
        (plain(piece), f"code:{module}")
        for module, pieces in code.items()
        for whole in (pieces if group_of(module) in groups else [])
        for piece in pack(whole.split("\n\n"), DOCUMENT_BYTES)
        if heldout_grams.isdisjoint(shingles(piece))
    )


def pack(parts: Iterable[str], most_bytes: int) -> Iterator[str]:
    """Join neighbouring parts by blank lines, up to `most_bytes`; a larger part stays alone."""
    pending: list[str] = []
    size = 0
    for text in parts:
        length = len(text.encode()) + 2
        if pending and size + length > most_bytes:
            yield "\n\n".join(pending)
            pending, size = [], 0
        pending.append(text)
        size += length
    if pending:
        yield "\n\n".join(pending)


def count_bytes(rows: Iterable[dict[str, Any]]) -> int:
    """UTF-8 bytes of the texts or messages of the rows."""
    texts = (text for row in rows for text in ([row["text"]] if "text" in row else [m["content"] for m in row["messages"]]))
    return sum(len(text.encode()) for text in texts)


def take_bytes(rows: list[dict[str, Any]], most_bytes: int) -> list[dict[str, Any]]:
    """The first rows, up to `most_bytes`."""
    head = []
    for row in rows:
        most_bytes -= count_bytes([row])
        if most_bytes < 0:
            break
        head.append(row)
    return head


HELDOUT_FLOOR_BYTES = 100_000

NGRAM_WORDS = 8

MOST_SHARED = 0.5  # of the 8-grams; a docstring above it counts as a copy


def drop_exact(items: list[DocumentedItem]) -> tuple[list[DocumentedItem], int]:
    """Remove repeated texts, ignoring white space; the first in the order of topics, then of hashed modules, stays."""
    items = sorted(items, key=lambda item: b"" if item.origin == "reference" else order(item.group))
    first: dict[str, DocumentedItem] = {}
    for item in items:
        first.setdefault(" ".join(item.doc.split()), item)
    return list(first.values()), len(items) - len(first)


def shingles(text: str) -> set[str]:
    """Word 8-grams, without case and punctuation."""
    tokens = re.findall(r"\w+", text.lower())
    return {" ".join(tokens[start : start + NGRAM_WORDS]) for start in range(len(tokens) - NGRAM_WORDS + 1)}


def is_copy(grams: set[str], known_grams: Collection[str]) -> bool:
    """Whether more than half of the 8-grams are known."""
    return sum(gram in known_grams for gram in grams) > MOST_SHARED * len(grams)


def split(items: list[DocumentedItem], heldout_fraction: float) -> tuple[list[DocumentedItem], list[DocumentedItem], int]:
    """Training items, held-out items, and how many near duplicates were removed on either side.

    A held-out item goes if more than half of it stands in other modules; what is left of a module decides whether the
    module is held out, so the floor holds after removal. A training item goes if more than half of it is held out.
    """
    grams = {item: shingles(item.doc) for item in items}
    owners: dict[str, str] = {}
    for item, item_grams in grams.items():
        for gram in item_grams:
            if owners.setdefault(gram, item.group) != item.group:
                owners[gram] = ""
    shared = {gram for gram, owner in owners.items() if not owner}
    originals = [item for item in items if not is_copy(grams[item], shared)]
    groups = choose_groups(originals, heldout_fraction)
    heldout = [item for item in originals if item.group in groups]
    heldout_grams = {gram for item in heldout for gram in grams[item]}
    candidates = [item for item in items if item.group not in groups]
    train = [item for item in candidates if not is_copy(grams[item], heldout_grams)]
    return train, heldout, len(items) - len(train) - len(heldout)


def choose_groups(items: list[DocumentedItem], heldout_fraction: float) -> set[str]:
    """Whole groups in hashed order until fraction and floor are reached; none larger than a quarter of the aim."""
    group_bytes: Counter[str] = Counter()
    for item in items:
        group_bytes[item.group] += len(item.doc.encode())
    aim = max(1.05 * HELDOUT_FLOOR_BYTES, heldout_fraction * group_bytes.total())  # cuts lose a few blank lines
    chosen: set[str] = set()
    total = 0
    for group in sorted(group_bytes, key=order):
        if total < aim and group_bytes[group] <= aim / 4:
            chosen.add(group)
            total += group_bytes[group]
    if total < HELDOUT_FLOOR_BYTES:
        raise UsageError(
            f"only {total} bytes of this Python's documentation can be held out, but {HELDOUT_FLOOR_BYTES} are needed; "
            "use a complete Python, or set data.pretrain to files of your own"
        )
    return chosen
