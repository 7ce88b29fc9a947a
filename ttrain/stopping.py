"""What SIGINT and SIGTERM mean to a process that waits for others: the first asks them to save and stop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from ttrain.errors import Interrupted


def interrupted_twice(signum: int) -> BaseException:
    """What a second signal raises while stages run."""
    return Interrupted("interrupted twice; the stages were ended where they stood", signum)


@contextlib.contextmanager
def catching_signals(
    asked: Callable[[int], object], again: Callable[[int], BaseException] = interrupted_twice
) -> Iterator[None]:
    """The first of the two signals calls `asked` with its number; a second one raises `again(number)` at once."""
    seen = False

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            raise again(signum)
        seen = True
        asked(signum)

    previous = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
