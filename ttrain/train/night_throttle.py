"""The night profile: fewer cores, smaller micro-batches, a cap on memory, and the same training.

Only what `runtime` may change changes: the rows of a step, and so its gradient, stay the same up to the order of summation.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from datetime import datetime, time
from zoneinfo import ZoneInfo

import torch

from ttrain.config import Night
from ttrain.errors import UsageError
from ttrain.train.memory import GB, limit_memory

log = logging.getLogger("ttrain")


class NightShift:
    """Follows the clock between steps. `threads`, `rows_per_device`: those of the day."""

    def __init__(
        self,
        settings: Night,
        device: torch.device,
        *,
        rows_per_device: int,
        memory_limit: float | None = None,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        self.settings, self.on = settings, False
        self._device, self._rows_per_device, self._memory_limit = device, rows_per_device, memory_limit
        self._threads = torch.get_num_threads()
        zone = ZoneInfo(settings.timezone) if settings.timezone else None
        self._clock = clock or (lambda: datetime.now(zone))

    def due(self) -> bool:
        """Whether it is night now; the window holds its start and not its end, and may span midnight."""
        return within(self._clock().time(), time.fromisoformat(self.settings.start), time.fromisoformat(self.settings.end))

    def turn(self, on: bool) -> int:
        """Begin or end the night; returns the rows of a micro-batch from now on."""
        self.on = on
        share, cap = self.settings, self.settings.memory_limit_gb
        rows = max(1, int(self._rows_per_device * share.rows_fraction)) if on else self._rows_per_device
        threads = max(1, int(self._threads * share.threads_fraction)) if on else self._threads
        torch.set_num_threads(threads)
        try:
            if cap:
                limit_memory(cap * GB if on else self._memory_limit or math.inf, self._device)
        except UsageError as error:
            log.warning("the night begins without its cap on memory: %s", error)
        log.info("%s: %d rows a micro-batch, %d threads", "night" if on else "day", rows, threads)
        return rows


def within(now: time, start: time, end: time) -> bool:
    """Whether a time of day lies in a window that may span midnight; start and end alike: always."""
    return start <= now < end if start < end else now >= start or now < end
