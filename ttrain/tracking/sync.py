"""Carry metrics to MLflow: follow the files of running stages; `ttrain track sync` delivers what ended runs could not."""

from __future__ import annotations

import contextlib
import json
import logging
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, final

from ttrain.core.files import parse_json, read_object
from ttrain.core.redact import without_user
from ttrain.store import references
from ttrain.store.runs import parse_row
from ttrain.tracking import outboxes
from ttrain.tracking.calls import attempt, first_line
from ttrain.tracking.database import open_client
from ttrain.tracking.delivery import BEGUN
from ttrain.tracking.outboxes import deliver_orphaned_outbox, remove_unmade
from ttrain.tracking.runs import AnyRun, TrackedRun
from ttrain.tracking.tracker import MlflowStore
from ttrain.tracking.uploads import write_text

log = logging.getLogger("ttrain")

TRIES: Final = 3  # while the server passes its health check


@dataclass(frozen=True)
class UndeliveredRun:
    """The undelivered entries of one tracked run: how many of each kind, and why they still wait."""

    run: str  # the pipeline's run
    name: str  # of the tracked run: the same, or its stage's
    tracker: str  # "" is the home's own database
    directory: Path = field(repr=False)
    things: Mapping[str, int] = field(default_factory=dict)
    delivered: Mapping[str, int] = field(default_factory=dict)  # delivered by this sync: metrics, params, file, ...
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """The run as `track sync --json` prints it."""
        row = {"run": self.run, "name": self.name, "tracker": self.tracker or "the home's own"}
        return row | {"waiting": dict(self.things), "told": dict(self.delivered), "why": self.why}


def undelivered_runs(home: Path, run: str | None = None) -> list[UndeliveredRun]:
    """The runs with undelivered entries in this home, oldest first. Raises UsageError if `run` is unknown."""
    listed = [candidate for candidate in map(_read_outbox, outboxes.list_outboxes(home.resolve())) if candidate is not None]
    if run is None:
        return listed
    chosen = [candidate for candidate in listed if run in (candidate.run, candidate.name)]
    chosen = chosen or [candidate for candidate in listed if candidate.run.startswith(run)]
    if not chosen and references.find_run(home, run) is None:
        raise references.unknown("run", run, [*(candidate.run for candidate in listed), *references.run_names(home)])
    return chosen


def sync(
    home: Path,
    uri_of: Callable[[str], str],
    run: str | None = None,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> list[UndeliveredRun]:
    """Deliver what waits; return the new state of each run. `uri_of(tracker)`: with the password, which no outbox holds.

    `on_progress(bytes done, bytes in total)` is called while files are uploaded.
    """
    home = home.resolve()
    remove_unmade(home)
    pending_runs = undelivered_runs(home, run)
    done: list[UndeliveredRun] = []
    for tracker in dict.fromkeys(pending.tracker for pending in pending_runs):
        runs_of_tracker = [pending for pending in pending_runs if pending.tracker == tracker]
        uri = uri_of(tracker)
        client, error = attempt(lambda: open_client(uri, home))  # noqa: B023
        if client is None:
            done += [_undelivered(pending, {}, (error and first_line(error)) or "") for pending in runs_of_tracker]
            continue
        store = MlflowStore(client, uri, home, "")
        store.on_upload(on_progress)
        _, silence = store.caller.try_call(lambda: None)
        done += _deliver_all(store, runs_of_tracker, silence, elsewhere=run is not None)
        store.close()
    return done


def _deliver_all(
    store: MlflowStore, pending_runs: list[UndeliveredRun], silence: Exception | None, *, elsewhere: bool
) -> list[UndeliveredRun]:
    """Deliver the small entries of all runs, then the files, those of a run after those of its stages."""
    done = {}
    for pending in pending_runs:
        done[pending.directory] = _deliver_one(store, pending, silence, elsewhere=elsewhere, uploads=False)
    for directory in outboxes.children_first(done):
        earlier = done[directory]
        if earlier.things and not earlier.why:
            now = _deliver_one(store, earlier, None, elsewhere=elsewhere, uploads=True)
            done[directory] = replace(now, delivered={**earlier.delivered, **now.delivered})
    return list(done.values())


def _deliver_one(
    store: MlflowStore, pending: UndeliveredRun, silence: Exception | None, *, elsewhere: bool, uploads: bool
) -> UndeliveredRun:
    counts_before, result = dict(store.counts), None
    for _ in range(TRIES):
        if silence is None:
            result = deliver_orphaned_outbox(store, pending.directory, elsewhere=elsewhere, uploads=uploads)
        if result is not False or silence is not None:
            break
        _, silence = store.caller.try_call(lambda: None)
    arrived = {name: number - counts_before.get(name, 0) for name, number in store.counts.items()}
    arrived = {name: number for name, number in arrived.items() if number}
    if result:
        return _undelivered(pending, arrived, "")
    if result is None and silence is None:
        host = read_object(pending.directory / "run.json").get("host")
        host_note = "" if host == platform.node() else f" on {host}; name the run to deliver it all the same"
        return _undelivered(pending, arrived, f"a process still has its outbox and delivers it itself{host_note}")
    why = first_line(silence) if silence else store.caller.last_error
    return _undelivered(pending, arrived, f"MLflow at {without_user(store.uri)}: {why}")


def _undelivered(pending: UndeliveredRun, delivered: Mapping[str, int], why: str) -> UndeliveredRun:
    now = _read_outbox(pending.directory)
    return UndeliveredRun(
        pending.run, pending.name, pending.tracker, pending.directory, now.things if now else {}, delivered, why
    )


def _read_outbox(directory: Path) -> UndeliveredRun | None:
    run_info = read_object(directory / "run.json")
    if not run_info:
        return None
    things = Counter(entry.kind for entry in outboxes.entries_of(directory))
    if not run_info.get("ended"):
        things["end"] = 1
    run = str(run_info.get("tags", {}).get("ttrain.run") or run_info.get("name"))
    return UndeliveredRun(run, str(run_info.get("name")), str(run_info.get("tracker", "")), directory, things)


READ_BYTES: Final = 1 << 22

PATIENCE_SECONDS = 15.0


@final
class MetricsFollower:
    """Sends the lines that a stage appends to its `metrics.jsonl` to a run, about once a second, from its own thread.

    `state_file` remembers which step each metric reached, for this run. A resumed stage may cut the file back to its
    checkpoint and write the same steps again: they are skipped, and no step is logged twice or left out. A
    half-written last line waits for the next read. Starts at once; `stop()` before the files move. `later_at`: where
    the file will be then, for a later process that delivers the rest.
    """

    def __init__(
        self, path: Path, run: AnyRun, state_file: Path, *, later_at: Sequence[Path] = (), seconds: float = 1.0
    ) -> None:
        self._path, self._run, self._state_file, self._seconds = path, run, state_file, seconds
        self._offset, self._tail = 0, b""
        self._stopping, self._drained, self._given_up = threading.Event(), False, False
        self._thread: threading.Thread | None = None
        if isinstance(run, TrackedRun):
            self._entry = run.outbox.add("follow", places=[run.store.relative(location) for location in (path, *later_at)])
            self._recall(run)
            self._thread = threading.Thread(target=self._follow, args=(run,), name="metrics-follower", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Send what is there; rows that a server does not take within 15 s are kept for later."""
        if self._thread is None or not isinstance(self._run, TrackedRun):
            return
        self._stopping.set()
        self._thread.join(PATIENCE_SECONDS)
        self._thread, self._given_up = None, True
        if self._drained or self._run.keep_rows(self._rest()):
            self._run.outbox.mark_delivered(self._entry)
        else:
            last = max(self._run.steps.values(), default=None)
            uri = without_user(self._run.store.uri)
            log.warning("MLflow at %s has the metrics up to step %s; the rest is in %s", uri, last, self._path)

    def _follow(self, run: TrackedRun) -> None:
        while not self._drained and not self._given_up:
            stopping = self._stopping.is_set()  # read before draining, so that the last drain sees every line
            all_sent = self._drain(run)
            self._drained = all_sent and stopping
            if stopping and not all_sent:
                if run.store.caller.is_silent:  # it may be so for hours
                    return
                time.sleep(0.5)
            self._stopping.wait(self._seconds)

    def _drain(self, run: TrackedRun) -> bool:
        while not self._given_up and (chunk := self._read()):
            if BEGUN not in self._entry.parts:
                run.outbox.mark_part_delivered(self._entry, BEGUN)
            if not run.log_metrics(row for line in chunk.splitlines() if (row := parse_row(line)) is not None):
                return False
            self._offset, self._tail = self._offset + len(chunk), (self._tail + chunk)[-256:]
            with contextlib.suppress(OSError):  # MLflow's own record of the steps is enough
                write_text(self._state_file, json.dumps({"run": run.id, "steps": run.steps}))
        return True

    def _read(self) -> bytes:
        """Read the whole lines after the last ones sent; from the start if the file was cut or replaced."""
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
        """The unsent lines; all lines if that is unknown."""
        while chunk := self._read():
            yield chunk
            self._offset, self._tail = self._offset + len(chunk), (self._tail + chunk)[-256:]

    def _recall(self, run: TrackedRun) -> None:
        """Add the steps of the state file, if it is of this run, to those that MLflow reported."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            state = parse_json(self._state_file.read_text(encoding="utf-8"))
            for key, step in state["steps"].items() if run.id and state["run"] == run.id else ():
                run.steps[key] = max(int(step), run.steps.get(key, -1))


@final
class SampleFollower:
    """Logs the sample texts that a training writes into a directory, `step-*.txt`, under `path` of a run.

    `path` is where the files of the finished artifact will be, so that none is there twice.
    """

    def __init__(self, directory: Path, run: AnyRun, path: str) -> None:
        self._directory, self._run, self._path = directory, run, path
        self._changed = 0  # modification time of the directory at the last look
        is_again = isinstance(run, TrackedRun) and run.is_again
        self._logged = {file.name for file in self._files()[:-1]} if is_again else set()  # the last may be missing there

    def log_changes(self) -> None:
        """Log the new ones if the directory has changed: a look at all of them takes 30 ms where there are 10,000."""
        with contextlib.suppress(OSError):  # there may be no samples yet
            changed = self._directory.stat().st_mtime_ns
            if changed != self._changed:
                self._changed = changed
                self.log_new()

    def log_new(self) -> None:
        """Log the texts that are not logged yet."""
        for file in self._files():
            if file.name not in self._logged:
                with contextlib.suppress(OSError):  # moved meanwhile; the artifact's files are logged at the end
                    text = file.read_text(encoding="utf-8", errors="replace")
                    self._logged.add(file.name)
                    self._run.log_text(text, f"{self._path}/{file.name}")

    def _files(self) -> list[Path]:
        """The existing sample files, by step."""
        with contextlib.suppress(OSError):
            return sorted(self._directory.glob("step-*.txt"))
        return []
