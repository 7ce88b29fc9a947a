"""Code that is killed right before each of its calls that reach the disk, one after the other."""

import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from support.paths import ROOT, TESTS

Function = str | tuple[Any, str]  # of `os`, or (module, name)


def killed_at(
    fatal: int,
    functions: Sequence[Function],
    action: Callable[[], object],
    *,
    writing: bool = False,
) -> bool:
    """Run `action` in a fork that dies before call number `fatal` of these functions.

    With `writing`, opening a file to write counts, too. Returns whether it was killed.
    """
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL), f"it ended by itself, with status {status}"
        return status != 0
    calls = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        return call

    try:
        for target in functions:
            owner, name = (os, target) if isinstance(target, str) else target
            setattr(owner, name, counted(getattr(owner, name)))
        if writing:
            plain = io.open
            counted_open = counted(plain)
            io.open = lambda file, mode="r", *rest: (
                plain if mode in ("r", "rb") else counted_open
            )(file, mode, *rest)
        action()
        os._exit(0)
    except BaseException:
        os._exit(1)  # the fork must not go on as its parent


def killed_everywhere(
    template: Path,
    copies: Path,
    functions: Sequence[Function],
    action: Callable[[Path], object],
    *,
    writing: bool = False,
) -> int:
    """Run `action(copy)` on copies 1, 2, ... of a directory, each killed one call later.

    Returns the number of copies; the last one was not killed.
    """
    number = 0
    while True:
        number += 1
        copy = shutil.copytree(template, copies / str(number))
        if not killed_at(number, functions, lambda: action(copy), writing=writing):  # noqa: B023
            return number


def number_printed_by(code: str, *arguments: object) -> int:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{TESTS}"}
    command = [sys.executable, "-P", "-c", code, *map(str, arguments)]
    return int(subprocess.check_output(command, env=environment, text=True, timeout=60))
