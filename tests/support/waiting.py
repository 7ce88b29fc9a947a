"""Waiting for what comes soon, but not on a busy machine."""

import contextlib
import time
from collections.abc import Callable
from typing import Any


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
