"""Show the progress of a pipeline: bars on a terminal, plain lines elsewhere.

A display is a function that is called with (stage, event, data); the stage is "" where an event is
the run's own:

started {"why"}, progressed {the fields of StageProgress}, ended {"state", "seconds", "figures"},
failed {"error"}, message {"text"}
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from ttrain.core.terminal import escaped
from ttrain.core.text import format_duration
from ttrain.engine.progress import StageProgress

StageDisplay = Callable[[str, str, Mapping[str, Any]], object]

SECONDS_BETWEEN_LINES = 10.0
Mark = tuple[str, str]  # a sign and its colour
OUTCOMES: Mapping[
    str, tuple[Mark, str]
] = {  # by state: the mark, and a phrase in place of the time that the stage took
    "cached": (("=", "cyan"), "cached"),
    "completed": (("✓", "green"), ""),
    "equal": (("✓", "green"), "rebuilt, equal to what was stored"),
    "different": (
        ("≠", "yellow"),
        "rebuilt, DIFFERENT from what was stored (set aside under replaced/)",
    ),
    "nothing-new": (("=", "cyan"), "nothing new"),
}


class Display:
    """Draw several stages side by side; thread-safe.

    At `log_level` warning or error only failures and messages are shown.
    """

    def __init__(self, console: Console, log_level: str = "info") -> None:
        self.console = console
        self.log_level = log_level
        # Reentrant: a signal handler may print while the same thread is printing.
        self._lock = threading.RLock()
        self._last_line: dict[str, float] = {}
        self._tasks: dict[str, TaskID] = {}
        self._bars: Progress | None = None
        if console.is_terminal:
            self._bars = Progress(
                TextColumn("  {task.description:<16}"),
                BarColumn(bar_width=28),
                TextColumn("{task.percentage:>3.0f} %"),
                TextColumn("{task.fields[figures]}", style="dim"),
                console=console,
                transient=True,
            )
            self._bars.start()

    def __call__(self, stage: str, event: str, data: Mapping[str, Any]) -> None:
        """Show an event."""
        if event == "message":
            self.say(f"  {stage}: {data['text']}" if stage else data["text"])
        elif event == "failed":
            self._remove_bar(stage)
            self.say(f"{stage}: {data['error']}", ("x", "red"))
        elif self.log_level not in ("debug", "info"):
            self._remove_bar(stage)
        elif event == "started":
            self.say(f"{stage}: {data['why']}", (">", "bold"))
        elif event == "progressed":
            progress = StageProgress(**data)
            now = time.monotonic()
            if self._bars:
                with self._lock:
                    if stage not in self._tasks:
                        self._tasks[stage] = self._bars.add_task(stage, figures="")
                    self._bars.update(
                        self._tasks[stage],
                        completed=progress.done,
                        total=progress.total or None,
                        figures=progress.details,
                    )
            elif now - self._last_line.setdefault(stage, now) >= SECONDS_BETWEEN_LINES:
                self._last_line[stage] = now
                self.say(f"  {stage}: {progress}")
        elif event == "ended":
            self._remove_bar(stage)
            mark, phrase = OUTCOMES[data["state"]]
            figures = f" - {data['figures']}" if data["figures"] else ""
            self.say(f"{stage}: {phrase or format_duration(data['seconds'])}{figures}", mark)

    def close(self) -> None:
        """Stop drawing and restore the terminal."""
        if self._bars:
            self._bars.stop()

    def say(self, text: str, mark: Mark | None = None) -> None:
        """Print a line above the bars, after a mark, with control characters escaped."""
        line = escaped(text, kept="\n")
        with self._lock:
            self.console.print(
                Text.assemble(mark, f" {line}") if mark else Text(line), soft_wrap=True
            )
            sys.stdout.flush()

    def _remove_bar(self, stage: str) -> None:
        with self._lock:
            if self._bars and stage in self._tasks:
                self._bars.remove_task(self._tasks.pop(stage))
