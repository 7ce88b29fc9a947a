"""What bytes cost without a language model: a code that predicts each byte from those before it."""

import math
from collections import Counter, defaultdict

import pytest

from ttrain.evaluate import baselines


def naive_bits(data: bytes, order: int) -> list[float]:
    """By the definition: each length of context falls back on the one shorter by a byte."""
    followers: dict[bytes, Counter[int]] = defaultdict(Counter)
    bits = []
    for at, byte in enumerate(data):
        contexts = [data[at - length : at] for length in range(min(at, order) + 1)]
        chances = [1 / 256] * 256
        for counts in (followers[context] for context in contexts):
            if total := counts.total():
                kinds = len(counts)
                chances = [(counts[b] + kinds * chances[b]) / (total + kinds) for b in range(256)]
        assert sum(chances) == pytest.approx(1)
        bits.append(-math.log2(chances[byte]))
        for context in contexts:
            followers[context][byte] += 1
    return bits


@pytest.mark.parametrize("order", [0, 1, 3])
@pytest.mark.parametrize("data", [b"", b"a", b"abracadabra abracadabra", bytes([0, 255, 254] * 3)])
def test_a_byte_costs_what_the_definition_says(data: bytes, order: int) -> None:
    bits = baselines.adaptive_bits(data, order).tolist()
    assert bits == pytest.approx(naive_bits(data, order), rel=1e-12)
