"""Guards: warn about signs of a mistake in the data or the settings, naming the rows; they never stop a run.

The warnings are in `run/guards.jsonl`: {"step", "guard", "message", "rows", "time"}, all rows of the step by number.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ttrain.core.files import parse_json
from ttrain.core.text import first_of
from ttrain.data.loader import Loader, Order
from ttrain.train.callbacks import Callback, LogRecord, StepRecord, truncate_after
from ttrain.train.trainer import QUICK

ROWS_SHOWN = 8

log = logging.getLogger("ttrain")


class GuardLog:
    """Writes warnings to a file and to the log. On a full disk a line of the file is lost; training continues."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def cut(self, step: int) -> None:
        """Drop the lines that are written again when the run continues at `step`."""
        try:
            truncate_after(self.path, step)
        except OSError as error:
            log.warning("the guards cannot write %s: %s", self.path, error)

    def warn(self, guard: str, step: int, message: str, rows: Sequence[int]) -> None:
        """Write a warning; the log gets the first rows only."""
        shown = first_of(rows, ROWS_SHOWN)
        log.warning("guard %s: step %d: %s; rows %s", guard, step, message, shown)
        line = {"step": step, "guard": guard, "message": message, "rows": list(rows), "time": time.time()}
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            log.warning("the guards cannot write %s: %s", self.path, error)


def counts(path: Path) -> dict[str, int]:
    """{guard: number of warnings} in a file of warnings; empty if there is no file."""
    try:
        return dict(Counter(parse_json(line)["guard"] for line in path.read_text().splitlines()))
    except (OSError, ValueError, KeyError, TypeError):
        return {}


class Guard(Callback):
    """Base class of guards: a named callback that warns."""

    name: str

    def __init__(self, book: GuardLog) -> None:
        self._guard_log = book

    def start(self, step: int, steps: int) -> None:
        self._guard_log.cut(step)

    def _warn(self, step: int, message: str, rows: Callable[[], npt.NDArray[np.int64]]) -> None:
        self._guard_log.warn(self.name, step, message, rows().tolist())


class LossSpike(Guard):
    """A loss far above those of the steps before it: broken rows, or a learning rate that is too high.

    Far is `DEVIATIONS` standard deviations, of at least `LEAST_DEVIATION` of the mean each. A loss that stays high is
    reported once, and enters the statistics of later steps.
    """

    name = "loss-spike"
    saved_attributes = ("losses", "high")
    WINDOW, FEWEST = 50, 20  # steps
    DEVIATIONS, LEAST_DEVIATION = 6.0, 0.02

    def __init__(self, book: GuardLog) -> None:
        super().__init__(book)
        self._losses: list[float] = []
        self._high = False

    def step_end(self, record: StepRecord) -> None:
        if not math.isfinite(record.loss):
            return  # the trainer handles non-finite losses
        if len(self._losses) >= self.FEWEST:
            mean, deviation = float(np.mean(self._losses)), float(np.std(self._losses, ddof=1))
            high = record.loss > mean + self.DEVIATIONS * max(deviation, self.LEAST_DEVIATION * abs(mean))
            if high and not self._high:
                baseline = f"{mean:.3g} ± {deviation:.2g} over the {len(self._losses)} steps before"
                self._warn(record.step, f"the loss is {record.loss:.4g}, after {baseline}", record.rows)
            self._high = high
        self._losses = [*self._losses, record.loss][-self.WINDOW :]


class Overfit(Guard):
    """The training loss falls while the validation loss rises, three validations in a row and by more than a hundredth."""

    name = "overfit"
    saved_attributes = ("loss", "live_tokens", "low", "before", "rises", "told")
    RISES = 3
    LEAST_RISE = 0.01

    def __init__(self, book: GuardLog, order: Order) -> None:
        super().__init__(book)
        self._order = order
        self._loss, self._live_tokens = 0.0, 0  # since the last validation
        self._low: tuple[int, float, float] | None = None  # (step, training loss, validation loss) that rises follow
        self._before, self._rises, self._told = math.inf, 0, False
        self._record: StepRecord | None = None

    def step_end(self, record: StepRecord) -> None:
        self._record = record
        if math.isfinite(record.loss):
            self._loss += record.loss * record.live_tokens
            self._live_tokens += record.live_tokens

    def log(self, record: LogRecord) -> None:
        if QUICK in record.metrics:  # by default a training has these, and a whole validation at its end alone
            self.validated(record.step, record.metrics[QUICK])

    def validated(self, step: int, loss: float) -> None:
        """Compare with the validations before, if steps were made since the last one."""
        if self._record is None or not self._live_tokens:
            return
        train = self._loss / self._live_tokens
        self._loss, self._live_tokens = 0.0, 0
        if self._low is None or not loss > self._before:
            self._low, self._rises, self._told = (step, train, loss), 0, False
        else:
            self._rises += 1
        self._before = loss
        since, train_then, low = self._low
        if self._rises >= self.RISES and loss > (1 + self.LEAST_RISE) * low and train < train_then and not self._told:
            self._told = True
            times = min(step * self._order.rows_per_step, self._order.total_rows) / self._order.rows
            self._warn(
                step,
                f"the validation loss has risen since step {since}, {low:.4g} → {loss:.4g}, while the training loss fell, "
                f"{train_then:.4g} → {train:.4g}; each row was read {times:.1f} times: set early_stopping, train for fewer "
                f"tokens, or bring more data",
                self._record.rows,
            )


class DeadLoader(Guard):
    """A loader that gives nothing for half a minute, the same rows again, or rows with hardly a token to learn from.

    A thread reports the first while training waits, for the first rank only, which loads its own share of the rows
    named. Few targets means few per row compared with the fewest of the previous steps.
    """

    name = "dead-loader"
    SECONDS = 30.0
    WINDOW, FEWEST = 50, 10  # steps
    FEW = 0.25
    REPEATS_EVERY = 50  # steps; asking for the rows of a step takes 0.2 ms

    def __init__(self, book: GuardLog, loader: Loader, seconds: float = SECONDS) -> None:
        super().__init__(book)
        self._loader, self._seconds = loader, seconds
        self._waiting: tuple[int, float] | None = None  # (number of the step, since when)
        self._live: list[float] = []  # targets a row
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, step: int, steps: int) -> None:
        super().start(step, steps)
        self._over.clear()
        self._thread = threading.Thread(target=self._watch, name="dead-loader", daemon=True)
        self._thread.start()

    def step_start(self, step: int) -> None:
        self._waiting = (step, time.monotonic())

    def step_end(self, record: StepRecord) -> None:
        self._waiting = None
        order, step_index = self._loader.order, record.step - 1
        looks = record.step % self.REPEATS_EVERY == 2 and order.rows > order.rows_per_step
        if looks and np.array_equal(record.rows(), order.step_rows(step_index - 1)):
            self._warn(record.step, "the rows are the same as in the previous step", record.rows)
        live = record.live_tokens / min(order.rows_per_step, order.total_rows - step_index * order.rows_per_step)
        if len(self._live) >= self.FEWEST and live < self.FEW * min(self._live):
            message = f"its rows have {live:.3g} tokens to learn from each; no previous step had fewer than"
            self._warn(record.step, f"{message} {min(self._live):.3g}", record.rows)
        else:
            self._live = [*self._live, live][-self.WINDOW :]

    def end(self, step: int) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def failed(self, error: BaseException) -> None:
        self.end(0)

    def _watch(self) -> None:
        warned_step = 0
        while not self._over.wait(min(1.0, self._seconds / 4)):
            waiting = self._waiting
            if waiting is None or waiting[0] == warned_step or self._loader.consumed >= waiting[0]:
                continue
            step, since = waiting
            if time.monotonic() - since >= self._seconds:
                warned_step = step
                message = f"the loader has given no rows for {self._seconds:g} s"
                self._warn(step, message, lambda step=step: self._loader.order.step_rows(step - 1))  # type: ignore[misc]


def default_guards(path: Path, loader: Loader) -> list[Callback]:
    """All guards, writing to `path`."""
    book = GuardLog(path)
    return [LossSpike(book), Overfit(book, loader.order), DeadLoader(book, loader)]
