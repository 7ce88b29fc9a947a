"""The quickstart's data, without a network: what the Python that runs this says about itself, as JSONL.

Three data sets, each with a held-out part:

    pretrain    docstrings and the language reference; a share of it may be source code
    sft         questions about functions, classes and modules, answered from signatures and docstrings
    lora        letters of the European alphabets as Unicode describes them: U+00E9, its name, case and UTF-8 bytes.
                SFT has nothing like it, the form of an answer is learnable in a few hundred rows, and the letters
                asked for in the held-out rows are others than those of the training rows (and so are their capitals).

Documents and chats are split by module, topics by topic, so that the held-out part asks about unseen code. Twins such
as `heapq` and `_heapq` count as one module; what is left of repetition is removed by word 8-grams. With neither, 21 %
of the held-out docstrings stood in the training part word for word; with the twins together 6 % still did.

Every choice hangs on the sha256 of a name, never on a random state, on set order or on what happens to be imported:
one Python writes the same bytes wherever and whenever it is asked to.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ttrain.data.letters import make_letters
from ttrain.data.python_chats import make_chats
from ttrain.data.python_documents import clean_code, count_bytes, pack_documents, take_bytes
from ttrain.data.python_items import order
from ttrain.data.python_reading import read_python
from ttrain.data.python_split import drop_exact, split
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
