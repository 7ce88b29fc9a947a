"""A worker whose rank 1 does something else when it comes to its sixth sum: what the variable SABOTAGE says."""

import os
import sys
import time
from typing import Any

from ttrain.engine import stage_worker as worker
from ttrain.train.distributed import Ranks


def main() -> int:
    what, sums, proper = os.environ["SABOTAGE"], list[Any](), Ranks.sum

    def sum_(self: Ranks, values: Any) -> Any:
        sums.append(values)
        if self.rank == 1 and len(sums) == 6:
            print("now", flush=True)
            if what == "raise":
                raise ZeroDivisionError("of rank 1")
        return proper(self, values)

    patched: Any = Ranks
    patched.sum = sum_
    if what == "a slow disk":
        delay_writes()
    return worker.main()


def delay_writes() -> None:
    fsync, begin = os.fsync, Ranks.__init__

    def of_rank(self: Ranks, *words: Any, **named: Any) -> None:
        begin(self, *words, **named)
        os.fsync = slowly if self.rank == 0 else refused

    def slowly(file: Any) -> None:
        print("rank 0 writes", flush=True)
        time.sleep(0.6)
        fsync(file)

    def refused(file: Any) -> None:
        raise RuntimeError("a file of another rank than the first")

    patched: Any = Ranks
    patched.__init__ = of_rank


if __name__ == "__main__":
    sys.exit(main())
