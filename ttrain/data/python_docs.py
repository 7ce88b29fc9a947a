"""The quickstart's data: text of the Python documentation that ships with ttrain, split and cut as the settings say.

Four data sets, each with a held-out part:

    pretrain    docstrings and the language reference
    sft         questions about functions, classes and modules, answered from signatures and docstrings
    dpo         pairs of answers to questions of these chats: the right answer, and that to another question about the same
                object. The right one is the longer in half of the pairs.
    lora        letters of the European alphabets as Unicode describes them: U+00E9, its name, case and UTF-8 bytes.
                SFT has nothing like it, the form of an answer is learnable in a few hundred rows, and the letters
                asked for in the held-out rows are others than those of the training rows (and so are their capitals).

Each row of the file has a group: a module with its twins, a topic of the reference, a letter with its capital. Groups are
held out as a whole, so that the held-out part asks about unseen code, and no document repeats most of one of another group.
`configs/quickstart/make.py` made the file. Rows stand in the order of a hash, so the first ones are a random sample.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from ttrain.config import PythonDocs
from ttrain.config.loading import configs_directory
from ttrain.data.records import Tally, records

HELDOUT_FRACTION = 0.055
HELDOUT_FLOOR_BYTES = 100_000
HELDOUT_FLOOR_ROWS = 100
PAIRS_SHARE = 0.375  # of as many as there are chats
HELDOUT_PAIRS = 300
LETTERS = 800  # of about 1500
MAX_LINE_BYTES = 1 << 20
OBJECT = re.compile(r"`([^`]+)`")  # the first name in a chat's first question
Row = dict[str, Any]


def text_file() -> Path:
    """The file with all rows: in the wheel, or in the checkout."""
    return configs_directory() / "quickstart" / "python.jsonl.zst"


def build(output: Path, settings: PythonDocs) -> dict[str, dict[str, int]]:
    """Write the eight files under `output`; returns rows and UTF-8 bytes of each.

    The held-out part is HELDOUT_FRACTION of each data set, at least 100 kB of documents and 100 rows. The number of chats is
    that of the training rows, the number of bytes that of all documents.
    """
    rows: dict[str, list[Row]] = defaultdict(list)
    for _, _, row in records([str(text_file())], Tally(), MAX_LINE_BYTES):
        rows[row.pop("set")].append(row)
    heldout_chat_rows = max(HELDOUT_FLOOR_ROWS, round(settings.chat_rows * HELDOUT_FRACTION))
    groups = choose_groups(rows["pretrain"], HELDOUT_FRACTION)
    documents, heldout_documents = _split(rows["pretrain"], groups)
    room = max(0, settings.document_bytes - count_bytes(heldout_documents))
    chats, heldout_chats = _split(rows["sft"], groups)
    answers = {answer for row in chats[: settings.chat_rows] for answer in _answers(row)}
    unseen_chats = [row for row in heldout_chats if answers.isdisjoint(_answers(row))]
    letters, heldout_letters = _split(rows["lora"], {row["group"] for row in rows["lora"][:HELDOUT_FLOOR_ROWS]})
    parts = {
        "pretrain": list(_first_bytes(documents, room)),
        "pretrain_heldout": heldout_documents,
        "sft": chats[: settings.chat_rows],
        "sft_heldout": unseen_chats[:heldout_chat_rows],
        "dpo": list(islice(make_pairs(chats[: settings.chat_rows]), round(PAIRS_SHARE * settings.chat_rows))),
        "dpo_heldout": list(islice(make_pairs(unseen_chats), HELDOUT_PAIRS)),
        "lora": letters[:LETTERS],
        "lora_heldout": heldout_letters[:HELDOUT_FLOOR_ROWS],
    }
    output.mkdir(parents=True, exist_ok=True)
    return {name: _write(output / f"{name}.jsonl", part) for name, part in parts.items()}


def choose_groups(documents: Iterable[Row], heldout_fraction: float) -> set[str]:
    """Whole groups in hashed order until fraction and floor are reached; none larger than a quarter of the aim."""
    group_bytes: Counter[str] = Counter()
    for row in documents:
        group_bytes[row["group"]] += count_bytes([row])
    aim = max(HELDOUT_FLOOR_BYTES, heldout_fraction * group_bytes.total())
    chosen: set[str] = set()
    for group in sorted(group_bytes, key=lambda group: sha256(group.encode()).digest()):
        if sum(group_bytes[name] for name in chosen) < aim and group_bytes[group] <= aim / 4:
            chosen.add(group)
    return chosen


def count_bytes(rows: Iterable[Row]) -> int:
    """UTF-8 bytes of the texts or turns of the rows."""
    return sum(len(text.encode()) for row in rows for text in _texts(row))


def _texts(row: Row) -> list[str]:
    turns = row.get("messages") or row.get("prompt") or ()
    return [row[key] for key in ("text", "chosen", "rejected") if key in row] + [turn["content"] for turn in turns]


def make_pairs(chats: Iterable[Row]) -> Iterator[Row]:
    """Pairs of answers to each question that has a wrong answer: the right one, and that to another question about the same
    object, within these chats. Neither is the beginning of the other, and the right one is the longer in half of the pairs.
    """
    turns = [turn for row in chats for turn in _turns(row)]
    answers: dict[str, dict[str, None]] = defaultdict(dict)
    for subject, _, answer, _ in turns:
        answers[subject][answer] = None
    for subject, prompt, answer, source in turns:
        others = (other for other in answers[subject] if not (other.startswith(answer) or answer.startswith(other)))
        rejected = min(others, key=lambda other: sha256(f"{prompt[-1]['content']}{other}".encode()).digest(), default=None)
        if rejected is not None:
            yield {"prompt": prompt, "chosen": answer, "rejected": rejected, "source": source}


def _turns(row: Row) -> Iterator[tuple[str, list[Row], str, str]]:
    """(the object that the chat is about, all before the answer, answer, source) of each answer; none without a name."""
    messages = row["messages"]
    if named := OBJECT.search(next(turn["content"] for turn in messages if turn["role"] == "user")):
        for number, turn in enumerate(messages):
            if turn["role"] == "assistant":
                yield named[1], messages[:number], turn["content"], row["source"]


def _split(rows: Iterable[Row], groups: set[str]) -> tuple[list[Row], list[Row]]:
    """(training rows, rows of the held-out groups)."""
    parts: tuple[list[Row], list[Row]] = [], []
    for row in rows:
        parts[row["group"] in groups].append(row)
    return parts


def _answers(row: Row) -> list[str]:
    return [message["content"] for message in row["messages"] if message["role"] == "assistant"]


def _first_bytes(rows: Iterable[Row], most_bytes: int) -> Iterator[Row]:
    """The first rows, up to `most_bytes`."""
    for row in rows:
        most_bytes -= count_bytes([row])
        if most_bytes < 0:
            break
        yield row


def _write(path: Path, rows: Iterable[Row]) -> dict[str, int]:
    """One JSON object per line, without its group; returns rows and UTF-8 bytes of the text."""
    written = [{name: value for name, value in row.items() if name != "group"} for row in rows]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in written), encoding="utf-8", newline="\n")
    return {"rows": len(written), "bytes": count_bytes(written)}
