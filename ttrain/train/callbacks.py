"""Callbacks watch: they get frozen records of what happened, and nothing they do moves the training."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ttrain.core.files import parse_json
from ttrain.core.progress import Progress
from ttrain.errors import TTrainError

SHOWN = ("loss", "grad_norm", "lr_", "skipped_steps", "validation_loss", "perplexity")  # in the log; prefixes of names
LARGEST_EXPONENT = 709.0  # exp of more than 709.78 is no float
log = logging.getLogger("ttrain")


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, over all ranks and micro-batches."""

    step: int  # steps done, this one among them
    steps: int
    loss: float  # mean per target
    grad_norm: float  # before the clip
    live_tokens: int
    skipped: bool  # its gradient was no number, and the weights stayed
    seconds: float
    data_seconds: float  # of them, waiting for the loader
    rows: Callable[[], npt.NDArray[np.int64]]  # row numbers


@dataclass(frozen=True)
class LogRecord:
    """Figures at a logging step: means over the tokens since the last one, over all ranks."""

    step: int
    steps: int
    tokens: int
    metrics: dict[str, float]


class Callback:
    """Called on rank 0 only: start, (epoch_start, (step_start, step_end, log, validated, saved)*, epoch_end)*, end.

    Wherever an error rises, `failed` is the last call, for all of them.

    Callbacks watch. What they may do is add figures to the log, ask for a stop, and keep a state of their own in the
    checkpoint. One that raises ends the run with an error that names it.
    """

    def start(self, step: int, steps: int) -> None:
        """The loop begins at `step`; above 0, it continues."""

    def epoch_start(self, epoch: int) -> None:
        """The next step holds the first row of an epoch, counted from 0; also where a run continues within it."""

    def step_start(self, step: int) -> None:
        """The loop begins to wait for the rows of a step, which will be number `step`."""

    def step_end(self, record: StepRecord) -> None:
        """The weights were updated."""

    def figures(self, record: StepRecord) -> Mapping[str, float]:
        """Figures that this callback adds to the log, asked for at a logging step before `log`."""
        return {}

    def log(self, record: LogRecord) -> None:
        """A logging step, or the figures of a validation."""

    def validation_figures(self, loss: float) -> Mapping[str, float]:
        """Figures that this callback adds beside the loss of a validation, asked for before `log`."""
        return {}

    def validated(self, step: int, loss: float) -> None:
        """The held-out rows were measured: nats per target."""

    def saved(self, step: int) -> None:
        """A checkpoint was handed to the writer."""

    def epoch_end(self, epoch: int) -> None:
        """The last step held the last row of an epoch."""

    def stop_reason(self) -> str | None:
        """Asked after each step and each validation: a word, if the run should end here and its state be saved.

        After a step the question travels with the next one's collective, so that the run ends one step later.
        """
        return None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback, as JSON."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Put back what `state()` gave."""

    def end(self, step: int) -> None:
        """The loop ended as planned, or stopped after saving."""

    def failed(self, error: BaseException) -> None:
        """The loop raised `error`, which goes on rising."""


def continued(path: Path, step: int) -> None:
    """Cut off a file of JSON lines what comes again when a run continues at `step`: the lines of later steps, torn ones; all
    where it begins."""
    kept = []
    if path.exists():
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n") and step and _step_of(line) <= step:
                kept.append(line)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept))
    temporary.replace(path)


def _step_of(line: str) -> float:
    try:
        return float(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


class MetricsFile(Callback):
    """Curves as JSON lines, the truth from which trackers are fed. Continuing cuts off what lies after the checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def start(self, step: int, steps: int) -> None:
        continued(self.path, step)
        self._file = self.path.open("a")

    def log(self, record: LogRecord) -> None:
        assert self._file is not None, "start() comes first"
        finite = {name: value if math.isfinite(value) else None for name, value in record.metrics.items()}
        line = {"step": record.step, "tokens": record.tokens, "time": time.time(), "metrics": finite}
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise TTrainError(
                f"cannot write the curve {self.path}: {error.strerror}; free some space, then run the same command again"
            ) from error

    def saved(self, step: int) -> None:
        assert self._file is not None, "start() comes first"
        os.fsync(self._file.fileno())

    def end(self, step: int) -> None:
        if self._file is not None:
            self._file.close()

    def failed(self, error: BaseException) -> None:
        self.end(0)


class ProgressBar(Callback):
    """Tells the parent process, which draws the bar."""

    def __init__(self, progress: Progress, tokens_per_step: int, unit: str = "tokens") -> None:
        self._progress, self._tokens_per_step, self._unit = progress, tokens_per_step, unit

    def start(self, step: int, steps: int) -> None:
        self._progress.update(step * self._tokens_per_step, steps * self._tokens_per_step, self._unit, start=True)

    def log(self, record: LogRecord) -> None:
        shown = {name: record.metrics[name] for name in ("loss", "validation_loss") if name in record.metrics}
        if not shown:  # a quick validation: the bar goes on showing the loss
            return
        done, total = record.step * self._tokens_per_step, record.steps * self._tokens_per_step
        self._progress.update(done, total, self._unit, start=False, **shown)


class Perplexity(Callback):
    """The perplexity beside a validation loss that is a mean cross entropy: its exponential."""

    def validation_figures(self, loss: float) -> Mapping[str, float]:
        return {"perplexity": math.exp(loss) if loss < LARGEST_EXPONENT else math.inf}


class LogLines(Callback):
    """Plain lines in the stage's log: what a person follows; the metrics file has the rest."""

    def start(self, step: int, steps: int) -> None:
        log.info("training from step %d to %d", step, steps)

    def log(self, record: LogRecord) -> None:
        shown = [f"{name} {value:.4g}" for name, value in record.metrics.items() if name.startswith(SHOWN)]
        if "tokens_per_second" in record.metrics:
            shown.append(f"{record.metrics['tokens_per_second']:.0f} tokens/s")
        if "eta_seconds" in record.metrics:
            shown.append(f"ETA {_duration(record.metrics['eta_seconds'])}")
        log.info("step %d/%d  %s", record.step, record.steps, "  ".join(shown))

    def saved(self, step: int) -> None:
        log.info("checkpoint of step %d", step)


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
