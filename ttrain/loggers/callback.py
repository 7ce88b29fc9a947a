"""The loggers of a training, as one callback: it starts their processes and sends them how the training ended."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ttrain.loggers import check
from ttrain.train.callbacks import Callback

PATIENCE_SECONDS = 30.0  # at the end, for uploads; half of what a stage is given after a signal to stop
FOLLOWER = "ttrain.loggers.process"
FINISHED, FAILED = "finished", "failed"
log = logging.getLogger("ttrain")


class Loggers(Callback):
    """Feeds loggers from `directory/metrics.jsonl`; the callback that writes it comes before this one.

    One that fails or hangs says so in the stage's log, and what it missed stays in that file.
    """

    def __init__(self, names: Sequence[str], directory: Path, description: Mapping[str, Any]) -> None:
        """`description`: project, group, kind and name of the run, and its `config`, as the services' pages show them.

        Raises UsageError where one is not installed.
        """
        check(names)
        self._names, self._directory, self._description = names, directory, description
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, step: int, steps: int) -> None:
        for name in self._names:
            task = {"logger": name, "directory": str(self._directory.absolute()), **self._description}
            command = [sys.executable, "-P", "-m", FOLLOWER]
            try:
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.STDOUT)  # to the stage's log
            except OSError as error:  # no memory for one more process
                log.warning("the logger %s cannot be started and gets nothing of %s: %s", name, self._directory, error)
                continue
            self.processes[name] = process
            _send_line(process, json.dumps(task))

    def end(self, step: int) -> None:
        self._end(FINISHED)

    def failed(self, error: BaseException) -> None:
        self._end(FAILED)

    def _end(self, word: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        for process in self.processes.values():
            _send_line(process, word, last=True)
        for name, process in self.processes.items():
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            if code:
                log.warning("the logger %s ended with code %d; it may lack the end of %s", name, code, self._directory)
        self.processes = {}


def _send_line(process: subprocess.Popen[bytes], line: str, *, last: bool = False) -> None:
    """Write a line to a process's input, which is closed after the last; one that has ended is reported at the end."""
    assert process.stdin is not None, "it was started with a pipe"
    with contextlib.suppress(OSError):
        process.stdin.write(f"{line}\n".encode())
        process.stdin.flush()
    if last:
        with contextlib.suppress(OSError):  # closing writes once more what an ended process did not take
            process.stdin.close()
