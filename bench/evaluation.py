"""Speed of an evaluation: bits per byte against the bare forward pass, multiple choice against lm-evaluation-harness.

    python bench/evaluation.py                                  everything
    python bench/evaluation.py --only text --rounds 1           a quick try of one part

Each part says in its own module what its sides are.
"""

from __future__ import annotations

import argparse
import sys

import common
import evaluation_choices
import evaluation_text
import train_common

ROUNDS = 3
PARTS = {"text": evaluation_text.add_lines, "choices": evaluation_choices.add_lines}
SIDES = {"text": evaluation_text.side, "choices": evaluation_choices.side}


def main() -> int:
    """Print the table; 1 where a limit was missed."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--only", choices=list(PARTS), help="one part")
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--json", help="write the figures there")
    chosen = options.parse_args()
    table, costs = common.Table(), {}
    for name, part in PARTS.items():
        if chosen.only in (None, name):
            costs |= part(table, __file__, chosen.rounds)
    train_common.write_json(chosen.json, table, costs)
    return int(table.failed)


if __name__ == "__main__" and not common.requested_side(SIDES):
    sys.exit(main())
