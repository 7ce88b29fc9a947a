"""When held-out records are too few to judge a model by: one rule and one sentence for all that compares models.

20 are the fewest on which a model that is better on three of four records is so by more than chance (sign test: p = 0.04;
on 16 of them 0.08). Loads nothing heavy.
"""

from __future__ import annotations

from ttrain.config.nightly import FEWEST_RECORDS


def too_few(count: int, least: int = FEWEST_RECORDS, *, noun: str = "held-out records") -> str:
    """How many there are of how many that are needed; "" where there are enough."""
    return "" if count >= least else f"{count:,} of {least:,} {noun}"


def not_judged(count: int, *, noun: str = "held-out records") -> str:
    """What stands in place of a winner, a star or a percentage; "" where there are enough records."""
    few = too_few(count, noun=noun)
    return f"not judged ({few})" if few else ""
