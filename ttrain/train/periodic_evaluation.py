"""What a small suite of tasks says of the model while it learns: figures beside the loss, which they do not move."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from ttrain.train.callbacks import Callback, LogRecord, StepRecord
from ttrain.train.periodic_samples import undisturbed

PREFIX = "eval/"  # of every figure
TIMED = (f"{PREFIX}seconds", f"{PREFIX}time_share")  # which two runs of the same training do not share
MUCH = 0.2  # share of the time from which on it is told how to spend less
log = logging.getLogger("ttrain")


class Evaluations(Callback):
    """Every so many steps, and after the last one, a line of figures of its own: `eval/TASK/FIGURE`, and

    eval/seconds      that this evaluation took
    eval/time_share   of all evaluations since this process began to train, of its time

    `measure(step)` gives the figures; `told` are the callbacks that write lines down. The training after it is the same to
    the last bit as without it.
    """

    def __init__(
        self, model: nn.Module, measure: Callable[[int], Mapping[str, float]], told: Sequence[Callback], *, every: int,
        tokens_per_step: int, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._model, self._measure, self._told = model, measure, told
        self._every, self._tokens_per_step, self._clock = every, tokens_per_step, clock
        self._began = self._spent = 0.0
        self._warned = False

    def start(self, step: int, steps: int) -> None:
        self._began = self._clock()

    def step_end(self, record: StepRecord) -> None:
        if record.step % self._every and record.step != record.steps:
            return
        before = self._clock()
        with undisturbed(self._model):
            figures = {PREFIX + name: value for name, value in self._measure(record.step).items()}
        now = self._clock()
        self._spent += now - before
        share = self._spent / max(now - self._began, 1e-9)
        figures |= dict(zip(TIMED, (now - before, share), strict=True))
        tokens = record.step * self._tokens_per_step
        for callback in self._told:
            callback.log(LogRecord(record.step, record.steps, tokens, figures))
        if share > MUCH and not self._warned:
            self._warned = True
            log.warning(
                "evaluations take %.0f %% of the time (%.1f s each); raise runtime.eval_every_steps, which is %d, or "
                "lower runtime.eval_limit", 100 * share, now - before, self._every,
            )  # fmt: skip
