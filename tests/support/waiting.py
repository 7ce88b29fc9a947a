"""Time that counts only what the tested code waits, so that limits hold on a busy machine."""

import contextlib
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

STILL_SECONDS = 0.02  # of computing: a process that took less in the time that it may wait hangs
BUSY = 10  # times that many seconds of computing are too much, too


def hanging(processes: Sequence[BaseProcess], seconds: float) -> list[BaseProcess]:
    """Wait for processes; return those alive once none has computed anything for so long.

    Also once all of them have computed for ten times as long together.
    """
    computed: dict[int, float] = {}
    last = 0.0
    deadline = time.monotonic() + seconds
    while alive := [process for process in processes if process.is_alive()]:
        wait([process.sentinel for process in alive], timeout=min(1.0, seconds / 4))
        for process in alive:
            with contextlib.suppress(psutil.Error):  # it has ended
                computed[process.pid or 0] = sum(psutil.Process(process.pid).cpu_times()[:2])
        total = sum(computed.values())
        if total - last > STILL_SECONDS:
            last = total
            deadline = time.monotonic() + seconds
        if time.monotonic() > deadline or total > BUSY * seconds:
            return [process for process in alive if process.is_alive()]
    return []


def wait_until(
    condition: Callable[[], Any], seconds: float = 20, said: Callable[[], str] = lambda: ""
) -> Any:
    """Return the first true value of `condition`; fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # a server that is being started
            if value := condition():
                return value
        time.sleep(0.02)
    raise AssertionError(f"it did not happen in {seconds} s: {said()}")
