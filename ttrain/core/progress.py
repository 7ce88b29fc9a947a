"""How far a stage is: written by its process into a small file, read and drawn by the parent."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

SECONDS_BETWEEN_WRITES = 0.2


class Progress:
    """The writing side. Writes at most five times a second, so that it costs nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._next = 0.0

    def update(self, done: float, total: float, unit: str, *, start: bool = False, **figures: float) -> None:
        """`done` of `total` `unit`s, 0 where the total is not known; `figures` are shown beside the bar."""
        now = time.monotonic()
        if self._path is None or (now < self._next and done != total and not start):
            return
        self._next = now + SECONDS_BETWEEN_WRITES
        temporary = self._path.with_suffix(".tmp")
        with contextlib.suppress(OSError):  # a full disk costs the bar, not the stage
            temporary.write_text(json.dumps({"done": done, "total": total, "unit": unit, "figures": figures}))
            temporary.replace(self._path)
