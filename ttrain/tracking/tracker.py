"""One experiment of one MLflow: start runs, and deliver their outboxes, now or when MLflow answers again."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ttrain.core.files import PRIVATE_FILE, JsonDict, JsonObject, read_object, write_json
from ttrain.core.redact import without_user
from ttrain.core.sqlite_files import is_damage
from ttrain.store.runs import read_rows
from ttrain.tracking import client as tracking_client
from ttrain.tracking import outbox, runs
from ttrain.tracking.calls import RefusedError, Tags, attempt, is_out_of_use, is_refusal, run_name
from ttrain.tracking.client import silence, tracking_uri
from ttrain.tracking.database import REPAIR
from ttrain.tracking.delivery import DELIVERY_TYPES, FINISHED, artifact_of, log_result
from ttrain.tracking.outbox import Entry
from ttrain.tracking.runs import BEGUN, AnyRun, NullRun, NullStore, TrackedRun, TrackingStore, clean_tags
from ttrain.tracking.uploads import UploadProgress, local_path

log = logging.getLogger("ttrain")

RETRY_PAUSE_SECONDS = 2.0  # before a silent server is tried again; doubled each time, up to half a minute
TAKE_SECONDS = 20.0  # to wait for another process that delivers what an earlier one left of a run that continues here
UPLOADS_STALL_SECONDS = 60.0  # without a byte: after this the end of a run waits no longer for uploads


class MlflowStore(TrackingStore):
    """One experiment of one MLflow, shared by threads; opened by `open_store`, to be closed."""

    def __init__(self, uri: str, home: Path, experiment: str = "") -> None:
        """`experiment`: of new runs; none to read, or to deliver what others left."""
        super().__init__(uri, home, experiment)
        self.progress = UploadProgress()
        self.counts = Counter[str]()  # delivered entries by kind; "lost": what can never be delivered
        self._open: dict[str, TrackedRun] = {}  # by outbox id
        self._continued = set[str]()  # ids of outboxes that runs of this process continue: threads let go of them
        self._opening = threading.RLock()
        self._delivers_orphans = self._upload_failed = self._closed = False
        pause = RETRY_PAUSE_SECONDS if self.is_http else 0.2
        self._retry_thread = RetryThread("tracking", partial(self._deliver_all, uploads=False), pause)
        self._upload_thread = RetryThread("tracking-uploads", partial(self._deliver_all, uploads=True), pause)

    def start_run(
        self,
        name: str,
        *,
        run_id: str | None = None,
        identity: str | None = None,
        parent: AnyRun | None = None,
        parent_run_id: str | None = None,
        tags: Tags,
        params: Mapping[str, object],
        started: float | None = None,
        keeps_files: bool = False,
    ) -> TrackedRun:
        """Start a run, or continue the one with MLflow's `run_id` or with the `identity` that it had here before.

        `started`: in seconds since 1970, if not now. `keeps_files`: the files of the run's artifact go to MLflow, also if
        its process is killed before that.
        With a silent server, the run is created later, and its `id` is None until then.
        """
        run_tags = clean_tags({**tags, **({runs.PARENT: parent_run_id} if parent_run_id else {})})
        run_info: JsonDict = {
            "name": run_name(name), "tags": run_tags, "parent_run_id": parent_run_id, "keeps_files": keeps_files,
            "parent": parent.identity if parent else None, **({"started": started} if started is not None else {}),
        }  # fmt: skip
        run = self._open_run(identity, run_id, run_info, parent if isinstance(parent, TrackedRun) else None)
        self.call_for_run(run, f"starting the run {name}")
        if run.is_again:
            run.enqueue("continued", values=run_tags)
        run.log_params(params)
        return run

    def run_of(self, run_id: str) -> TrackedRun:
        """Open an existing run of MLflow to log more; if it is gone, nothing is logged."""
        run_info = {"name": run_id, "tags": {}, "ended": True, "is_made": True}
        run = self._open_run(None, run_id, run_info, None)
        if self.caller.is_silent:
            self.caller.probe()
        self.call_for_run(run, f"opening the run {run_id}")
        return run

    def register_model(self, name: str, *, run: AnyRun, artifact_path: str, tags: Tags, **descriptions: str) -> str | None:
        """Register the files under the run's `artifact_path` as a model; return the version, None as long as it waits.

        A version with the same tags `ttrain.key` and `ttrain.content` is returned instead of a new one. `descriptions`:
        `description` for the version, `about` for the registered model.
        """
        if isinstance(run, NullRun):
            return None
        return run.enqueue("register", name=name, path=artifact_path, tags=dict(tags), **descriptions).answer

    def register_models(self, name: str, *, run: AnyRun, models: Sequence[JsonObject], **data: Any) -> str | None:
        """Register this set of models as a version of `name` (`model_sets.tags_of`); None as long as it waits.

        Models that are not registered yet are registered from this run.

        Of each model: name, stage, tags, artifact_path, `path` of its files, None if they are not here, `description`
        and `about` as in `register_model`. `data`: `run_name`, `keys` by stage, `metrics`, and the same two.
        """
        if isinstance(run, NullRun):
            return None
        models = [{**model, "path": model["path"] and self.relative(Path(model["path"]))} for model in models]
        entry = run.enqueue("register_models", name=name, models=models, **data)
        self.finish_uploads()
        return entry.answer

    def deliver_soon(self, run: TrackedRun, entry: Entry) -> None:
        """Deliver the entry now if that is quick; files that go over the network are uploaded in the background."""
        if not DELIVERY_TYPES[entry.kind].uploads:
            self.deliver(run)
        elif run.is_bound and run.artifact_uri and local_path(run.artifact_uri):
            self.deliver(run, uploads=True)
        else:
            self._upload_thread.wake()

    def deliver(self, run: TrackedRun, *, uploads: bool = False, again: bool = False) -> bool:
        """Deliver the run's outbox to MLflow, in order; False if something is left, which a thread retries.

        An entry that fails while others succeed is skipped until it is tried `again`. With a server, this does not wait
        for another thread that delivers this run.
        """
        lock = run.upload_lock if uploads else run.lock
        if not lock.acquire(blocking=not self.is_http):
            return self._retry_later(uploads)
        try:
            if again:
                run.failed -= {entry.number for entry in run.waiting() if DELIVERY_TYPES[entry.kind].uploads == uploads}
            while entry := self._next(run, uploads):
                if self.call_for_run(run, DELIVERY_TYPES[entry.kind].label, partial(self._deliver_entry, run, entry)):
                    run.outbox.mark_delivered(entry)
                else:
                    self._upload_failed |= uploads
                    if self.caller.is_silent:
                        return self._retry_later(uploads)
                    run.failed.add(entry.number)
            return not run.failed or self._retry_later(uploads)
        finally:
            lock.release()

    def call_for_run(self, run: TrackedRun, label: str, action: Callable[[], object] = lambda: None) -> bool:
        """Make one call about a run, after creating the run in MLflow if needed; False if it has to be retried.

        A call that MLflow refuses is dropped with a warning.
        """
        if self.caller.is_silent:
            return self._retry_later(False)
        _, failure = attempt(partial(runs.ensure_run, run))
        _, error = (None, failure) if failure else attempt(action)
        if error and not failure and is_refusal(error) and attempt(partial(runs.active_run, run))[0]:
            _, error = attempt(action)  # now that its experiment is restored
        if error is None:
            return True
        refused = isinstance(error, RefusedError) or (not failure and (is_refusal(error) or type(error) is ValueError))
        is_silent = not refused and not isinstance(error, OSError)  # a disk is not a server
        self.caller.is_silent = is_out_of_use(error) or (self.is_http and is_silent)
        self.caller.warn(label, error)
        if refused:
            self.counts["lost"] += 1
        else:
            self._retry_later(False)
        return refused

    def on_upload(self, on_progress: Callable[[int, int], object]) -> None:
        """Set a callback `(bytes done, bytes in total)`, called a few times a second while files go over the network."""
        self.progress.on_progress = on_progress

    def finish_uploads(self, seconds: float = UPLOADS_STALL_SECONDS) -> None:
        """Wait for uploads, as long as bytes are sent and nothing fails."""
        self.progress.moved, self._upload_failed = time.monotonic(), False
        while self._has_uploads() and time.monotonic() - self.progress.moved < seconds:
            if self.caller.is_silent or self._upload_failed:
                return
            self._upload_thread.wake()
            time.sleep(0.02)

    def deliver_orphans(self) -> None:
        """From now on, also deliver outboxes of processes that were killed, or that met a silent server."""
        self._delivers_orphans = True
        outbox.remove_unfinished(self.home)
        if outbox.list_outboxes(self.home):
            self._upload_thread.wake()

    def deliver_orphan(self, directory: Path, *, uploads: bool = True, elsewhere: bool = False) -> bool | None:
        """Deliver an outbox that an ended process left; return whether all of it arrived, None if a process still has it or
        if it is for another MLflow. `elsewhere`: also that of a process of another machine.
        """
        if not elsewhere and not outbox.may_be_taken(directory):
            return None
        if read_object(directory / outbox.RUN).get("tracker") != self.tracker:
            return None  # before it is taken: an outbox without entries is removed when it is released
        changed = outbox.last_change(directory)
        box = outbox.take(directory)
        if box is None:
            return None
        run = TrackedRun(self, box)
        run.is_again = True
        try:
            if run.id is None:
                box.run_info["doubtful"] = True
            if not box.run_info.get("ended"):
                artifact = artifact_of(self.home, box.run_info.get("tags", {}))
                if artifact:  # killed after it was published
                    log_result(run, artifact)
                    if box.run_info.get("keeps_files"):
                        run.log_directory(artifact.path, artifact.stage)
                box.update_run_info(ended=True)
                box.add("end", status=FINISHED if artifact else "KILLED", time=int(1000 * changed))
            if self.call_for_run(run, f"opening the run {box.run_info.get('name')}"):
                self._add_followed_rows(run)
            done = self.deliver(run, again=True)
            return done and (not uploads or self.deliver(run, uploads=True, again=True))
        finally:
            note_run_id(self.home, run)
            box.close()

    def _add_followed_rows(self, run: TrackedRun) -> None:
        """Add the rows of the curves that a process followed until it was killed; of those that were never begun nothing.

        Many stages write none, and the first sample of the machine comes after ten seconds.
        """
        for entry in [entry for entry in run.outbox.entries if entry.kind == "follow"]:
            places = [self.home / location for location in entry.data["places"]]
            path = next((path for path in places if path.is_file()), None)
            if path is not None:
                run.add_rows(read_rows(path))
            elif BEGUN in entry.parts:
                gone = RefusedError(f"the curve is gone: none of {', '.join(map(str, places))} exists")
                self.caller.warn(DELIVERY_TYPES["rows"].label, gone)
                self.counts["lost"] += 1
            run.outbox.mark_delivered(entry)

    def close(self) -> int:
        """Deliver what one more try can, and release the outboxes; return the number of entries left."""
        runs = list(self._open.values())
        self.finish_uploads()
        self._retry_thread.stop(tracking_client.PROBE_SECONDS + 1 if self.caller.is_silent else 30.0)
        self._upload_thread.stop(tracking_client.PROBE_SECONDS + 1)
        self._closed = True
        for run in runs:
            if not self.caller.is_silent:
                self.deliver(run, again=True)
        undelivered = [entry for run in runs for entry in run.waiting()]
        lost = sum(len(run.waiting()) for run in runs if not run.outbox.is_kept)
        for run in runs:
            run.outbox.close()
            self._open.pop(run.outbox.id, None)
        if lost:
            log.warning(
                "MLflow at %s did not receive %d entries of this run, and they could not be saved: they are lost there; "
                "what ttrain shows of the run is in the home",
                without_user(self.uri), lost,
            )  # fmt: skip
        elif undelivered:
            how = REPAIR if is_damage(self.caller.last_error) else "the next run delivers them, or: ttrain track sync"
            log.warning(
                "MLflow at %s has yet to receive %d entries of this run; %s", without_user(self.uri), len(undelivered), how
            )
        return len(undelivered)

    def _open_run(
        self, identity: str | None, run_id: str | None, run_info: JsonDict, parent: TrackedRun | None
    ) -> TrackedRun:
        """The run with its outbox: the one that is open, the one that an earlier process left, or a new one."""
        identity = identity if identity and outbox.ID.fullmatch(identity) else ""
        with self._opening:
            run = self._open.get(identity)
            if run is None:
                self._continued.add(identity)
                box = outbox.take(self.home / outbox.FOLDER / identity, TAKE_SECONDS) if identity else None
                run_info = {"ended": False, **run_info}
                tracker_info = {"tracker": self.tracker, "experiment": self._experiment}
                dropped = {"follow"}  # the process that continues the run follows its files again
                if box is None:  # or another process holds it, and this becomes another run
                    self._continued.discard(identity)
                    run_info["doubtful"] = bool(identity) and run_id is None
                    box = outbox.create(self.home, id=identity, run_id=run_id, **tracker_info, **run_info)
                else:
                    if box.run_info.get("tracker") != self.tracker:  # this one has no such run, no rows before these
                        box.run_info |= {"run_id": None, **tracker_info}
                        dropped.add("rows")
                    run_info["started"] = box.run_info["started"]
                    box.update_run_info(**run_info, doubtful=box.run_info.get("run_id") is None)
                for entry in list(box.entries):
                    if entry.kind in dropped:
                        box.mark_delivered(entry)
                run = self._open[box.id] = TrackedRun(self, box)
            else:
                run.outbox.update_run_info(ended=False, parent=run_info.get("parent"))
            run.is_again = bool(identity or run_id)
            run.parent = parent
            return run

    def _deliver_all(self, *, uploads: bool) -> bool:
        """Deliver all open runs, then what earlier processes left; False if something is left."""
        if self.caller.is_silent and self.caller.probe() is not None:
            return False
        runs = list(self._open.values())
        runs = runs[::-1] if uploads else runs  # a run's models are registered from its stages' runs, which came after it
        done = [self.deliver(run, uploads=uploads, again=True) for run in runs]
        if uploads and self._delivers_orphans:  # small entries of all of them first
            ordered = outbox.delivery_order(outbox.list_outboxes(self.home))
            done += [self.deliver_orphan(directory, uploads=files) is not False for directory, files in ordered]
        return all(done)

    def _next(self, run: TrackedRun, uploads: bool) -> Entry | None:
        """The next entry to deliver; a curve's points only after all earlier ones, whose steps they pass. None also where
        what an earlier process left is continued in this one, or is left to the next store."""
        if (self._closed or run.outbox.id in self._continued) and self._open.get(run.outbox.id) is not run:
            return None
        waiting = [entry for entry in run.waiting() if DELIVERY_TYPES[entry.kind].uploads == uploads]
        has_failed = any(entry.kind == "rows" and entry.number in run.failed for entry in waiting)
        ready = (entry for entry in waiting if entry.number not in run.failed and not (has_failed and entry.kind == "rows"))
        return next(ready, None)

    def _deliver_entry(self, run: TrackedRun, entry: Entry) -> None:
        entry.answer = DELIVERY_TYPES[entry.kind].deliver(run, entry)
        self.counts[entry.kind] += 1

    def _has_uploads(self) -> bool:
        """Whether an open run has undelivered uploads."""
        return any(DELIVERY_TYPES[entry.kind].uploads for run in list(self._open.values()) for entry in run.waiting())

    def _retry_later(self, uploads: bool) -> bool:
        """Wake the thread that retries; return False."""
        (self._upload_thread if uploads else self._retry_thread).wake()
        return False


def note_run_id(home: Path, run: AnyRun) -> None:
    """Write the MLflow id that a pipeline run got after its end into its record."""
    name = run.outbox.run_info.get("name") if isinstance(run, TrackedRun) and run.id else ""
    path = home / "runs" / f"{Path(str(name)).name}.json"
    record = read_object(path) if name else {}
    if record and (record.get("tracking") or {}).get("identity") == run.identity:
        with contextlib.suppress(OSError):
            write_json(path, {**record, "tracking": {**record["tracking"], "run_id": run.id}}, PRIVATE_FILE)


AnyStore = MlflowStore | NullStore


def open_reader(home: Path) -> MlflowStore:
    """Open the tracker for reading, without creating an experiment. Raises MLflow's errors if it cannot be opened."""
    home = home.resolve()
    silence()
    store = MlflowStore(tracking_uri(home), home)
    _ = store.client
    return store


LONGEST_SECONDS = 30.0


class RetryThread:
    """Calls `work` when woken; if it returns False, again after a pause that doubles up to half a minute."""

    def __init__(self, name: str, work: Callable[[], bool], pause: float) -> None:
        self._work, self._pause = work, pause
        self._woken, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._starting = threading.Lock()

    def wake(self) -> None:
        """Wake the thread, starting it at the first call."""
        self._woken.set()
        with self._starting:
            if self._thread.ident is None and not self._stopping.is_set():
                self._thread.start()

    def stop(self, seconds: float) -> None:
        """Stop after the current call of `work`; wait for it at most this long."""
        with self._starting:
            self._stopping.set()
            self._woken.set()
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        while self._woken.wait() and not self._stopping.is_set():
            self._woken.clear()
            pause = self._pause
            while not self._stopping.is_set() and not self._done():
                self._stopping.wait(pause)
                pause = min(2 * pause, LONGEST_SECONDS)

    def _done(self) -> bool:
        done, _ = attempt(self._work)  # a thread that dies would leave everything to the next command
        return bool(done)
