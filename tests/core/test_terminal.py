"""What data contain reaches no terminal as a control."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from ttrain.core.terminal import _GuardedText

# --- what data contain: OSC 52 writes the clipboard, C1 is the same in one character, and text may be turned around

HOSTILE = "a\x1b]52;c;eA==\x07b\x9d52;c;eA==\x9cc\u202ed\x1b[2Je\rf[red]g:boom:"
ESCAPED = "a\\x1b]52;c;eA==\\x07b\\x9d52;c;eA==\\x9cc\\u202ed\\x1b[2Je\\rf[red]g:boom:"


class Stream(io.BytesIO):
    """The bytes that reach a terminal, or a pipe."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_whatever_is_printed_reaches_the_stream_without_controls(is_terminal: bool) -> None:
    raw = Stream(is_terminal=is_terminal)
    stream = _GuardedText(raw, encoding="utf-8", write_through=True)
    print(HOSTILE, file=stream)
    stream.writelines([HOSTILE, "\tä\n"])
    assert raw.getvalue().decode() == f"{ESCAPED}\n{ESCAPED}\tä\n"


def test_colours_and_bars_of_a_terminal_stay_and_a_pipe_has_none() -> None:
    drawn = "\x1b[1;31mred\x1b[0m\r\x1b[2K\x1b[1A\x1b[2K\x1b[?25h\r"
    shown = {}
    for is_terminal in (True, False):
        raw = Stream(is_terminal=is_terminal)
        stream = _GuardedText(raw, encoding="utf-8", write_through=True)
        stream.write(drawn)
        stream.write("\r 50%")  # as tqdm writes
        shown[is_terminal] = raw.getvalue().decode()
    assert shown[True] == f"{drawn}\r 50%"
    assert "\x1b" not in shown[False]


def test_the_standard_streams_of_a_command_are_such_streams(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "ttrain", "config", "show", f"data.pretrain={HOSTILE}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "c\\u202ed" in done.stdout
    assert not {"\x1b", "\x9d", "\u202e"} & {*done.stdout}
