"""Where a loss or a gradient is no number: which rows are to blame, and what the user is told."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ttrain.config import Loop
from ttrain.errors import TTrainError
from ttrain.train.distributed import Ranks

SHOWN_ROWS = 16
SKIPS_IN_A_ROW = 20  # a run that only skips learns nothing: the weights themselves are no numbers, or the data is spoilt


class NonFinite(TTrainError):
    """The loss or the gradient of a step is not finite; `rows` are those of the micro-batches to blame."""

    def __init__(self, step: int, loss: float, norm: float, rows: Sequence[int], config: Loop) -> None:
        self.step, self.rows = step + 1, list(rows)
        named = ", ".join(map(str, self.rows[:SHOWN_ROWS])) + (", ..." if len(self.rows) > SHOWN_ROWS else "")
        other = (
            f"; {SKIPS_IN_A_ROW} steps in a row were skipped before"
            if config.nonfinite == "skip"
            else (f", or set {config.prefix}nonfinite=skip (it is {config.nonfinite})")
        )
        super().__init__(
            f"the loss of step {step + 1} is not finite ({loss}, gradient norm {norm}); its {len(self.rows)} rows: {named}. "
            f"The weights are those before it. Look at these rows, lower {config.prefix}optim.lr ({config.optim.lr}){other}"
        )


def rows_of(parts: Sequence[npt.NDArray[np.int64]], losses: Mapping[int, Tensor], ranks: Ranks) -> list[int]:
    """Rows of the micro-batches whose own loss is no number, on any rank; all rows of the step where it is the gradient."""
    bad = [float(number in losses and not math.isfinite(float(losses[number]))) for number in range(len(parts))]
    blamed = [part for part, found in zip(parts, ranks.sum(bad), strict=True) if found]
    return [int(row) for part in blamed or parts for row in part]
