"""The log of a pipeline run: what its stages said, each line with the time and the stage, in `runs/<run>.log` of the home.

Stages write logs of their own (`run/log.txt` of their artifacts), also while several run side by side; here they stand in
the order in which they came. Each run has its own file, so two at the same time do not mix.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from datetime import datetime
from pathlib import Path

from ttrain.core.files import PRIVATE_FILE

TIMED = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:,\d+)? ")
log = logging.getLogger("ttrain")


def _private(name: str, flags: int) -> int:
    """Opens a file that is made for its owner alone."""
    return os.open(name, flags, PRIVATE_FILE)


class RunLog:
    """Appends lines, from several threads. A disk that is full costs the line, not the run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock, self._warned = threading.Lock(), False

    def add(self, stage: str, line: str) -> None:
        """One line of a stage, with the time that it begins with, or that it is now.

        Control characters in it are shown as Python would, so that it stays one line.
        """
        timed = TIMED.match(line)
        time, line = (timed[1], line[timed.end() :]) if timed else (f"{datetime.now():%Y-%m-%d %H:%M:%S}", line)
        plain = "".join(letter if letter.isprintable() or letter == "\t" else repr(letter)[1:-1] for letter in line)
        try:
            with self._lock, open(self.path, "a", encoding="utf-8", opener=_private) as file:
                file.write(f"{time} {stage}: {plain}\n")
        except OSError as error:
            if not self._warned:
                log.warning("the run's log %s cannot be written, the pipeline goes on: %s", self.path, error.strerror)
            self._warned = True
