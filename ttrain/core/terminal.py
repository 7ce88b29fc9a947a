"""Output of commands: tables, JSON, bars; control sequences in data are escaped."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ttrain.core.files import finite
from ttrain.errors import TTrainError

if TYPE_CHECKING:
    from rich.console import Console


PIPE_WIDTH = 180
# What json.dumps leaves as it is, and a terminal may obey: DEL and the C1 controls, line
# separators, directions, surrogates.
_TERMINAL_CONTROLS = re.compile(
    "[\x7f-\x9f\u061c\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_CONTROLS = re.compile(f"[\x00-\x08\x0b-\x1f]|{_TERMINAL_CONTROLS.pattern}")
NAMES = {1: "standard output", 2: "standard error"}
# The exit code that a shell shows for a program that SIGPIPE ended.
READER_IS_GONE = 128 + signal.SIGPIPE


def escape_control_characters(text: str) -> str:
    """Escape control characters, other than tabs and line ends, as Python does."""
    return _CONTROLS.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


def escaped(text: str, kept: str = "") -> str:
    """Escape characters that do not print, other than `kept`, as Python does."""
    return "".join(
        letter
        if letter.isprintable() or letter in kept
        else letter.encode("unicode_escape").decode()
        for letter in text
    )


def print_escaped(text: str, *, stderr: bool = False) -> None:
    """Print a line at once, on standard output or error, with control characters escaped."""
    print(escaped(text), file=sys.stderr if stderr else sys.stdout, flush=True)


def encodable(text: str) -> str:
    """Typed text with U+FFFD for each byte that was not UTF-8, where Python has surrogates."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def show_warnings() -> None:
    """Send ttrain's warnings to standard error, whatever handlers the root logger has.

    Prefect's own takes only errors, and with it Python's handler of last resort is silent.
    """
    if logging.lastResort is not None:
        logging.getLogger("ttrain").addHandler(logging.lastResort)


@contextlib.contextmanager
def showing_logs(level: str) -> Iterator[None]:
    """Show only log messages of this level and above in the block."""
    logger = logging.getLogger("ttrain")
    before = logger.level
    logger.setLevel(logging.ERROR if level == "error" else before)
    try:
        yield
    finally:
        logger.setLevel(before)


def console(*, stderr: bool = False) -> Console:
    """A console on standard output or error; lines in a pipe are not cut."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr) if stream.isatty() else Console(stderr=stderr, width=PIPE_WIDTH)


def print_plain(screen: Console, text: str) -> None:
    """Print a line without markup or emoji, with control characters escaped."""
    from rich.text import Text

    screen.print(Text(escaped(text)), soft_wrap=True)


def table(
    header: Sequence[str], rows: Sequence[Sequence[object]], screen: Console | None = None
) -> None:
    """Print a table on standard output or on a `screen`, without markup."""
    from rich.table import Column, Table
    from rich.text import Text

    columns = [Column(Text(name), overflow="fold") for name in header]
    drawn = Table(*columns, box=None, header_style="dim", pad_edge=False)
    for row in rows:
        drawn.add_row(*(Text(escaped(str(cell))) for cell in row))
    (screen or console()).print(drawn)


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Print JSON, escaped for terminals; non-finite numbers as null; dataclasses as objects.

    `indent` None: one line, flushed at once.
    """
    print_json_text(
        json.dumps(finite(value), indent=indent, ensure_ascii=False, default=str),
        flush=indent is None,
    )


def print_json_text(text: str, *, flush: bool) -> None:
    print(_TERMINAL_CONTROLS.sub(lambda match: f"\\u{ord(match.group()):04x}", text), flush=flush)


def print_spans(lines: Iterable[Sequence[tuple[str, bool, bool]]]) -> None:
    """Print lines of (text, whether it is in the loss, whether it is a special token).

    Tokens of the loss are bold green, the rest dim; without colours they are underlined with ^.
    """
    from rich.cells import cell_len
    from rich.text import Text

    screen = console()
    plain = screen.color_system is None or screen.no_color
    for line in lines:
        if plain:
            print("".join(text for text, _, _ in line))
            marks = "".join(
                ("^" if counts else " ") * cell_len(text) for text, counts, _ in line
            ).rstrip()
            if marks:
                print(marks)
            continue
        colour = {True: "magenta", False: "green"}
        styled = (
            (text, f"bold {colour[special]}" if counts else "dim") for text, counts, special in line
        )
        screen.print(Text.assemble(*styled), soft_wrap=True)


@contextlib.contextmanager
def bar(description: str, unit: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, if a terminal; yields a function that takes how much is done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        TextColumn("{task.completed:,.0f} " + unit, style="dim"),
        TimeElapsedColumn(),
    )
    screen = Console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bars:
        task = bars.add_task(description, total=total)
        yield lambda done: bars.update(task, completed=done)


_drops = False  # whether this process goes on without the output that cannot be written


def guard_streams() -> None:
    """Replace the standard streams; one without a file descriptor, as in tests, stays."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper and stream is getattr(sys, f"__{name}__"):
            stream.flush()
            # A terminal that lacks a character gets a question mark, not the run's end.
            guarded = io.TextIOWrapper(
                io.BufferedWriter(_GuardedFile(stream.fileno(), "wb", closefd=False)),
                stream.encoding,
                "replace",
                line_buffering=stream.line_buffering or stream.write_through,
            )
            setattr(sys, name, guarded)


def outlast_output() -> None:
    """From now on drop output that cannot be written, and continue."""
    global _drops
    _drops = True


class _GuardedFile(io.FileIO):
    """A standard stream that, once it fails, ends the command or is dropped."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            descriptor = self.fileno()
            # It takes what is buffered and what follows.
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            if not _drops and error.errno == errno.EPIPE:
                raise SystemExit(READER_IS_GONE) from None
            if not _drops:
                raise TTrainError(
                    f"{NAMES[descriptor]} cannot be written: {error.strerror}"
                ) from None
            if descriptor == 1:
                print(
                    f"{NAMES[1]} cannot be written ({error.strerror}); "
                    "the command goes on without it",
                    file=sys.stderr,
                )
            return len(data)
