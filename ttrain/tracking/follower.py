"""Carries a stage's `metrics.jsonl` over to its run."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from pathlib import Path
from typing import Final, final

from ttrain.tracking.calls import shown
from ttrain.tracking.files import write_text
from ttrain.tracking.runs import NullRun, Row, Run
from ttrain.tracking.store import PROBE_SECONDS

log = logging.getLogger("ttrain")

READ_BYTES: Final = 1 << 22
PATIENCE_SECONDS = 15.0


@final
class MetricsFollower:
    """Sends the lines that a stage appends to its `metrics.jsonl` to a run, about once a second, from its own thread.

    `state_file` remembers which step each metric reached, for this run. A resumed stage may cut the file back to its
    checkpoint and write the same steps again: they are passed over, and no step is logged twice or left out. A
    half-written last line is left for the next look. Starts at once; `stop()` before the files move.
    """

    def __init__(self, path: Path, run: Run | NullRun, state_file: Path, *, seconds: float = 1.0) -> None:
        self._path, self._run, self._state_file, self._seconds = path, run, state_file, seconds
        self._offset, self._tail = 0, b""
        self._stopping, self._drained, self._deadline = threading.Event(), False, math.inf
        self._thread: threading.Thread | None = None
        if isinstance(run, Run):
            self._recall(run)
            self._thread = threading.Thread(target=self._follow, args=(run,), name="metrics-follower", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Sends what is there; gives up on a dead server after 15 s, or after one probe where another follower did."""
        if self._thread is None or not isinstance(self._run, Run):
            return
        patience = PROBE_SECONDS + 1 if self._run.store.gave_up else PATIENCE_SECONDS
        self._deadline = time.monotonic() + patience
        self._stopping.set()
        self._thread.join(patience)
        self._thread = None
        if not self._drained:
            self._run.store.gave_up = True
            last = max(self._run.steps.values(), default=None)
            uri = shown(self._run.store.uri)
            log.warning("MLflow at %s has the metrics up to step %s; the rest remains in %s", uri, last, self._path)

    def _follow(self, run: Run) -> None:
        pause = self._seconds
        while not self._drained and time.monotonic() < self._deadline:
            stopping = self._stopping.is_set()  # asked before the look, so that the last look sees every line
            taken = self._drain(run)
            self._drained = taken and stopping
            pause = self._seconds if taken else min(2 * pause, 30)
            if stopping and not taken:
                time.sleep(0.5)
            self._stopping.wait(pause)

    def _drain(self, run: Run) -> bool:
        while chunk := self._read():
            if not run.log_metrics(row for line in chunk.splitlines() if (row := _parse(line)) is not None):
                return False
            self._offset, self._tail = self._offset + len(chunk), (self._tail + chunk)[-256:]
            with contextlib.suppress(OSError):  # MLflow's own record of the steps is enough
                write_text(self._state_file, json.dumps({"run": run.id, "steps": run.steps}))
        return True

    def _read(self) -> bytes:
        """The whole lines after the last ones sent; from the start again when the file was cut or replaced."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset - len(self._tail))
                if file.read(len(self._tail)) != self._tail:
                    self._offset, self._tail = 0, b""
                    file.seek(0)
                chunk = file.read(READ_BYTES)
        except OSError:
            return b""
        return chunk[: chunk.rfind(b"\n") + 1]

    def _recall(self, run: Run) -> None:
        """Adds the steps of the state file to those that MLflow reported, where both speak of this run."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            state = json.loads(self._state_file.read_text(encoding="utf-8"))
            for key, step in state["steps"].items() if state["run"] == run.id else ():
                run.steps[key] = max(int(step), run.steps.get(key, -1))


def _parse(line: bytes) -> Row | None:
    """The row of a line; None for a line that is none, which a crash of the machine can leave."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    kinds = {"step": int, "metrics": dict, "time": int | float | None}
    good = isinstance(row, dict) and all(isinstance(row.get(name), kind) for name, kind in kinds.items())
    return row if good else None
