"""Compressed files, and the peak memory of a process."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable

import pyarrow as pa

Pack = Callable[[bytes], bytes]


def zstd(data: bytes) -> bytes:
    packed: bytes = pa.compress(data, codec="zstd", asbytes=True)
    return packed


PACKS: dict[str, Pack] = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd}


# The peak of a process itself, in KiB: on Linux `ru_maxrss` of a child begins at that of the process that started it.
PEAK = """
import resource, sys
from pathlib import Path
from ttrain.data import streams
def peak():
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return int(status.read_text().split("VmHWM:")[1].split()[0])
"""
