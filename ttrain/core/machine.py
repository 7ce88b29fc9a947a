"""What this machine offers a process."""

from __future__ import annotations

import os
import sys


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
