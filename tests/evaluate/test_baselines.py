"""What bytes cost without a language model: a code that could be sent, learnt from the bytes before each byte alone."""

from __future__ import annotations

import lzma
import math
import zlib
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttrain.evaluate import baselines

TEXT = ("The quick brown fox jumps over the lazy dog. 天地玄黃，宇宙洪荒。 " * 40).encode()


def distribution(seen: dict[bytes, dict[int, int]], context: bytes) -> list[float]:
    """Of the byte after a context, by the definition: each length of context falls back on the one shorter by a byte."""
    chances = [1 / 256] * 256
    for start in range(len(context), -1, -1):
        counts = seen[context[start:]]
        if total := sum(counts.values()):
            kinds = len(counts)
            chances = [(counts.get(byte, 0) + kinds * chances[byte]) / (total + kinds) for byte in range(256)]
    return chances


def naive_bits(data: bytes, order: int) -> list[float]:
    seen: dict[bytes, dict[int, int]] = defaultdict(dict)
    found = []
    for at, byte in enumerate(data):
        context = data[max(0, at - order) : at]
        chances = distribution(seen, context)
        assert sum(chances) == pytest.approx(1)
        found.append(-math.log2(chances[byte]))
        for start in range(len(context) + 1):
            counts = seen[context[start:]]
            counts[byte] = counts.get(byte, 0) + 1
    return found


@settings(deadline=None)
@given(st.lists(st.sampled_from([0, 1, 97, 254, 255]), max_size=40).map(bytes) | st.binary(max_size=20), st.integers(0, 3))
def test_a_byte_costs_what_the_definition_says(data: bytes, order: int) -> None:
    assert baselines.adaptive_bits(data, order).tolist() == pytest.approx(naive_bits(data, order), rel=1e-12)


def test_the_table_has_two_compressors_and_two_byte_models_over_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = baselines.bits_per_byte(TEXT)
    assert tuple(found) == baselines.BASELINES
    assert found["zlib"] == 8 * len(zlib.compress(TEXT, 9)) / len(TEXT)
    assert found["xz"] == 8 * len(lzma.compress(TEXT, preset=9 | lzma.PRESET_EXTREME)) / len(TEXT)
    assert found["order3"] == baselines.adaptive_bits(TEXT, 3).mean()
    assert baselines.bits_per_byte(b"") == {}
    monkeypatch.setattr(baselines, "MOST_BYTES", 500)
    assert baselines.bits_per_byte(TEXT) == baselines.bits_per_byte(TEXT[:500]), "the beginning stands for a long text"
