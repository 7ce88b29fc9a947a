"""What bytes cost without a language model: a code that could be sent, learnt from the bytes before each byte alone."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttrain.evaluate import baselines


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
