"""Displays for the Python interface: a cell of a notebook, a function that is called with each event."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttrain.engine.progress_display import StageDisplay

Progress = Callable[[str, str, Mapping[str, Any]], object]


def notebook_display() -> StageDisplay | None:
    """A display in the cell that runs; None outside of a notebook."""
    from rich.console import Console

    if not Console().is_jupyter:
        return None
    from IPython.display import HTML, display  # there in a notebook

    from ttrain.engine.notebook_display import NotebookDisplay

    cell = display(HTML(""), display_id=True)
    return NotebookDisplay(lambda text: cell.update(HTML(text)))


@dataclass
class CallbackDisplay:
    """Passes the events of the stages to a function."""

    _progress: Progress

    def say(self, text: str) -> None:
        self._progress("", "message", {"text": text})

    def started(self, name: str, why: str) -> None:
        self._progress(name, "started", {"why": why})

    def progressed(self, name: str, progress: Mapping[str, Any]) -> None:
        self._progress(name, "progressed", progress)

    def ended(self, name: str, state: str, took: float, figures: str) -> None:
        self._progress(name, "ended", {"state": state, "seconds": took, "figures": figures})

    def failed(self, name: str, message: str) -> None:
        self._progress(name, "failed", {"error": message})
