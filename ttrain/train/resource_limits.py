"""Memory limit of a training process, and the error message when it is exceeded."""

import contextlib
import logging
import math
import resource
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, time
from pathlib import Path
from zoneinfo import ZoneInfo

import psutil
import torch

from ttrain.config import QuietHours, Runtime
from ttrain.core.text import first_line
from ttrain.errors import TTrainError, UsageError

GB = 1e9
CGROUP = Path("/sys/fs/cgroup")
CAP_SHARE = 0.8  # of the memory that is free
# What a training takes before its first step, and the stack of a thread: with less, libraries end
# it in words of their own.
START_BYTES = 40_000_000
THREAD_BYTES = 8 << 20

# The last is oneDNN's, where it has no memory to compile a product in.
PHRASES = (
    "can't allocate memory",
    "out of memory",
    "bad_alloc",
    "Cannot allocate memory",
    "could not create a primitive",
)

log = logging.getLogger("ttrain")


def limit_bytes(runtime: Runtime) -> float | None:
    """Memory limit of a rank in bytes, from the settings."""
    return None if runtime.memory_limit_gb is None else runtime.memory_limit_gb * GB


def limit_memory(limit: float | None, device: torch.device) -> None:
    """Limit this process to `limit` bytes of computing memory; larger allocations fail at once.

    Raises UsageError if the process has more already.
    """
    # On CUDA: of torch's allocator (the context takes half a gigabyte more). On Linux: of what no
    # file backs (RLIMIT_DATA, without mapped shards and libraries), also in children. macOS
    # enforces no such limit.
    if limit is None:
        return
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    elif device.type == "cpu" and sys.platform == "linux":
        used = data_bytes() / GB
        more = (START_BYTES + THREAD_BYTES * torch.get_num_threads()) / GB
        if used + more >= limit / GB:
            raise UsageError(
                f"runtime.memory_limit_gb is {limit / GB:g}, but the process has {used:.2f} "
                f"before it trains, and needs {more:.2f} to begin; set runtime.memory_limit_gb "
                f"above {used + more:.2f}"
            )
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        soft = int(limit) if hard == resource.RLIM_INFINITY else min(int(limit), hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    else:
        log.warning(
            "runtime.memory_limit_gb is %g, which nothing enforces on %s here",
            limit / GB,
            device.type,
        )


def available_bytes(device: torch.device) -> float:
    """Free memory of the GPU, else of the machine within the container's limit."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    free = float(psutil.virtual_memory().available)
    file = CGROUP / "memory.max"  # of cgroups of version 2
    limit = file.read_text().strip() if file.exists() else "max"
    return (
        free
        if limit == "max"
        else min(free, int(limit) - int((CGROUP / "memory.current").read_text()))
    )


def data_bytes() -> int:
    """Memory of this process that RLIMIT_DATA counts; Linux only."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmData"].split()[0]) * 1024


@contextlib.contextmanager
def explain_out_of_memory(limit: float | None, rows_per_device: int) -> Iterator[None]:
    """Turn an out-of-memory error into a TTrainError that says how to fix it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raised = f", or raise runtime.memory_limit_gb (it is {limit / GB:g})" if limit else ""
        raise TTrainError(
            f"out of memory: lower runtime.rows_per_device (it is {rows_per_device}; the weights "
            f"stay the same){raised}. {type(error).__name__}: {first_line(error)}"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, numpy, torch or CUDA says that memory is out."""
    return isinstance(error, MemoryError) or any(phrase in str(error) for phrase in PHRASES)


@contextlib.contextmanager
def cap_at_available_memory(device: torch.device, ranks: int) -> Iterator[None]:
    """Limit allocations to this rank's share of free memory, so that the system kills nothing.

    On a CPU with Linux; a lower limit stays.
    """
    if device.type != "cpu" or sys.platform != "linux":
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = data_bytes() + int(CAP_SHARE * max(0.0, available_bytes(device)) / ranks)
    lower = [bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([limit, *lower]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


class QuietHoursThrottle:
    """Switches settings by the clock: in quiet hours half of the rows and of the threads."""

    def __init__(
        self,
        settings: QuietHours,
        device: torch.device,
        *,
        rows_per_device: int,
        memory_limit: float | None = None,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        self.settings = settings
        self.on = False
        self._device = device
        self._rows_per_device = rows_per_device
        self._memory_limit = memory_limit
        self._threads = torch.get_num_threads()
        zone = ZoneInfo(settings.timezone) if settings.timezone else None
        self._clock = clock or (lambda: datetime.now(zone))

    def is_quiet(self) -> bool:
        """Whether quiet hours are now; they have their start but not their end."""
        return is_in_window(
            self._clock().time(),
            time.fromisoformat(self.settings.start),
            time.fromisoformat(self.settings.end),
        )

    def set(self, on: bool) -> int:
        """Switch the settings of quiet hours on or off; returns the rows of a micro-batch."""
        self.on = on
        rows = max(1, self._rows_per_device // 2) if on else self._rows_per_device
        threads = max(1, self._threads // 2) if on else self._threads
        torch.set_num_threads(threads)
        if self._device.type == "cuda" and self.settings.memory_share is not None:
            day = self._memory_limit or math.inf
            total = torch.cuda.get_device_properties(self._device).total_memory
            # Less than what is in use would end what fits by day.
            used = torch.cuda.max_memory_reserved(self._device)
            lowered = min(day, max(self.settings.memory_share * total, used))
            limit_memory(lowered if on else day, self._device)
        log.info(
            "%s: %d rows a micro-batch, %d threads", "quiet hours" if on else "day", rows, threads
        )
        return rows


def is_in_window(now: time, start: time, end: time) -> bool:
    """Whether a time lies in a window that may span midnight; always if start and end are equal."""
    return start <= now < end if start < end else now >= start or now < end
