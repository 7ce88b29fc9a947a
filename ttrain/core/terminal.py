"""Output of commands: tables, JSON, bars; nothing that data contains reaches a terminal as a control sequence."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import json
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ttrain.core.files import finite
from ttrain.errors import TTrainError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer
    from rich.console import Console


PIPE_WIDTH = 180
COLUMN_GAP = 2  # of a table
SHORT_CELL = 20  # columns of a cell that stands beside others in a terminal too narrow for the table
# What json.dumps leaves as it is, and a terminal may obey: DEL and the C1 controls, line separators, directions, surrogates.
_TERMINAL_CONTROLS = re.compile("[\x7f-\x9f\u061c\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_NOT_ASCII = re.compile("[^\x00-\x7f]")
# What Rich and progress bars of libraries write to a terminal: colours, the cursor up or hidden, a line erased.
_OF_DISPLAYS = re.compile(r"(\r?\x1b\[(?:[0-9;]*m|[0-9]*A|2K|\?25[lh])\r?|\A\r)")

_SURROGATES = re.compile("[\ud800-\udfff]")

_CONTROLS = re.compile(f"[\x00-\x08\x0b-\x1f]|{_TERMINAL_CONTROLS.pattern}")


def escape_control_characters(text: str) -> str:
    """The text with each control character, other than tabs and line ends, escaped as Python does."""
    return _CONTROLS.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


def escaped(text: str) -> str:
    """The text with each character that does not print, other than the space, escaped as Python does: `\\n`, `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def escaped_lines(text: str) -> str:
    """The text with each character that does not print escaped, but for its line ends."""
    return "\n".join(map(escaped, text.split("\n")))


def print_escaped(text: str, *, stderr: bool = False) -> None:
    """Print a line of text on standard output or error, at once, with what does not print escaped."""
    print(escaped(text), file=sys.stderr if stderr else sys.stdout, flush=True)


def encodable(text: str) -> str:
    """Typed text with U+FFFD for each byte that was not UTF-8: Python makes it a surrogate, which no tokenizer and no file
    takes."""
    return _SURROGATES.sub("\ufffd", text)


def show_warnings() -> None:
    """Send ttrain's warnings to standard error, whatever handlers libraries give to the root logger: Prefect's own takes
    errors alone, and with it Python's handler of last resort is silent."""
    import logging

    if logging.lastResort is not None:
        logging.getLogger("ttrain").addHandler(logging.lastResort)


@contextlib.contextmanager
def showing_logs(level: str) -> Iterator[None]:
    """At the level `error`, show no warnings of ttrain meanwhile; what is below them is never on the terminal."""
    import logging

    logger = logging.getLogger("ttrain")
    before = logger.level
    if level == "error":
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def console(*, stderr: bool = False) -> Console:
    """A console on standard output, or error; a pipe gets long lines, so that nothing is cut, a terminal its own width."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr) if stream.isatty() else Console(stderr=stderr, width=PIPE_WIDTH)


def print_plain(screen: Console, text: str) -> None:
    """Print a line as it is: nothing in it counts as markup or emoji, and what does not print is escaped."""
    from rich.text import Text

    screen.print(Text(escaped(text)), soft_wrap=True)


def table(header: Sequence[str], rows: Sequence[Sequence[object]], screen: Console | None = None) -> None:
    """Print the cells as they are, on standard output or on a `screen`; no markup counts in them.

    In a terminal that is too narrow for the longest words, where keys and paths would be broken, each row is several lines.
    """
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    screen = screen or console()
    lines = [[escaped(str(cell)) for cell in row] for row in (header, *rows)]
    columns = list(zip(*lines, strict=True))
    least = [max((cell_len(word) for text in column for word in text.split()), default=0) for column in columns]
    room = screen.width - sum(least) - COLUMN_GAP * (len(least) - 1)
    if screen.is_terminal and room < 0:
        _print_narrow(lines, screen)
        return
    widths: list[int | None] = [None] * len(columns)
    if screen.is_terminal:  # Rich alone would break the words of a wide column while another has room
        wanted = [max(map(cell_len, column)) - width for column, width in zip(columns, least, strict=True)]
        for rank, number in enumerate(sorted(range(len(columns)), key=wanted.__getitem__)):
            added = min(wanted[number], room // (len(columns) - rank))
            widths[number] = least[number] + added
            room -= added
    drawn = Table(box=None, header_style="dim", pad_edge=False)
    for name, width in zip(lines[0], widths, strict=True):
        drawn.add_column(Text(name), overflow="fold", width=width)
    for line in lines[1:]:
        drawn.add_row(*map(Text, line))
    screen.print(drawn)


def _print_narrow(lines: Sequence[Sequence[str]], screen: Console) -> None:
    """Print a header and rows: of each row the first short cells in a line, then each other cell with its name below it."""
    from rich.cells import cell_len
    from rich.text import Text

    header = lines[0]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    beside, room = [0], screen.width - widths[0]
    for number, width in enumerate(widths[1:], 1):
        if width <= SHORT_CELL and width + COLUMN_GAP <= room:
            beside.append(number)
            room -= width + COLUMN_GAP
    gap = " " * COLUMN_GAP
    for line in lines:
        cells = (line[number] + " " * (widths[number] - cell_len(line[number])) for number in beside)
        style = "dim" if line is header else ""
        screen.print(Text(gap.join(cells).rstrip(), style=style), soft_wrap=True)
        below = [(header[number], cell) for number, cell in enumerate(line) if number not in beside and cell]
        for name, cell in below if line is not header else ():
            screen.print(Text(f"{gap}{name}: {cell}" if name else f"{gap}{cell}"), soft_wrap=True)


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Print JSON, with what a terminal may obey escaped; `indent` None: in one line, flushed at once.

    A dataclass is printed with all its fields. Where a number is not finite, as a loss may be, it is null: JSON has no NaN.
    """
    dumps = functools.partial(json.dumps, indent=indent, ensure_ascii=False, default=_as_json, allow_nan=False)
    try:
        text = dumps(value)
    except ValueError:
        text = dumps(finite(value))
    print_json_text(text, flush=indent is None)


def print_json_text(text: str, *, flush: bool) -> None:
    """Print JSON that is written already, with what a terminal may obey escaped."""
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
    if not encoding.startswith("utf"):  # no letter is lost in a pipe
        text = _NOT_ASCII.sub(lambda match: json.dumps(match.group())[1:-1], text)
    print(_TERMINAL_CONTROLS.sub(lambda match: f"\\u{ord(match.group()):04x}", text), flush=flush)


def _as_json(value: Any) -> object:
    return str(value) if isinstance(value, Path) else asdict(value)


def print_spans(lines: Iterable[Sequence[tuple[str, bool, bool]]]) -> None:
    """Print lines of (text, whether it counts in the loss, whether it is a special token).

    What counts is bold green and the rest dim; where there is no colour, a line of ^ stands below it.
    """
    from rich.cells import cell_len
    from rich.text import Text

    screen = console()
    plain = screen.color_system is None or screen.no_color
    for line in lines:
        if plain:
            print("".join(text for text, _, _ in line))
            marks = "".join(("^" if counts else " ") * cell_len(text) for text, counts, _ in line).rstrip()
            if marks:
                print(marks)
            continue
        colour = {True: "magenta", False: "green"}
        styled = ((text, f"bold {colour[special]}" if counts else "dim") for text, counts, special in line)
        screen.print(Text.assemble(*styled), soft_wrap=True)


@contextlib.contextmanager
def bar(description: str, unit: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, where that is a terminal; yields a function that takes how much of `total` is done."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        TextColumn("{task.completed:,.0f} " + unit, style="dim"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(description, total=total)
        yield lambda done: bars.update(task, completed=done)


NAMES = {1: "standard output", 2: "standard error"}

ERRORS = "replace"  # a terminal that lacks a character gets a question mark, not the run's end

READER_IS_GONE = 128 + signal.SIGPIPE  # the exit code that a shell shows for a program that SIGPIPE ended

_drops = False  # whether this process goes on without the output that cannot be written


def guard_streams() -> None:
    """Put the guard below `sys.stdout` and `sys.stderr`; replaces those that were closed before the program began.

    A stream without a file of its own, as where tests capture it, stays.
    """
    _open_closed_descriptors()
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115  # as long as the process lives
    sys.stdout = _guarded(sys.stdout, 1)
    sys.stderr = _guarded(sys.stderr, 2)


def outlast_output() -> None:
    """From now on output that cannot be written is dropped, and the command goes on."""
    global _drops
    _drops = True


class _GuardedFile(io.FileIO):
    """The file of a standard stream, whose failing writes are decided here. It writes all or raises, as a buffer would.

    `io.BufferedWriter` is not used: a signal's handler that prints while the same thread is writing gets a RuntimeError.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._descriptor, self._noted = descriptor, False

    def write(self, data: Buffer) -> int:
        remaining = memoryview(data).cast("B")
        size = len(remaining)
        try:
            while remaining:
                written = super().write(remaining)
                if written is None:  # another program made the terminal non-blocking
                    select.select([], [self], [])
                remaining = remaining[written or 0 :]
        except OSError as error:
            self._failed(error)
        return size

    def _failed(self, error: OSError) -> None:
        """Return where the output is dropped. Raises SystemExit or TTrainError where the command ends with it."""
        if _drops:
            self._note(error)
            return
        self._noted = True
        outlast_output()  # the command ends, and its last words cannot fail it again
        if error.errno == errno.EPIPE:
            raise SystemExit(READER_IS_GONE)
        raise TTrainError(f"{NAMES[self._descriptor]} cannot be written: {error.strerror}")

    def _note(self, error: OSError) -> None:
        """Warn once, on standard error, that standard output cannot be written."""
        if not self._noted and self._descriptor == 1:
            self._noted = True
            print(f"{NAMES[1]} cannot be written ({error.strerror}); the command goes on without it", file=sys.stderr)


class _EscapingText(io.TextIOWrapper):
    """The text of a standard stream: all that is printed passes here, so that no data reach a terminal as a control.

    In a terminal colours and the cursor's moves of displays pass; elsewhere no control but tabs and line ends does.
    """

    def write(self, text: str) -> int:
        if _CONTROLS.search(text) is None:
            return super().write(text)
        parts = _OF_DISPLAYS.split(text) if self.isatty() else [text]
        parts[::2] = map(escape_control_characters, parts[::2])  # between them stands what displays write
        super().write("".join(parts))
        return len(text)


def _guarded(stream: TextIO | None, descriptor: int) -> TextIO:
    if stream is not None and not _is_plain(stream, descriptor):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ERRORS)
        return stream
    line_buffered = descriptor == 2
    encoding = None
    if isinstance(stream, io.TextIOWrapper):
        stream.flush()
        encoding, line_buffered = stream.encoding, stream.line_buffering or stream.write_through
    file: Any = _GuardedFile(descriptor)
    return _EscapingText(file, encoding=encoding, errors=ERRORS, line_buffering=line_buffered)


def _is_plain(stream: TextIO, descriptor: int) -> bool:
    """Whether the stream is the one that Python made for this descriptor."""
    if type(stream) is not io.TextIOWrapper or isinstance(stream.buffer, _GuardedFile):
        return False
    try:
        return stream.fileno() == descriptor
    except OSError:
        return False


def _open_closed_descriptors() -> None:
    """Open closed streams: else the next file that is opened (a database) gets the number of one, and what is printed."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.dup(descriptor)
    os.close(descriptor)
