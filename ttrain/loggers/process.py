"""The process of one logger: `python -m ttrain.loggers.process`, which reads what to do from its input.

The first line is a JSON object (`callback.py` writes it), the second the word for how the training ended. An input that ends
without it means that the training was killed. Until then the rows that are appended to `metrics.jsonl` go to the logger
about once a second.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from ttrain.core.files import JsonDict, parse_json
from ttrain.core.signals import STOP_SIGNALS

METRICS, SAMPLES = "metrics.jsonl", "samples"  # beside each other; the second has step-00000100.txt and so on
SECONDS = 1.0
ORPHAN_SECONDS = 10.0  # for the last rows of a training that was killed: the next attempt may begin meanwhile
MetricRow = JsonDict


class Logger(Protocol):
    """One run of one service; made by `open_run(task)` of its module.

    `steps`: the step that each metric has reached; up to it nothing is sent again. Empty where all rows are written again.
    """

    steps: dict[str, int]

    def log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        """Figures of a row, `seconds` since 1970."""

    def log_text(self, name: str, text: str, step: int) -> None:
        """A text, such as what the model wrote at the step."""

    def flush(self) -> None:
        """Called when the rows that are there for now were logged."""

    def finish(self, *, failed: bool) -> None:
        """End the run: no more rows will come."""


def main() -> int:
    """Follow until the input ends."""
    with contextlib.suppress(OSError):
        os.nice(5)  # on a small machine it must not take its turns from the training
    for signum in STOP_SIGNALS:  # to all processes at once: the training ends first, and tells how
        signal.signal(signum, signal.SIG_IGN)
    task = parse_json(sys.stdin.readline())
    end_signal = _EndSignal()
    logger: Logger = import_module(f"ttrain.loggers.{task['logger']}").open_run(task)
    follow(Path(task["directory"]) / METRICS, logger, end_signal)
    logger.finish(failed=end_signal.word != "finished")
    return 0


class _EndSignal:
    """The word for how the training ended, which a thread reads from standard input."""

    def __init__(self) -> None:
        self.word, self.received = "", threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        self.word = sys.stdin.readline().strip()
        self.received.set()
        if not self.word:
            orphan = threading.Timer(ORPHAN_SECONDS, os._exit, (1,))
            orphan.daemon = True
            orphan.start()


def follow(path: Path, logger: Logger, end_signal: Any) -> None:
    """Hand each figure to the logger once, until the training has reported how it ended and all was read."""
    position, ended = 0, False
    while not ended:
        ended = end_signal.received.wait(SECONDS)  # asked before the last look, which then sees every line
        data = _after(path, position)
        whole = data[: data.rfind(b"\n") + 1]
        position += len(whole)
        samples = _samples(path.with_name(SAMPLES)) if whole else {}  # those of a row are on the disk before it
        for line in whole.splitlines():
            row = parse_json(line)
            for step in sorted(samples):
                if logger.steps.get(SAMPLES, -1) < step <= row["step"]:  # no later: services take no earlier step then
                    logger.log_text(SAMPLES, samples[step].read_text(encoding="utf-8"), step)
                    logger.steps[SAMPLES] = step
            for step, seconds, values in _fresh(row, logger.steps):
                logger.log(values, step, seconds)
        if whole:
            logger.flush()


def _after(path: Path, position: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(position)
            return file.read()
    except OSError:
        return b""


def _samples(directory: Path) -> dict[int, Path]:
    """The texts that the model wrote, by step."""
    return {int(path.stem.removeprefix("step-")): path for path in directory.glob("step-*.txt")}


def _fresh(row: MetricRow, steps: dict[str, int]) -> Iterator[tuple[int, float, dict[str, float]]]:
    """(step, time, figures) of a row, without values that are not finite and without metrics that have passed the step."""
    step = int(row["step"])
    values = {
        name: float(value)
        for name, value in {"tokens": row["tokens"], **row["metrics"]}.items()
        if value is not None and math.isfinite(value) and step > steps.get(name, -1)
    }
    if values:
        yield step, float(row["time"]), values
        steps |= dict.fromkeys(values, step)


if __name__ == "__main__":
    sys.exit(main())
