"""Guards: warn about signs of a mistake in data or settings, naming the rows; they stop nothing.

Warnings are in `run/guards.jsonl`: {"step", "guard", "message", "rows", "time"}.
"""

import json
import logging
import math
import time
from collections import Counter
from pathlib import Path

import numpy as np

from ttrain.core.text import first_of
from ttrain.data.order import Order
from ttrain.train.callbacks import Callback, LogRecord, StepRecord, truncate_after
from ttrain.train.trainer import QUICK

ROWS_SHOWN = 8

log = logging.getLogger("ttrain")


def counts(path: Path) -> dict[str, int]:
    """{guard: number of warnings} in a file of warnings."""
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(Counter(json.loads(line)["guard"] for line in lines))


class Guard(Callback):
    """Base class of guards."""

    name: str

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self, step: int, steps: int) -> None:
        truncate_after(self._path, step)

    def _warn(self, step: int, message: str, record: StepRecord) -> None:
        rows = record.rows().tolist()
        log.warning(
            "guard %s: step %d: %s; rows %s", self.name, step, message, first_of(rows, ROWS_SHOWN)
        )
        line = {
            "step": step,
            "guard": self.name,
            "message": message,
            "rows": rows,
            "time": time.time(),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


class LossSpike(Guard):
    """A loss far above those of the steps before it: broken rows, or too high a learning rate."""

    # Far is `DEVIATIONS` standard deviations, each at least `LEAST_DEVIATION` of the mean. A loss
    # that stays high is reported once, and enters the statistics of later steps.

    name = "loss-spike"
    saved_attributes = ("losses", "high")
    WINDOW = 50
    FEWEST = 20  # steps
    DEVIATIONS = 6.0
    LEAST_DEVIATION = 0.02

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._losses: list[float] = []
        self._high = False

    def step_end(self, record: StepRecord) -> None:
        if not math.isfinite(record.loss):
            return  # the trainer handles non-finite losses
        if len(self._losses) >= self.FEWEST:
            mean = float(np.mean(self._losses))
            deviation = float(np.std(self._losses, ddof=1))
            high = record.loss > mean + self.DEVIATIONS * max(
                deviation, self.LEAST_DEVIATION * abs(mean)
            )
            if high and not self._high:
                baseline = f"{mean:.3g} ± {deviation:.2g} over the {len(self._losses)} steps before"
                self._warn(record.step, f"the loss is {record.loss:.4g}, after {baseline}", record)
            self._high = high
        self._losses = [*self._losses, record.loss][-self.WINDOW :]


class Overfit(Guard):
    """The training loss falls while the validation loss rises three times in a row, by over 1 %."""

    name = "overfit"
    saved_attributes = ("loss", "live_tokens", "low", "before", "rises", "warned", "quick")
    RISES = 3
    LEAST_RISE = 0.01

    def __init__(self, path: Path, order: Order) -> None:
        super().__init__(path)
        self._order = order
        self._loss = 0.0
        self._live_tokens = 0  # since the last validation
        # (step, training loss, validation loss) that rises follow.
        self._low: tuple[int, float, float] | None = None
        self._before = math.inf
        self._rises = 0
        self._warned = False
        self._quick = False  # whether the validations so far are quick ones
        self._record: StepRecord | None = None

    def step_end(self, record: StepRecord) -> None:
        self._record = record
        if math.isfinite(record.loss):
            self._loss += record.loss * record.live_tokens
            self._live_tokens += record.live_tokens

    def log(self, record: LogRecord) -> None:
        """Compare a validation with those before, if steps were made since the last one."""
        is_full = "validation_loss" in record.metrics
        self._quick = self._quick or (QUICK in record.metrics and not is_full)
        loss = record.metrics.get(QUICK if self._quick else "validation_loss")
        is_other = self._quick and is_full  # a full one after quick ones is of other rows
        if loss is None or is_other or self._record is None or not self._live_tokens:
            return
        step = record.step
        train = self._loss / self._live_tokens
        self._loss = 0.0
        self._live_tokens = 0
        if self._low is None or not loss > self._before:
            self._low = (step, train, loss)
            self._rises = 0
            self._warned = False
        else:
            self._rises += 1
        self._before = loss
        since, train_then, low = self._low
        if (
            self._rises >= self.RISES
            and loss > (1 + self.LEAST_RISE) * low
            and train < train_then
            and not self._warned
        ):
            self._warned = True
            times = min(step * self._order.rows_per_step, self._order.total_rows) / self._order.rows
            self._warn(
                step,
                f"the validation loss has risen since step {since}, {low:.4g} → {loss:.4g}, while "
                f"the training loss fell, {train_then:.4g} → {train:.4g}; each row was read "
                f"{times:.1f} times: set early_stopping, train for fewer tokens, or bring more "
                "data",
                self._record,
            )
