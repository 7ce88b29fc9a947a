"""Files of items, and shards that may hold them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

POEM = "床前明月光，疑是地上霜。舉頭望明月，低頭思故鄉。"
QUESTION, ANSWER = "Which river does the old wooden bridge of the village cross?", "The upper Rhine"


def jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return path
