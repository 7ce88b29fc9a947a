"""Compressed files, also those that unpack to gigabytes."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
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


def gzip_bomb(mebibytes: int) -> bytes:
    """Zeros, a thousand to one: one packed MiB again and again, which deflate allows after a full flush."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    crc = 0
    for _ in range(mebibytes):
        crc = zlib.crc32(bytes(1 << 20), crc)
    trailer = crc.to_bytes(4, "little") + (mebibytes << 20 & 0xFFFFFFFF).to_bytes(4, "little")
    return b"\x1f\x8b\x08" + bytes(7) + block * mebibytes + packer.flush() + trailer


def zstd_bomb(mebibytes: int) -> bytes:
    """One frame of blocks that repeat a byte (RFC 8878, 3.1.1.2), 128 KiB each, four bytes of archive."""
    blocks = 8 * mebibytes
    header = b"\x28\xb5\x2f\xfd" + bytes([0b0000_0000, 0x38])  # a window of 128 KiB, no size
    one = (1 << 17 << 3 | 1 << 1).to_bytes(3, "little") + b"\0"
    return header + one * (blocks - 1) + (1 << 17 << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\0"
