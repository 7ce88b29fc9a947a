"""What a byte costs without a language model: the numbers that a model has to beat."""

from __future__ import annotations

import lzma
import math
import zlib
from collections import Counter


def bits_per_byte(data: bytes) -> dict[str, float]:
    """Bits per byte of zlib -9, of xz -9e and of an order-0 byte model, each over all bytes as one stream."""
    if not data:
        return {}
    return {
        "zlib": 8 * len(zlib.compress(data, 9)) / len(data),
        "xz": 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data),
        "order0": order0(data),
    }


def order0(data: bytes) -> float:
    """Entropy of the bytes under their own frequencies, in bits."""
    counts = Counter(data)
    return sum(n / len(data) * math.log2(len(data) / n) for n in counts.values())
