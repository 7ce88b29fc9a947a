"""Code that is killed right before each of its calls that reach the disk, one after the other."""

import contextlib
import io
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT, TESTS

Function = str | tuple[Any, str]  # of `os`, or (module, name)


@contextlib.contextmanager
def intercepted(
    functions: Sequence[Function], before: Callable[[int], object], *, writing: bool = False
) -> Iterator[None]:
    """Call `before(number)` right before call number 1, 2, ... of these functions.

    With `writing`, opening a file to write counts, too.
    """
    numbers = itertools.count(1)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            before(next(numbers))
            return function(*arguments, **named)

        return call

    plain = io.open
    counted_open = counted(plain)

    def open_(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        return (plain if mode in ("r", "rb") else counted_open)(file, mode, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        for target in functions:
            owner, name = (os, target) if isinstance(target, str) else target
            patch.setattr(owner, name, counted(getattr(owner, name)))
        if writing:
            patch.setattr(io, "open", open_)
        yield


def killed_at(
    fatal: int, functions: Sequence[Function], action: Callable[[], object], **options: bool
) -> bool:
    """Whether `action`, run in a fork that dies before that call of these functions, was killed."""
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL), f"it ended by itself, with status {status}"
        return status != 0

    def die(number: int) -> None:
        if number == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        with intercepted(functions, die, **options):
            action()
        os._exit(0)
    except BaseException:
        os._exit(1)  # the fork must not go on as its parent


def killed_everywhere(
    template: Path, copies: Path, functions: Sequence[Function], action: Any, **options: bool
) -> int:
    """Run `action(copy)` on copies 1, 2, ... of a directory, each killed one call later.

    Returns the number of copies; the last one was not killed.
    """
    number = 0
    while True:
        number += 1
        copy = shutil.copytree(template, copies / str(number))
        if not killed_at(number, functions, lambda: action(copy), **options):  # noqa: B023
            return number


def number_printed_by(code: str, *arguments: object) -> int:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{TESTS}"}
    command = [sys.executable, "-P", "-c", code, *map(str, arguments)]
    return int(subprocess.check_output(command, env=environment, text=True, timeout=60))
