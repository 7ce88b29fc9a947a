"""Handle SIGINT, SIGTERM and SIGHUP while other processes save and stop; end with the parent."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import FrameType

from ttrain.errors import Interrupted

# A second signal of the same number this soon is the first one, delivered twice: `timeout` signals
# its command and then the group of it, a terminal and the program between send Ctrl-C each, and
# systemd signals all processes of a unit.
SAME_SIGNAL_SECONDS = 1.0
PARENT = "TTRAIN_PARENT"  # environment variable: id of the process with which this one ends
RENDEZVOUS = (
    "TTRAIN_RENDEZVOUS"  # variable with the file in which the ranks of one machine find each other
)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the last: the terminal was closed
POLL_SECONDS = 0.2


def interrupted_twice(signum: int) -> BaseException:
    """The exception of a second signal while stages run."""
    return Interrupted("interrupted twice; the stages were killed", signum)


@contextlib.contextmanager
def catching_signals(
    on_first: Callable[[int], object], on_second: Callable[[int], BaseException] = interrupted_twice
) -> Iterator[None]:
    """Call `on_first` with the first signal; a second one raises `on_second(number)`.

    SIGHUP, and the same signal within SAME_SIGNAL_SECONDS, are not a second one.
    """
    first = 0
    since = 0.0

    def handle(signum: int) -> None:
        nonlocal first, since
        if first == signum and time.monotonic() - since < SAME_SIGNAL_SECONDS:
            return
        if first:
            raise on_second(signum)
        first = signum
        since = time.monotonic()
        on_first(signum)

    with handling_signals(handle):
        yield


_takes_handlers: ContextVar[bool] = ContextVar("takes_handlers", default=True)


@contextlib.contextmanager
def without_signal_handlers() -> Iterator[None]:
    """Leave signals in this thread to the caller, such as a notebook or a server."""
    token = _takes_handlers.set(False)
    try:
        yield
    finally:
        _takes_handlers.reset(token)


@contextlib.contextmanager
def handling_signals(handle: Callable[[int], object]) -> Iterator[None]:
    """Call `handle` with each signal; after the first, SIGHUP stays ignored."""

    def handler(signum: int, frame: FrameType | None) -> None:
        ignore_hangup()
        handle(signum)

    previous = {number: signal.signal(number, handler) for number in heeded_signals()}
    try:
        yield
    finally:
        for number in heeded_signals():
            signal.signal(number, previous[number])


def heeded_signals() -> tuple[signal.Signals, ...]:
    """The stop signals to handle, without a SIGHUP that is ignored, as under `nohup`."""
    return tuple(
        number
        for number in STOP_SIGNALS
        if _takes_handlers.get()
        and (number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN)
    )


def ignore_hangup() -> None:
    """Ignore SIGHUP while stopping: kernel, shell and systemd send it in addition."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def end_with_parent(parent: int) -> Callable[[], None]:
    """End this process when its parent has ended. Returns a function that stops the watch."""
    enough = threading.Event()

    def watch() -> None:
        while not enough.wait(POLL_SECONDS):
            if os.getppid() != parent:
                os._exit(1)

    if os.getppid() != parent:
        os._exit(1)
    thread = threading.Thread(target=watch, name="parent-watch", daemon=True)
    thread.start()

    def end() -> None:
        enough.set()
        thread.join()

    return end
