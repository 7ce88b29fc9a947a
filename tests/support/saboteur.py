"""A stage's worker whose rank 1 fails at its sixth sum."""

import itertools
import sys
from typing import Any

from ttrain.engine import stage_worker
from ttrain.train.distributed import Ranks


def main() -> int:
    proper_sum = Ranks.sum
    numbers = itertools.count(1)

    def failing_sum(self: Ranks, values: Any) -> Any:
        if next(numbers) == 6 and self.rank == 1:
            print("now", flush=True)  # from here on the test counts the seconds
            raise ZeroDivisionError("of rank 1")
        return proper_sum(self, values)

    patched: Any = Ranks
    patched.sum = failing_sum
    return stage_worker.main()


if __name__ == "__main__":
    sys.exit(main())
