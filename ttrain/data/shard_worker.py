"""How a process that makes shards starts. It imports what the work needs and no settings, whose import takes 0.3 s."""

from __future__ import annotations

import signal

import ttrain.data.blocks  # noqa: F401  # what the first task needs
from ttrain.core.signals import end_with_parent


def start(parent: int) -> None:
    """Begin the life of a worker, which ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    end_with_parent(parent)


def begin() -> None:
    """A task for a worker that shall start now."""
