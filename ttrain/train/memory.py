"""A limit to the memory of a training process, and what a user is told who met it."""

from __future__ import annotations

import contextlib
import logging
import math
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from ttrain.config import Runtime
from ttrain.errors import TTrainError, UsageError

GB = 1e9
PHRASES = ("can't allocate memory", "out of memory", "bad_alloc", "Cannot allocate memory")
log = logging.getLogger("ttrain")


def limit_of(runtime: Runtime) -> float | None:
    """Bytes that the settings allow a rank."""
    return None if runtime.memory_limit_gb is None else runtime.memory_limit_gb * GB


def limit_memory(limit: float | None, device: torch.device) -> None:
    """Let this process have at most `limit` bytes of the memory that it computes in; what asks for more fails at once.

    On CUDA that is what torch's allocator takes of the GPU (the context's half gigabyte comes on top). On a CPU it is what
    the process, and each child of it, has that no file backs (RLIMIT_DATA, which unlike RLIMIT_AS counts neither mapped
    shards nor libraries). macOS enforces no such limit, so there it is a warning. Infinite: as much as the system allows,
    to lift an earlier limit. Raises UsageError where the process has more already.
    """
    if limit is None:
        return
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    elif device.type == "cpu" and sys.platform == "linux":
        held = data_bytes()
        if held >= limit:
            raise UsageError(
                f"runtime.memory_limit_gb is {limit / GB:g}, but the process has {held / GB:.2f} before it trains; "
                f"set runtime.memory_limit_gb above that"
            )
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        wanted = hard if limit == math.inf else int(limit) if hard == resource.RLIM_INFINITY else min(int(limit), hard)
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
    else:
        log.warning("runtime.memory_limit_gb is %g, which nothing enforces on %s here", limit / GB, device.type)


def data_bytes() -> int:
    """Memory of this process that RLIMIT_DATA counts; Linux only."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmData"].split()[0]) * 1024


@contextlib.contextmanager
def explained(limit: float | None, rows_per_device: int) -> Iterator[None]:
    """Turns "out of memory", in the words of Python, numpy, torch or CUDA, into a TTrainError with its cure."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not isinstance(error, MemoryError) and not any(phrase in str(error) for phrase in PHRASES):
            raise
        smaller = f"lower runtime.rows_per_device (it is {rows_per_device}; the weights stay the same)"
        cure = f"{smaller}, or raise runtime.memory_limit_gb (it is {limit / GB:g})" if limit else smaller
        raise TTrainError(
            f"out of memory: {cure}. {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
