"""The process that draws the charts of pages: the engine holds the interpreter's lock, and never frees its memory.

The engine takes 0.4 s of CPU to start. A command that will draw starts it first, while it loads everything else.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

DRAW = (
    "import json, sys, vl_convert\n"
    "vl_convert.vegalite_to_svg({'data': {'values': []}, 'mark': 'point'})\n"
    "for spec in sys.stdin: print(json.dumps(vl_convert.vegalite_to_svg(spec)))"
)

_started: list[subprocess.Popen[str]] = []


def start() -> None:
    """Start the process for the next `draw`. It ends with this one, whether it is used or not."""
    if not _started:
        _started.append(_process())


def draw(specs: Iterable[str]) -> list[str]:
    """The drawing of each specification, as JSON. Raises RuntimeError with the last line of the process's error."""
    process = _started.pop() if _started else _process()
    output, errors = process.communicate("\n".join(specs))
    if process.returncode:
        raise RuntimeError((errors.strip().splitlines() or [f"its process ended with {process.returncode}"])[-1])
    return output.splitlines()


def _process() -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-P", "-c", DRAW]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, encoding="utf-8")
