"""What data contain reaches no terminal as a control."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# OSC 52 writes the clipboard, C1 is the same in one character, and text may be turned around.
HOSTILE = "a\x1b]52;c;eA==\x07b\x9d52;c;eA==\x9cc\u202ed\x1b[2Je\rf[red]g:boom:"


def test_a_command_prints_what_settings_hold_without_controls(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "ttrain", "config", "show", f"data.pretrain={HOSTILE}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "c\\u202ed" in done.stdout
    assert not {"\x1b", "\x9d", "\u202e"} & {*done.stdout}
