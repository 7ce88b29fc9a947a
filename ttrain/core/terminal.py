"""What commands print: tables, JSON, bars; nothing that data contains reaches a terminal as a control sequence."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 180
# What json.dumps leaves as it is, and a terminal may obey: DEL and the C1 controls, line separators, directions, surrogates.
_OBEYED = re.compile("[\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

_SURROGATES = re.compile("[\ud800-\udfff]")
_CONTROLS = re.compile(f"[\x00-\x08\x0b-\x1f]|{_OBEYED.pattern}")


def harmless(text: str) -> str:
    """The text with each control character, other than tabs and line ends, as Python writes it."""
    return _CONTROLS.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def escaped(text: str) -> str:
    """The text with each character that does not print, other than the space, as Python writes it: `\\n`, `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def encodable(text: str) -> str:
    """What a user typed, with U+FFFD for each byte that was no UTF-8: Python makes it a surrogate, which no tokenizer and no
    file takes."""
    return _SURROGATES.sub("\ufffd", text)


def show_warnings() -> None:
    """Our warnings go to standard error whatever handlers libraries give to the root logger: Prefect's own takes errors
    alone, and with it Python's handler of last resort is silent."""
    import logging

    if logging.lastResort is not None:
        logging.getLogger("ttrain").addHandler(logging.lastResort)


def console(*, stderr: bool = False) -> Console:
    """Standard output, or error; a pipe gets long lines, so that nothing is cut, and a terminal its own width."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr) if stream.isatty() else Console(stderr=stderr, width=PIPE_WIDTH)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print the cells as they are; no markup counts in them."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, header_style="dim", pad_edge=False)
    for name in header:
        drawn.add_column(Text(escaped(name)), overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(escaped(str(cell))) for cell in row))
    console().print(drawn)


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Print JSON for scripts, which is harmless to look at too; `indent` None: in one line, at once."""
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
    text = json.dumps(value, indent=indent, ensure_ascii=not encoding.startswith("utf"))  # no letter is lost in a pipe
    print(_OBEYED.sub(lambda found: f"\\u{ord(found.group()):04x}", text), flush=indent is None)


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
    """A bar on standard error, where that is a terminal; gives a function that is told how much of `total` is done."""
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
