"""Show the progress of a pipeline: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from ttrain.core.terminal import escaped_lines
from ttrain.core.text import format_duration
from ttrain.engine.processes import StageObserver
from ttrain.engine.stop_request import StopRequest
from ttrain.tasks import Stage

SECONDS_BETWEEN_LINES = 10.0
Mark = tuple[str, str]  # a sign and its colour
OUTCOMES: Mapping[str, tuple[Mark, str]] = {  # by state: the mark, and a phrase in place of the time that the stage took
    "cached": (("=", "cyan"), "cached"),
    "completed": (("✓", "green"), ""),
    "equal": (("✓", "green"), "rebuilt, equal to what was stored"),
    "different": (("≠", "yellow"), "rebuilt, DIFFERENT from what was stored (set aside under replaced/)"),
    "nothing-new": (("=", "cyan"), "nothing new"),
}


class StageDisplay(Protocol):
    """Displays the events of a run's stages."""

    def say(self, text: str) -> None: ...

    def started(self, name: str, why: str) -> None: ...

    def progressed(self, name: str, progress: Mapping[str, Any]) -> None: ...

    def ended(self, name: str, state: str, took: float, figures: str) -> None: ...

    def failed(self, name: str, message: str) -> None: ...


class Display:
    """Draws several stages side by side; safe to call from their threads. At `log_level` warning or error it shows neither
    progress nor results of stages, only failures and what is said."""

    def __init__(self, console: Console, log_level: str = "info") -> None:
        self.console, self.log_level = console, log_level
        self._lock = threading.RLock()  # reentrant: a signal handler may print while the same thread is printing
        self._last_line: dict[str, float] = {}
        self._tasks: dict[str, TaskID] = {}
        self._rates: dict[str, tuple[float, float]] = {}
        self._bars: Progress | None = None
        if console.is_terminal:
            columns = (
                TextColumn("  {task.description:<16}"),
                BarColumn(bar_width=28),
                TextColumn("{task.percentage:>3.0f} %"),
                TextColumn("{task.fields[figures]}", style="dim"),
            )
            self._bars = Progress(*columns, console=console, transient=True)
            self._bars.start()

    @property
    def _shows_progress(self) -> bool:
        return self.log_level in ("debug", "info")

    def close(self) -> None:
        """Stop drawing and restore the terminal."""
        if self._bars:
            self._bars.stop()

    def say(self, text: str, mark: Mark | None = None) -> None:
        """Print a line above the bars, after a mark: as it is, since it may name files, keys and values of data."""
        line = escaped_lines(text)
        with self._lock:
            self.console.print(Text.assemble(mark, f" {line}") if mark else Text(line), soft_wrap=True)
            sys.stdout.flush()

    def started(self, name: str, why: str) -> None:
        """Show that a stage begins."""
        if self._shows_progress:
            self.say(f"{name}: {why}", (">", "bold"))

    def progressed(self, name: str, progress: Mapping[str, Any]) -> None:
        """Show the progress of a stage; a total of 0 means unknown."""
        if not self._shows_progress:
            return
        done, total, unit = progress["done"], progress["total"], progress["unit"]
        figures = ", ".join([self._figures(name, done, unit, progress["figures"]), *self._time_left(name, done, total)])
        if self._bars:
            with self._lock:
                if name not in self._tasks:
                    self._tasks[name] = self._bars.add_task(name, total=total or None, figures="")
                self._bars.update(self._tasks[name], completed=done, total=total or None, figures=figures)
            return
        now = time.monotonic()
        if now - self._last_line.setdefault(name, now) < SECONDS_BETWEEN_LINES:
            return
        self._last_line[name] = now
        how_far = f"{100 * done / total:.0f} %, " if total else ""
        self.say(f"  {name}: {how_far}{figures}")

    def ended(self, name: str, state: str, took: float, figures: str) -> None:
        """Show the result of a stage."""
        self._remove_bar(name)
        if not self._shows_progress:
            return
        mark, phrase = OUTCOMES[state]
        self.say(f"{name}: {phrase or format_duration(took)}{f' - {figures}' if figures else ''}", mark)

    def failed(self, name: str, message: str) -> None:
        """Show that a stage failed."""
        self._remove_bar(name)
        self.say(f"{name}: {message}", ("x", "red"))

    def _remove_bar(self, name: str) -> None:
        with self._lock:
            if self._bars and name in self._tasks:
                self._bars.remove_task(self._tasks.pop(name))

    def _figures(self, name: str, done: float, unit: str, figures: Mapping[str, float]) -> str:
        """The reported figures, and the speed since the stage began or continued."""
        now = time.monotonic()
        start, at = self._rates.setdefault(name, (done, now))
        parts = [f"{label.replace('_', ' ')} {value:.3f}" for label, value in figures.items()]
        if unit == "tokens":
            parts += [f"{(done - start) / (now - at):,.0f} tokens/s"] if now > at and done > start else []
        else:
            parts.append(f"{done:,.0f} {unit}")
        return ", ".join(parts)

    def _time_left(self, name: str, done: float, total: float) -> list[str]:
        """The time that the rest takes at the mean speed since the stage began; [] before there is one."""
        start, at = self._rates[name]
        if not total or done <= start:
            return []
        return [f"{format_duration((total - done) * (time.monotonic() - at) / (done - start))} left"]


class DisplayObserver(StageObserver):
    """Shows the events of a stage."""

    def __init__(self, display: StageDisplay, stop_request: StopRequest, log_level: str = "info") -> None:
        super().__init__(stop_request)
        self.display, self.log_level = display, log_level

    def noted(self, stage: Stage, text: str) -> None:
        self.display.say(f"  {stage.name}: {text}")

    def progressed(self, stage: Stage, progress: Mapping[str, Any]) -> None:
        self.display.progressed(stage.name, progress)

    def logged(self, stage: Stage, line: str) -> None:
        if self.log_level == "debug":
            self.display.say(f"  {stage.name}: {line}")
