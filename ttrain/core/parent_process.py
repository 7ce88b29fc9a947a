"""A process that ends with the one it works for, whatever ended that: none works on without anyone who waits for it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

PARENT = "TTRAIN_PARENT"  # variable with the id of the process whose end is this one's end
RENDEZVOUS = "TTRAIN_RENDEZVOUS"  # variable with the file in which the ranks of one machine find each other
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the last: the terminal was closed
POLL_SECONDS = 0.2


def heeded_signals() -> tuple[signal.Signals, ...]:
    """The signals to stop without those that this process leaves alone: under `nohup` it outlives its terminal."""
    return tuple(s for s in STOP_SIGNALS if s != signal.SIGHUP or signal.getsignal(s) is not signal.SIG_IGN)


def ignore_hangup() -> None:
    """Once a process stops, SIGHUP says nothing new: kernel and shell both send it, and systemd sends it after SIGTERM."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def end_with_parent(parent: int) -> Callable[[], None]:
    """Watch the process with this id, which must be the parent; end at once where it is gone already.

    Returns what ends the watch, and its thread with it.
    """
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
