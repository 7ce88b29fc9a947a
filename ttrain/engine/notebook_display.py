"""Show the progress of a pipeline in the cell of a notebook: a line and a bar for each stage, drawn again in place.

IPython's own display is enough for it; the bars of rich and tqdm need ipywidgets there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from ttrain.core.html_table import PLAIN
from ttrain.core.text import format_duration

SECONDS_BETWEEN_DRAWINGS = 0.5
MESSAGES = 10  # the newest


class NotebookDisplay:
    """Passes all that is to be seen as HTML to `draw`, whenever it changes; safe to call from the threads of stages."""

    def __init__(self, draw: Callable[[str], object]) -> None:
        self._draw = draw
        self._lock = threading.RLock()
        self._stages: dict[str, tuple[float | None, str]] = {}  # the finished part, if it is known, and a text
        self._messages: list[str] = []
        self._drawn_at = 0.0

    def say(self, text: str) -> None:
        """Show a message below the stages."""
        with self._lock:
            self._messages = [*self._messages, text][-MESSAGES:]
            self._show()

    def started(self, name: str, why: str) -> None:
        """Show that a stage begins."""
        self._set(name, 0.0, why)

    def progressed(self, name: str, progress: Mapping[str, Any]) -> None:
        """Show the progress of a stage; a total of 0 means unknown."""
        done, total = progress["done"], progress["total"]
        figures = [f"{label.replace('_', ' ')} {value:.3f}" for label, value in progress["figures"].items()]
        text = ", ".join([f"{done:,.0f} {progress['unit']}", *figures])
        is_due = time.monotonic() - self._drawn_at >= SECONDS_BETWEEN_DRAWINGS
        self._set(name, done / total if total else None, text, draws=is_due)

    def ended(self, name: str, state: str, took: float, figures: str) -> None:
        """Show the result of a stage."""
        self._set(name, 1.0, f"{state} {format_duration(took)}{f' - {figures}' if figures else ''}")

    def failed(self, name: str, message: str) -> None:
        """Show that a stage failed."""
        self._set(name, None, f"failed: {message}")

    def _set(self, name: str, part: float | None, text: str, *, draws: bool = True) -> None:
        with self._lock:
            self._stages[name] = (part, text)
            if draws:
                self._show()

    def _show(self) -> None:
        self._drawn_at = time.monotonic()
        rows = [_row(name, *state) for name, state in self._stages.items()]
        messages = "".join(f"<div>{escape(text)}</div>" for text in self._messages)
        self._draw(f'<table style="color: inherit; background: none">{"".join(rows)}</table>{messages}')


def _row(name: str, part: float | None, text: str) -> str:
    bar = "" if part is None else f'<progress max="1" value="{part:.3f}"></progress>'
    cells = (f'<td style="{PLAIN}">{cell}</td>' for cell in (escape(name), bar, escape(text)))
    return f"<tr>{''.join(cells)}</tr>"
