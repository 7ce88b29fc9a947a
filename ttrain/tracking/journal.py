"""The journal of an outbox: what is to be told, which files of it arrived, what was told; a line each, never rewritten."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ttrain.core.files import parse_json

NAME: Final = "journal.jsonl"


@dataclass(eq=False)
class Entry:
    """One thing to tell; `parts` are the files of it that have arrived, `answer` what MLflow said."""

    number: int
    what: str
    data: Mapping[str, Any]
    parts: set[str] = field(default_factory=set)
    answer: Any = None


def append(directory: Path, row: Mapping[str, Any]) -> None:
    """One write a line, so that a kill leaves whole lines; a newline before, where a crash of the machine did not.

    Raises OSError.
    """
    number = os.open(directory / NAME, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        size = os.fstat(number).st_size
        torn = size and os.pread(number, 1, size - 1) != b"\n"
        os.write(number, (b"\n" if torn else b"") + json.dumps(dict(row)).encode() + b"\n")
    finally:
        os.close(number)


def read(directory: Path) -> dict[int, Entry]:
    """What is still to be told, by number, in its order; a torn line, of a crash of the machine, is passed over."""
    entries: dict[int, Entry] = {}
    for row in _rows(directory / NAME):
        number = row.get("number")
        if "told" in row:
            entries.pop(row["told"], None)
        elif "what" in row and isinstance(number, int):
            data = {key: value for key, value in row.items() if key not in ("number", "what")}
            entries[number] = Entry(number, row["what"], data)
        elif "part" in row and number in entries:
            entries[number].parts.add(row["part"])
    return entries


def _rows(journal: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(OSError):
        for line in journal.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                row = parse_json(line)
                if isinstance(row, dict):
                    yield row
