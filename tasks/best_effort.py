"""What Prefect is told beside the states of runs: labels, tables, links."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

log = logging.getLogger("ttrain")


@contextlib.contextmanager
def courtesy() -> Iterator[None]:
    """No trouble with what is done in here ends a run; it is said and passed over."""
    try:
        yield
    except Exception as error:
        log.warning("Prefect was not told everything: %s: %s", type(error).__name__, error)
