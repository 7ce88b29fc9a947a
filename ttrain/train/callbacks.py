"""Callbacks watch: they get frozen records of what happened, and nothing they do moves the training."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ttrain.progress import Progress

log = logging.getLogger("ttrain")


@dataclass(frozen=True)
class LogRecord:
    """Figures at a logging step: means over the tokens since the last one, over all ranks."""

    step: int
    steps: int
    tokens: int
    metrics: dict[str, float]


class Callback:
    """Called on rank 0 only, in this order: start, (log, validation, saved)*, end or failed."""

    def start(self, step: int, steps: int) -> None:
        """The loop begins at `step`; above 0, it continues."""

    def log(self, record: LogRecord) -> None:
        """A logging step."""

    def saved(self, step: int) -> None:
        """A checkpoint was handed to the writer."""

    def end(self, step: int) -> None:
        """The loop ended as planned, or stopped after saving."""

    def failed(self, error: BaseException) -> None:
        """The loop raised `error`, which goes on rising."""


class MetricsFile(Callback):
    """Curves as JSON lines, the truth from which trackers are fed. Continuing cuts off what lies after the checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def start(self, step: int, steps: int) -> None:
        kept = []
        if step and self.path.exists():
            for line in self.path.read_text().splitlines(keepends=True):
                if line.endswith("\n") and not _comes_again(json.loads(line), step, steps):
                    kept.append(line)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(kept))
        temporary.replace(self.path)
        self._file = self.path.open("a")

    def log(self, record: LogRecord) -> None:
        assert self._file is not None, "start() comes first"
        finite = {name: value if math.isfinite(value) else None for name, value in record.metrics.items()}
        line = {"step": record.step, "tokens": record.tokens, "time": time.time(), "metrics": finite}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def saved(self, step: int) -> None:
        assert self._file is not None, "start() comes first"
        os.fsync(self._file.fileno())

    def end(self, step: int) -> None:
        if self._file is not None:
            self._file.close()

    def failed(self, error: BaseException) -> None:
        self.end(0)


def _comes_again(line: dict[str, Any], step: int, steps: int) -> bool:
    """Whether a run that continues at `step` writes this line anew; the last validation comes after the last checkpoint."""
    return bool(line["step"] > step or (line["step"] == steps and "validation_loss" in line["metrics"]))


class ProgressBar(Callback):
    """Tells the parent process, which draws the bar."""

    def __init__(self, progress: Progress, tokens_per_step: int) -> None:
        self._progress, self._tokens_per_step = progress, tokens_per_step

    def start(self, step: int, steps: int) -> None:
        self._progress.update(step * self._tokens_per_step, steps * self._tokens_per_step, "tokens", start=True)

    def log(self, record: LogRecord) -> None:
        shown = {name: record.metrics[name] for name in ("loss", "validation_loss") if name in record.metrics}
        done, total = record.step * self._tokens_per_step, record.steps * self._tokens_per_step
        self._progress.update(done, total, "tokens", start=False, **shown)


class LogLines(Callback):
    """Plain lines in the stage's log."""

    def start(self, step: int, steps: int) -> None:
        log.info("training from step %d to %d", step, steps)

    def log(self, record: LogRecord) -> None:
        figures = "  ".join(f"{name} {value:.4g}" for name, value in record.metrics.items())
        log.info("step %d/%d  %s", record.step, record.steps, figures)

    def saved(self, step: int) -> None:
        log.info("checkpoint of step %d", step)
