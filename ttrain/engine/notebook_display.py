"""Show the progress of a pipeline in the cell of a notebook: a line and a bar for each stage, drawn again in place.

IPython's own display is enough for it; the bars of rich and tqdm need ipywidgets there.
"""

import threading
import time
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from ttrain.core.html_table import PLAIN
from ttrain.core.text import format_duration
from ttrain.engine.display import StageDisplay
from ttrain.engine.progress import StageProgress

SECONDS_BETWEEN_DRAWINGS = 0.5
MESSAGES = 10  # the newest


def notebook_display() -> StageDisplay | None:
    """A display in the cell that runs; None outside of a notebook."""
    from rich.console import Console

    if not Console().is_jupyter:
        return None
    from IPython.display import HTML, display  # there in a notebook

    cell = display(HTML(""), display_id=True)
    return NotebookDisplay(lambda text: cell.update(HTML(text)))


class NotebookDisplay:
    """Passes all that is to be seen as HTML to `draw`, whenever it changes; safe to call from the threads of stages."""

    def __init__(self, draw: Callable[[str], object]) -> None:
        self._draw = draw
        self._lock = threading.RLock()
        self._stages: dict[str, tuple[float | None, str]] = {}  # the finished part, if it is known, and a text
        self._messages: list[str] = []
        self._drawn_at = 0.0

    def __call__(self, stage: str, event: str, data: Mapping[str, Any]) -> None:
        """Show an event, as `engine.display` describes them."""
        with self._lock:
            if event == "message":
                self._messages = [*self._messages, data["text"]][-MESSAGES:]
            else:
                self._stages[stage] = _state(event, data)
            is_due = time.monotonic() - self._drawn_at >= SECONDS_BETWEEN_DRAWINGS
            if event != "progressed" or is_due:
                self._show()

    def _show(self) -> None:
        self._drawn_at = time.monotonic()
        rows = [_row(name, *state) for name, state in self._stages.items()]
        messages = "".join(f"<div>{escape(text)}</div>" for text in self._messages)
        self._draw(f'<table style="color: inherit; background: none">{"".join(rows)}</table>{messages}')


def _state(event: str, data: Mapping[str, Any]) -> tuple[float | None, str]:
    """(finished part, text) of a stage after an event; a total of 0 means unknown."""
    if event == "started":
        return 0.0, data["why"]
    if event == "failed":
        return None, f"failed: {data['error']}"
    if event == "ended":
        figures = f" - {data['figures']}" if data["figures"] else ""
        return 1.0, f"{data['state']} {format_duration(data['seconds'])}{figures}"
    progress = StageProgress(**data)
    return progress.part, progress.details


def _row(name: str, part: float | None, text: str) -> str:
    bar = "" if part is None else f'<progress max="1" value="{part:.3f}"></progress>'
    cells = (f'<td style="{PLAIN}">{cell}</td>' for cell in (escape(name), bar, escape(text)))
    return f"<tr>{''.join(cells)}</tr>"
