"""The lines of a `metrics.jsonl`, as rows: {"step", "tokens", "time", "metrics"}."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ttrain.core.files import parse_json

Row = Mapping[str, Any]


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a `metrics.jsonl`, without lines that are none."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n") and (row := parse_row(line)) is not None:
                yield row


def parse_row(line: bytes) -> Row | None:
    """The row of a line; None for a line that is none, which a crash of the machine can leave."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    kinds = {"step": int, "metrics": dict, "time": int | float | None}
    good = isinstance(row, dict) and all(isinstance(row.get(name), kind) for name, kind in kinds.items())
    return row if good else None
