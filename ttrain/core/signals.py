"""What SIGINT, SIGTERM and SIGHUP mean to a process that waits for others: the first asks them to save and stop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from ttrain.core.parent_process import heeded_signals, ignore_hangup
from ttrain.errors import Interrupted


def interrupted_twice(signum: int) -> BaseException:
    """What a second signal raises while stages run."""
    return Interrupted("interrupted twice; the stages were ended where they stood", signum)


@contextlib.contextmanager
def catching_signals(
    asked: Callable[[int], object], again: Callable[[int], BaseException] = interrupted_twice
) -> Iterator[None]:
    """The first of the signals calls `asked` with its number; a second one, unless it is SIGHUP, raises `again(number)`."""
    seen = False

    def handle(signum: int) -> None:
        nonlocal seen
        if seen:
            raise again(signum)
        seen = True
        asked(signum)

    with handling_signals(handle):
        yield


@contextlib.contextmanager
def handling_signals(handle: Callable[[int], object]) -> Iterator[None]:
    """Each of the signals calls `handle` with its number; SIGHUP is ignored after the first, also after the block."""

    def handler(signum: int, frame: FrameType | None) -> None:
        ignore_hangup()
        handle(signum)

    previous = {number: signal.signal(number, handler) for number in heeded_signals()}
    try:
        yield
    finally:
        for number in heeded_signals():
            signal.signal(number, previous[number])
