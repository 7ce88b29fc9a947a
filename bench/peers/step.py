"""The work of each of the six stages, the same under every engine: a number comes in, one is added.

It notes that it ran, so that a cached stage is told from one that ran again; the fourth fails while BENCH_FAILS is set.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

FAILING = 4


def step(number: int, before: int) -> int:
    """One more than `before`. Raises RuntimeError where this stage is to fail."""
    with Path(os.environ["BENCH_RAN"]).open("a") as file:
        file.write(f"{number}\n")
    if number == FAILING and os.environ.get("BENCH_FAILS"):
        raise RuntimeError(f"stage {number} was asked to fail")
    return before + 1


if __name__ == "__main__":  # DVC: python step.py NUMBER OUTPUT [INPUT]
    given = int(Path(sys.argv[3]).read_text()) if len(sys.argv) > 3 else 0
    Path(sys.argv[2]).write_text(f"{step(int(sys.argv[1]), given)}\n")
