"""A process that ends with the one it works for, whatever ended that: none works on without anyone who waits for it."""

from __future__ import annotations

import os
import threading
import time

POLL_SECONDS = 0.2


def end_with_parent(parent: int) -> None:
    """Watch the process with this id, which must be the parent; end at once where it is gone already."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
