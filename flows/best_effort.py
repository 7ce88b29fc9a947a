"""Optional Prefect calls, beside the states of runs: labels, tables, links."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

log = logging.getLogger("ttrain")


@contextlib.contextmanager
def best_effort() -> Iterator[None]:
    """Log and swallow any exception, so that optional Prefect calls cannot fail a run."""
    try:
        yield
    except Exception as error:
        log.warning("an optional call of Prefect failed: %s: %s", type(error).__name__, error)
