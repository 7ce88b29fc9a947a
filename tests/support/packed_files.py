"""Compressed files, and the peak memory of a process."""

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
