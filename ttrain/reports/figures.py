"""Metrics by their names: whether lower is better, the unit, and the value as text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from ttrain.config.metrics import BITS_PER_BYTE

# Metrics of the data, not of a model: the size of the held-out text, also compressed.
NEITHER = re.compile(
    r"[_/](xz|zlib|order\d)$|/(items|left_out)$|^eval/(.*_)?(bytes|tokens|documents|chats|domain)$|/tokens$|^champion/"
)
HIGHER = re.compile(
    r"tokens_per_second|mfu|bytes_per_token|accuracy|fill$|/(ended|clean|distinct_\d|calls|valid_calls|right_\w+)(/|$)"
)
LOWER = re.compile(
    rf"loss|perplexity|{BITS_PER_BYTE.name}|seconds|hours|unk_rate|pad_fraction|data_wait|time_share|/(repeated|loops|empty|needless_calls)(/|$)"
)
# The order of metrics in tables: those that decide come first.
FIRST = (
    re.compile(rf"^{BITS_PER_BYTE.of_run}$"),
    re.compile(rf"^{BITS_PER_BYTE.of_run}_(sft|lora)$"),
    re.compile(r"^eval/.*loss"),
    re.compile(r"validation_loss$"),
    re.compile(r"/loss$"),
    re.compile(r"tokens_per_second|^total/"),
    re.compile(r"^tok/"),
)


def better(name: str) -> int:
    """-1 where lower is better, 1 where higher is, 0 where neither."""
    if NEITHER.search(name):
        return 0
    return 1 if HIGHER.search(name) else -1 if LOWER.search(name) else 0


def rank(name: str) -> tuple[int, str]:
    """A sort key for names of metrics: those that decide first, then by name."""
    return next((position for position, pattern in enumerate(FIRST) if pattern.search(name)), len(FIRST)), name


def best(name: str, values: Sequence[float | None]) -> int | None:
    """Index of the best value; None where no direction is better, or all values are equal."""
    sign = better(name)
    candidates = [(sign * value, -index) for index, value in enumerate(values) if value is not None and math.isfinite(value)]
    if not sign or len(candidates) < 2 or len({value for value, _ in candidates}) == 1:
        return None
    return -max(candidates)[1]


def short(value: float) -> str:
    """A large count in short form: "950", "12.8k", "1.5M"."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:,.6g}"


def percent(value: float | None, base: float | None) -> float | None:
    """By how much a value differs from another one, in percent of that; None where it is undefined."""
    if value is None or base is None or not base or not (math.isfinite(value) and math.isfinite(base)):
        return None
    return 100 * (value - base) / abs(base)


def change(value: float | None) -> str:
    """ "+2.4 %" of a percentage."""
    if value is None:
        return ""
    if abs(value) < 0.005:
        return "±0 %"
    return f"{value:+.2f} %" if abs(value) < 10 else f"{value:+,.0f} %"
