"""The quickstart's data: text of the Python documentation, cut as the settings say.

`configs/quickstart/make.py` made the file, and documents its rows. They stand in the order of a
hash, so the first ones are a random sample.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ttrain.config import PythonDocs
from ttrain.config.yaml_text import configs_directory
from ttrain.data import json_rows

PAIRS_SHARE = 0.375  # of as many as there are chats
LETTERS = 800  # of about 1500
MAX_LINE_BYTES = 1 << 20
Row = dict[str, Any]


def text_file() -> Path:
    """The file with all rows: in the wheel, or in the checkout."""
    return configs_directory() / "quickstart" / "python.jsonl.zst"


def build(output: Path, settings: PythonDocs) -> dict[str, dict[str, int]]:
    """Write the eight files under `output`; returns rows and UTF-8 bytes of each.

    The settings count training rows, and the bytes of all documents.
    """
    rows: dict[str, list[Row]] = defaultdict(list)
    for _, _, row in json_rows.read([str(text_file())], json_rows.Tally(), MAX_LINE_BYTES):
        rows[row.pop("set")].append(row)
    room = settings.document_bytes - count_bytes(rows["pretrain_heldout"])
    sizes = itertools.accumulate(count_bytes([row]) for row in rows["pretrain"])
    rows["pretrain"] = rows["pretrain"][: sum(size <= room for size in sizes)]
    rows["sft"] = rows["sft"][: settings.chat_rows]
    rows["dpo"] = rows["dpo"][: round(PAIRS_SHARE * settings.chat_rows)]
    rows["lora"] = rows["lora"][:LETTERS]
    output.mkdir(parents=True, exist_ok=True)
    return {name: _write(output / f"{name}.jsonl", part) for name, part in rows.items()}


def count_bytes(rows: Iterable[Row]) -> int:
    """UTF-8 bytes of the texts or turns of the rows."""
    return sum(len(text.encode()) for row in rows for text in _texts(row))


def _texts(row: Row) -> list[str]:
    return [
        *(row[key] for key in ("text", "chosen", "rejected") if key in row),
        *(turn["content"] for turn in row.get("messages") or row.get("prompt") or ()),
    ]


def _write(path: Path, rows: list[Row]) -> dict[str, int]:
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
        encoding="utf-8",
        newline="\n",
    )
    return {"rows": len(rows), "bytes": count_bytes(rows)}
