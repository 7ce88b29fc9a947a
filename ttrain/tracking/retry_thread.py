"""A thread that does what is left to do: woken when there is something, and again until it succeeds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final, final

log = logging.getLogger("ttrain")

LONGEST_SECONDS: Final = 30.0


@final
class Courier:
    """Calls `work` when woken; where that returns False, again after a pause that doubles up to half a minute."""

    def __init__(self, name: str, work: Callable[[], bool], pause: Callable[[], float]) -> None:
        self._name, self._work, self._pause = name, work, pause
        self._woken, self._stopping = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def wake(self) -> None:
        """There is something to do."""
        self._woken.set()
        with self._starting:
            if self._thread is None and not self._stopping.is_set():
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def stop(self, seconds: float) -> None:
        """No more after what it is doing; that is waited for so long."""
        self._stopping.set()
        self._woken.set()
        with self._starting:
            thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._woken.wait()
            self._woken.clear()
            pause = self._pause()
            while not self._stopping.is_set() and not self._done():
                self._stopping.wait(pause)
                pause = min(2 * pause, LONGEST_SECONDS)

    def _done(self) -> bool:
        try:
            return self._work()
        except Exception:  # a thread that dies would leave everything to the next command
            log.debug("in the thread %s", self._name, exc_info=True)
            return False
