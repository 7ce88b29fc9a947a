"""The request to stop a run: by a signal, a deadline or a cancellation.

`processes.run` passes it on to the stage as SIGTERM, for `stage_worker.StopFlag`.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

from ttrain.core.signals import catching_signals, interrupted_twice
from ttrain.errors import Interrupted

SIGNALLED, AT_DEADLINE = "stopped by a signal", "deadline reached"


class StopRequest:
    """Whether a run shall stop, and why."""

    def __init__(
        self,
        say: Callable[[str], object] = lambda text: None,
        effect: str = "the running stages save their state",
    ) -> None:
        """`say` prints the request for the user."""
        self._say = say
        self._effect = effect
        self.signum = 0  # the signal that requested the stop; another reason to stop uses one too
        self.stop_reason = SIGNALLED
        self.at_once = False  # a second signal came

    def ask_to_stop(self, signum: int, why: str = SIGNALLED) -> None:
        """Request the stop; later requests change nothing."""
        if not self.signum:
            self.stop_reason = why
            self.signum = signum  # last: a reader that sees it finds the reason set
            reason, again = (
                ("stopping", " (again to end at once)") if why == SIGNALLED else (why, "")
            )
            self._say(f"{reason}: {self._effect}{again}")

    def wait(self, seconds: float) -> None:
        """Sleep, unless the run is asked to stop."""
        deadline = time.monotonic() + seconds
        while not self.signum and (remaining := deadline - time.monotonic()) > 0:
            time.sleep(min(0.1, remaining))

    @contextlib.contextmanager
    def stopping_at(self, when: float | None) -> Iterator[None]:
        """Ask to stop at this time (seconds since the epoch)."""
        seconds = max(0.0, (when or 0.0) - time.time())
        timer = threading.Timer(seconds, self.ask_to_stop, (signal.SIGTERM, AT_DEADLINE))
        timer.daemon = True
        if when is not None:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def raise_if_signalled(self) -> None:
        """Raise Interrupted if a signal came before any stage began."""
        if self.signum:
            raise Interrupted(f"{self.stop_reason} before a stage began", self.signum)

    def catching_signals(self) -> contextlib.AbstractContextManager[None]:
        """On a stop signal ask the stages to save and stop; a second one ends them at once."""

        def again(signum: int) -> BaseException:
            self.at_once = True  # ends the stages that other threads wait for
            return interrupted_twice(signum)

        return catching_signals(self.ask_to_stop, again)
