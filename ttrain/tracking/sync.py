"""Carry metrics to MLflow: follow the files of running stages; `ttrain track sync` delivers what ended runs could not."""

from __future__ import annotations

import contextlib
import logging
import platform
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ttrain.core.files import JsonDict, read_object
from ttrain.core.redact import without_user
from ttrain.store import references, runs
from ttrain.store.runs import parse_row
from ttrain.store.server_records import with_token
from ttrain.tracking import outbox
from ttrain.tracking.calls import attempt, first_line
from ttrain.tracking.client import need_mlflow, tracking_uri
from ttrain.tracking.database import database_of
from ttrain.tracking.runs import BEGUN, AnyRun, TrackedRun
from ttrain.tracking.tracker import MlflowStore

log = logging.getLogger("ttrain")

TRIES = 3  # while the server passes its health check


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

    def to_json(self) -> JsonDict:
        """The run as `track sync --json` prints it."""
        row = {"run": self.run, "name": self.name, "tracker": self.tracker or "the home's own"}
        return row | {"waiting": dict(self.things), "told": dict(self.delivered), "why": self.why}


def undelivered_runs(home: Path, run: str | None = None) -> list[UndeliveredRun]:
    """The runs with undelivered entries in this home, oldest first. Raises UsageError if `run` is unknown."""
    listed = [candidate for candidate in map(_read_outbox, outbox.list_outboxes(home.resolve())) if candidate is not None]
    if run is None:
        return listed
    chosen = [candidate for candidate in listed if run in (candidate.run, candidate.name)]
    chosen = chosen or [candidate for candidate in listed if candidate.run.startswith(run)]
    if not chosen and references.find_run(home, run) is None:
        raise references.unknown_run(home, run, [*(candidate.run for candidate in listed), *runs.names(home)])
    return chosen


def sync(
    home: Path, run: str | None = None, on_progress: Callable[[int, int], object] = lambda done, total: None
) -> list[UndeliveredRun]:
    """Deliver what ended runs could not; the new state of each. Raises TrackingError and, for an unknown run, UsageError.

    `on_progress(bytes done, bytes in total)` is called while files are uploaded.
    """
    need_mlflow("nothing can be delivered to")
    home = home.resolve()
    outbox.remove_unfinished(home)
    reports = {pending.directory: pending for pending in undelivered_runs(home, run)}
    for tracker in {pending.tracker for pending in reports.values()}:
        directories = [pending.directory for pending in reports.values() if pending.tracker == tracker]
        store = MlflowStore(_uri_of(home, tracker), home)
        _, error = attempt(lambda: store.client)  # noqa: B023
        if error is not None:
            reports |= {directory: replace(reports[directory], why=first_line(error)) for directory in directories}
            continue
        store.on_upload(on_progress)
        for directory, uploads in outbox.delivery_order(directories):
            if not reports[directory].why and (reports[directory].things or not uploads):
                reports[directory] = _deliver(store, reports[directory], uploads=uploads, elsewhere=run is not None)
        store.close()
    return list(reports.values())


def _uri_of(home: Path, tracker: str) -> str:
    """The URI of the MLflow that an outbox names, with the password, which no outbox holds."""
    if not tracker:
        return f"sqlite:///{database_of(home)}"
    current_uri = tracking_uri(home)
    return current_uri if without_user(current_uri) == tracker else with_token(home, tracker)


def _deliver(store: MlflowStore, pending: UndeliveredRun, *, uploads: bool, elsewhere: bool) -> UndeliveredRun:
    """Deliver one outbox; return what is left of it, and why."""
    counts_before = store.counts.copy()
    done: bool | None = False
    for _ in range(TRIES):
        if store.caller.is_silent and store.caller.probe() is not None:
            break
        done = store.deliver_orphan(pending.directory, elsewhere=elsewhere, uploads=uploads)
        if done is not False:
            break
    why = ""
    if done is None:
        host = read_object(pending.directory / outbox.RUN).get("host")
        host_note = "" if host == platform.node() else f" on {host}; name the run to deliver it all the same"
        why = f"a process still has its outbox and delivers it itself{host_note}"
    elif not done:
        why = f"MLflow at {without_user(store.uri)}: {store.caller.last_error}"
    now = _read_outbox(pending.directory)
    delivered = Counter(pending.delivered) + (store.counts - counts_before)
    return replace(pending, things=now.things if now else {}, delivered=delivered, why=why)


def _read_outbox(directory: Path) -> UndeliveredRun | None:
    run_info = read_object(directory / outbox.RUN)
    if not run_info:
        return None
    things = Counter(entry.kind for entry in outbox.read_journal(directory).values())
    if not run_info.get("ended"):
        things["end"] = 1
    run = str(run_info.get("tags", {}).get("ttrain.run") or run_info.get("name"))
    return UndeliveredRun(run, str(run_info.get("name")), str(run_info.get("tracker", "")), directory, things)


READ_BYTES = 1 << 22

PATIENCE_SECONDS = 15.0  # to wait for a request that the thread has made


class MetricsFollower:
    """Logs the lines that a stage appends to its `metrics.jsonl` to a run, about once a second, from its own thread.

    A resumed stage may cut the file back to its checkpoint and write the same steps again, which the run skips. A
    half-written last line waits for the next read, and new lines wait in their file while older ones wait for a silent
    server. Starts at once; `stop()` before the file moves. `later_at`: where it will be then, for a later process that logs
    the rest if this one is killed.
    """

    def __init__(self, path: Path, run: AnyRun, *, later_at: Sequence[Path] = (), seconds: float = 1.0) -> None:
        self._path, self._run, self._seconds = path, run, seconds
        self._offset, self._tail = 0, b""
        self._reading, self._stopping = threading.Lock(), threading.Event()
        if isinstance(run, TrackedRun):
            self._entry = run.outbox.add("follow", places=[run.store.relative(location) for location in (path, *later_at)])
            self._thread = threading.Thread(target=self._follow, args=(run,), name="metrics-follower", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Write the remaining lines into the run's outbox, and deliver them if MLflow answers."""
        if isinstance(self._run, TrackedRun) and not self._stopping.is_set():
            self._stopping.set()
            self._add_new_lines(self._run)
            self._run.outbox.mark_delivered(self._entry)
            self._thread.join(PATIENCE_SECONDS)
            self._run.store.deliver(self._run)

    def _follow(self, run: TrackedRun) -> None:
        while not self._stopping.is_set():
            if self._add_new_lines(run, unless_rows_wait=True):
                run.store.deliver(run)
            self._stopping.wait(self._seconds)

    def _add_new_lines(self, run: TrackedRun, *, unless_rows_wait: bool = False) -> bool:
        """Write the new lines into the outbox; False if they hold nothing new. `unless_rows_wait`: for a silent server."""
        is_new = False
        with self._reading:
            while chunk := self._read():
                if BEGUN not in self._entry.parts:
                    run.outbox.mark_part_delivered(self._entry, BEGUN)
                if unless_rows_wait and run.rows_wait:
                    return is_new
                is_new |= run.add_rows(row for line in chunk.splitlines() if (row := parse_row(line)) is not None)
                self._offset, self._tail = self._offset + len(chunk), (self._tail + chunk)[-256:]
        return is_new

    def _read(self) -> bytes:
        """Read the whole lines after the last ones read; from the start if the file was cut or replaced."""
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


class SampleFollower:
    """Logs the sample texts that a training writes into a directory, `step-*.txt`, under `path` of a run.

    `path` is where the files of the finished artifact will be, so that none is there twice.
    """

    def __init__(self, directory: Path, run: AnyRun, path: str) -> None:
        self._directory, self._run, self._path = directory, run, path
        self._changed = 0  # modification time of the directory at the last look
        is_again = isinstance(run, TrackedRun) and run.is_again
        self._logged = {file.name for file in self._files()[:-1]} if is_again else set()  # the last may be missing there

    def log_new(self, *, only_if_changed: bool = False) -> None:
        """Log the texts that are not logged yet.

        `only_if_changed`: if the directory has, since a look at all of them takes 30 ms where there are 10,000.
        """
        with contextlib.suppress(OSError):  # there may be no samples yet
            changed = self._directory.stat().st_mtime_ns
            if only_if_changed and changed == self._changed:
                return
            self._changed = changed
            for file in self._files():
                if file.name not in self._logged:
                    with contextlib.suppress(OSError):  # moved meanwhile; the artifact's files are logged at the end
                        text = file.read_text(encoding="utf-8", errors="replace")
                        self._logged.add(file.name)
                        self._run.log_text(text, f"{self._path}/{file.name}")

    def _files(self) -> list[Path]:
        """The existing sample files, by step."""
        return sorted(self._directory.glob("step-*.txt"))
