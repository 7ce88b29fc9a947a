"""What bytes cost without a language model: a code that could be sent, learnt from the bytes before each byte alone."""

import math
from collections import defaultdict

import pytest

from ttrain.evaluate import baselines


def naive_bits(data: bytes, order: int) -> list[float]:
    """By the definition: each length of context falls back on the one shorter by a byte."""
    seen: dict[bytes, dict[int, int]] = defaultdict(dict)
    found = []
    for at, byte in enumerate(data):
        contexts = [data[at - length : at] for length in range(min(at, order) + 1)]
        chances = [1 / 256] * 256
        for counts in (seen[context] for context in contexts):
            if total := sum(counts.values()):
                kinds = len(counts)
                chances = [
                    (counts.get(each, 0) + kinds * chances[each]) / (total + kinds)
                    for each in range(256)
                ]
        assert sum(chances) == pytest.approx(1)
        found.append(-math.log2(chances[byte]))
        for context in contexts:
            seen[context][byte] = seen[context].get(byte, 0) + 1
    return found


@pytest.mark.parametrize("order", [0, 1, 3])
@pytest.mark.parametrize(
    "data", [b"", b"a", b"abracadabra abracadabra", bytes([0, 255, 254, 0, 255, 1, 0, 255])]
)
def test_a_byte_costs_what_the_definition_says(data: bytes, order: int) -> None:
    assert baselines.adaptive_bits(data, order).tolist() == pytest.approx(
        naive_bits(data, order), rel=1e-12
    )
