"""Reports as sections of tables and texts, printed on a terminal; `ttrain.reports.report` makes pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ttrain.core import terminal
from ttrain.core.text import truncated

LONGEST_CELL = 160  # characters on a terminal


@dataclass(frozen=True)
class Cell:
    """A cell of a table: `style` is its class on a page, `small` a remark after the text."""

    text: str
    style: str
    small: str = ""

    def __str__(self) -> str:
        return "  ".join(filter(None, (self.text, self.small, "*" if "best" in self.style else "")))


@dataclass(frozen=True)
class Table:
    """A table; on a page the columns `numbers` are aligned to the right."""

    header: Sequence[object]
    rows: Sequence[Sequence[object]]
    numbers: Sequence[int] = ()


@dataclass(frozen=True)
class Text:
    """A paragraph; `style` is its class on a page."""

    text: object
    style: str | None = None


@dataclass(frozen=True)
class Heading:
    """A heading within a section."""

    text: str


@dataclass(frozen=True)
class Answers:
    """Answers of models side by side, (title, text)."""

    texts: Sequence[tuple[object, str]]


Block = Table | Text | Heading | Answers


@dataclass(frozen=True)
class Section:
    """Blocks under a heading."""

    title: str
    blocks: Sequence[Block]


def print_section(section: Section) -> None:
    """Print a section: a table has its title in the header. Long cells are cut."""
    title = section.title.lower()
    for block in section.blocks:
        match block:
            case Table(header, rows):
                marks = (
                    " (* best)"
                    if any("best" in cell.style for row in rows for cell in row if isinstance(cell, Cell))
                    else ""
                )
                print()
                shown = [[truncated(str(cell), LONGEST_CELL) for cell in row] for row in rows]
                terminal.table((title + marks, *map(str, header[1:])), shown)
            case Answers(texts):
                for name, text in texts:
                    print(terminal.escaped(f"  {name}  {truncated(text, LONGEST_CELL)}"))
            case Heading(text):
                print(f"\n{title}, {terminal.escaped(text)}:")
            case Text(text):
                print(f"\n{terminal.escaped(truncated(str(text), LONGEST_CELL))}")
