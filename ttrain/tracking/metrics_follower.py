"""Carries a stage's `metrics.jsonl` over to its run."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, final

from ttrain.core.files import parse_json
from ttrain.core.redact import without_user
from ttrain.store.metric_rows import parse_row
from ttrain.tracking.atomic_files import write_text
from ttrain.tracking.delivery import BEGUN
from ttrain.tracking.null_tracker import NullRun
from ttrain.tracking.runs import Run

log = logging.getLogger("ttrain")

READ_BYTES: Final = 1 << 22
PATIENCE_SECONDS = 15.0


@final
class MetricsFollower:
    """Sends the lines that a stage appends to its `metrics.jsonl` to a run, about once a second, from its own thread.

    `state_file` remembers which step each metric reached, for this run. A resumed stage may cut the file back to its
    checkpoint and write the same steps again: they are passed over, and no step is logged twice or left out. A
    half-written last line is left for the next look. Starts at once; `stop()` before the files move. `later_at`: where
    the file will be then, for who tells MLflow what this process could not.
    """

    def __init__(
        self, path: Path, run: Run | NullRun, state_file: Path, *, later_at: Sequence[Path] = (), seconds: float = 1.0
    ) -> None:
        self._path, self._run, self._state_file, self._seconds = path, run, state_file, seconds
        self._offset, self._tail = 0, b""
        self._stopping, self._drained, self._given_up = threading.Event(), False, False
        self._thread: threading.Thread | None = None
        if isinstance(run, Run):
            self._entry = run.box.add("follow", places=[run.store.relative(place) for place in (path, *later_at)])
            self._recall(run)
            self._thread = threading.Thread(target=self._follow, args=(run,), name="metrics-follower", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Sends what is there; what a server does not take, within 15 s, is kept to be told later."""
        if self._thread is None or not isinstance(self._run, Run):
            return
        self._stopping.set()
        self._thread.join(PATIENCE_SECONDS)
        self._thread, self._given_up = None, True
        if self._drained or self._run.keep_rows(self._rest()):
            self._run.box.told(self._entry)
        else:
            last = max(self._run.steps.values(), default=None)
            uri = without_user(self._run.store.uri)
            log.warning("MLflow at %s has the metrics up to step %s; the rest remains in %s", uri, last, self._path)

    def _follow(self, run: Run) -> None:
        while not self._drained and not self._given_up:
            stopping = self._stopping.is_set()  # asked before the look, so that the last look sees every line
            taken = self._drain(run)
            self._drained = taken and stopping
            if stopping and not taken:
                if run.store.asking.is_silent:  # it may be so for hours
                    return
                time.sleep(0.5)
            self._stopping.wait(self._seconds)

    def _drain(self, run: Run) -> bool:
        while not self._given_up and (chunk := self._read()):
            if BEGUN not in self._entry.parts:
                run.box.arrived(self._entry, BEGUN)
            if not run.log_metrics(row for line in chunk.splitlines() if (row := parse_row(line)) is not None):
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

    def _rest(self) -> Iterator[bytes]:
        """What was not sent; all of it, where nobody can say."""
        while chunk := self._read():
            yield chunk
            self._offset, self._tail = self._offset + len(chunk), (self._tail + chunk)[-256:]

    def _recall(self, run: Run) -> None:
        """Adds the steps of the state file to those that MLflow reported, where both speak of this run."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            state = parse_json(self._state_file.read_text(encoding="utf-8"))
            for key, step in state["steps"].items() if run.id and state["run"] == run.id else ():
                run.steps[key] = max(int(step), run.steps.get(key, -1))
