"""Bits per byte without a language model: baselines that a model has to beat."""

# Compressors and byte models learn only from the bytes before each byte. Fixed frequencies counted
# in the same text would already know what they have to predict.

import functools
import lzma
import zlib
from typing import cast

import numpy as np
import numpy.typing as npt
import pandas as pd

BASELINES = ("zlib", "xz", "order0", "order3")

MOST_BYTES = 4 << 20  # xz -9e reads about 1 MB a second

Floats = npt.NDArray[np.float64]


@functools.lru_cache(maxsize=8)  # once for all models: xz takes a second for a megabyte
def bits_per_byte(data: bytes) -> dict[str, float]:
    """Compute bits per byte of zlib -9, xz -9e and byte models of order 0 and 3.

    Only the first MOST_BYTES count; an empty text gives {}.
    """
    if not data:
        return {}
    data = data[:MOST_BYTES]
    return {
        "zlib": 8 * len(zlib.compress(data, 9)) / len(data),
        "xz": 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data),
        "order0": float(adaptive_bits(data, 0).mean()),
        "order3": float(adaptive_bits(data, 3).mean()),
    }


def adaptive_bits(data: bytes, order: int) -> Floats:
    """Cost of each byte in bits, of shape [bytes], by a model of the `order` <= 3 bytes before it.

    Method C of Witten and Bell (https://doi.org/10.1109/18.87000), over all lengths of context.
    The sum is the length of an arithmetic code (https://doi.org/10.2307/2981683).
    """
    # Before byte b its context c has occurred n(c) times, n(c, b) times followed by b, and followed
    # by d(c) different bytes. The probability of b is (n(c, b) + d(c) p(b | c shortened by a byte))
    # / (n(c) + d(c)); the shortest context falls back on 1/256, a new one is skipped.
    assert 0 <= order <= 3, (
        f"order {order}; a context and the byte after it have to fit into 32 bits"
    )
    byte = np.frombuffer(data, np.uint8).astype(np.uint32)
    context = np.zeros(len(byte), np.uint32)
    chance = np.full(len(byte), 1 / 256)
    for length in range(min(order, len(byte) - 1) + 1):
        if length:
            context[length:] |= byte[:-length] << np.uint32(8 * (length - 1))
        now = slice(length, None)  # the first bytes have no context of this length
        with_byte = _earlier(context[now] << np.uint32(8) | byte[now])
        met = _earlier(context[now])
        is_new = pd.Series(with_byte == 0, dtype=np.int64)
        kinds = (is_new.groupby(context[now], sort=False).cumsum() - is_new).to_numpy()
        chance[now] = np.where(
            met > 0, (with_byte + kinds * chance[now]) / np.maximum(1, met + kinds), chance[now]
        )
    return cast(Floats, -np.log2(chance))


def _earlier(keys: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    # How often each key occurs before its position.
    return pd.Series(keys).groupby(keys, sort=False).cumcount().to_numpy()  # type: ignore[no-any-return]
