"""Tables in terminals of any width: no word of a cell is broken, and none is lost."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ttrain.core.terminal import table

PATH = "/home/me/artifacts/store/pretrain/5b0a8a1be01f*/run/log.txt"
HEADER = ("stage", "outcome", "figures", "log")
ROWS = [("pretrain", "completed", "validation_loss 3.188, tokens 20,480", PATH), ("sft", "pending", "", "")]


def printed(width: int, *, is_terminal: bool = True) -> list[str]:
    """The lines of the table, without what only pads them."""
    file = io.StringIO()
    table(HEADER, ROWS, Console(file=file, width=width, force_terminal=is_terminal, no_color=True, color_system=None))
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [30, 40, 80, 98, 99, 100, 110, 140, 300])
def test_no_word_is_broken_or_lost_at_any_width(width: int) -> None:
    lines = printed(width)
    text = " ".join(lines)
    assert [word for row in ROWS for cell in row for word in cell.split() if word not in text.split()] == []
    if any(line.startswith("stage") and "figures" in line for line in lines):
        assert max(map(len, lines)) <= width


def test_a_terminal_too_narrow_for_the_longest_words_has_long_cells_below_the_row() -> None:
    assert printed(40) == [
        "stage     outcome",
        "pretrain  completed",
        "  figures: validation_loss 3.188, tokens 20,480",
        f"  log: {PATH}",
        "sft       pending",
    ]


def test_a_pipe_has_a_row_in_a_line() -> None:
    assert len(printed(180, is_terminal=False)) == 3
