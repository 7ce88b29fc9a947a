"""Push runs of a home to MLflow; a failure is one warning, and the next push brings the rest."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ttrain.core.files import exclusive
from ttrain.core.redact import without_user
from ttrain.engine.execution import PipelineRun
from ttrain.store import runs, server_records
from ttrain.store.sweeps import sweep_file
from ttrain.tracking.client import unreachable_message
from ttrain.tracking.mlflow_mirror import ID, NAME, RUNNING, Bound, Mirror
from ttrain.tracking.registered import register, seen_file
from ttrain.tracking.sweeps import tracked_names, tracked_sweep
from ttrain.tracking.tracked_runs import RunContent, id_of, is_tracked
from ttrain.tracking.views import refresh_sweeps, refresh_view

log = logging.getLogger("ttrain")

PUSHED = "ttrain.pushed"  # tag of a completely pushed run: the value of `state_of` at that push
INTERVAL_SECONDS = 3.0  # between two pushes of a run that goes on
SILENT_SECONDS = 10.0  # how long the end of a run waits for an unresponsive MLflow
RETRY_SECONDS = 30.0  # between two pushes while MLflow fails


@dataclass(frozen=True)
class Pushed:
    """Result of the push of a run; `why` is the error, or empty."""

    run: str
    run_id: str | None = None
    why: str = ""


def push(
    home: Path,
    names: Sequence[str] | None = None,
    on_run: Callable[[str], object] = lambda run: None,
    mirror: Mirror | None = None,
) -> list[Pushed]:
    """Push these runs, or all that changed since their last push, oldest first.

    A failure does not stop the others. After it MLflow is opened again.
    """
    if not runs.names(home):
        return []  # and no database is made
    mirror = mirror or Mirror(home)
    done = list[Pushed]()
    try:
        names = waiting(mirror) if names is None else names
    except Exception as error:  # MLflow may raise anything
        return [Pushed(runs.names(home)[0], why=_why(mirror, error))]
    for name in names:
        on_run(name)
        try:
            # One at a time in a home, also among threads: SQLite has one writer (mlflow #20014),
            # and two that see that a run is missing would both create it.
            with exclusive(home / "mlflow" / "push.lock"):
                bound = push_run(mirror, name)
            done.append(Pushed(name, bound.run_id if bound else None))
        except Exception as error:
            done.append(Pushed(name, why=_why(mirror, error)))
    return done


def _why(mirror: Mirror, error: Exception) -> str:
    log.debug("from MLflow", exc_info=error)
    mirror.forget()
    return unreachable_message(mirror.uri, error)


def waiting(mirror: Mirror) -> list[str]:
    """The sweeps and runs that MLflow lacks as they are now, oldest first.

    Without those in progress, and those that were pushed to another MLflow.
    """
    home = mirror.home
    found = mirror.search(
        [one.experiment_id for one in mirror.client.search_experiments()],
        f"tags.`{PUSHED}` != ''",
    )
    pushed = {run.data.tags[ID]: run.data.tags[PUSHED] for run in found}
    lacking = [name for name in tracked_names(home) if pushed.get(name) != state_of(home, name)]
    server = without_user(mirror.uri) if mirror.uri.startswith("http") else ""
    for name in reversed(runs.names(home)):
        state = state_of(home, name)
        record = None if pushed.get(name) == state else runs.read(home, name)
        if record is None or record["outcome"] == "running" or not is_tracked(record):
            continue
        theirs = pushed.get(id_of(record), name)
        noted = record.get("tracking") or {}
        is_elsewhere = noted.get("run_id") and not (noted.get("url") or "").startswith(server)
        # a later run may have continued this tracked run
        is_later = runs.time_in_name(theirs.split(" ")[0]) > runs.time_in_name(name)
        if theirs != state and not is_later and not is_elsewhere:
            lacking.append(name)
    return lacking


def state_of(home: Path, name: str) -> str:
    """The name of a run or sweep, with a number that changes with its record."""
    if (kept := sweep_file(home, name)).exists():
        return f"{name} {kept.stat().st_mtime_ns}"
    record = home / "runs" / f"{name}.json"  # its events only grow
    paths = [record, runs.events_of(record)]
    return f"{name} {sum(path.stat().st_size for path in paths if path.exists())}"


def push_run(mirror: Mirror, name: str) -> Bound | None:
    """Push a sweep, or a run with its stages, versions and aliases. Raises MLflow's errors."""
    home = mirror.home
    state = state_of(mirror.home, name)
    record = runs.read(home, name)
    content = RunContent(home, record, mirror.is_local) if record else None
    run = content.tracked() if content else tracked_sweep(home, name)
    bound = mirror.push(run)
    if bound and run.status != RUNNING:
        if content:
            register(mirror, content, bound)
            refresh_view(mirror, run.experiment, run.tags[NAME])
        else:
            refresh_sweeps(mirror, run.experiment)
        mirror.tag(bound, {PUSHED: state})
        seen_file(home).touch()
    return bound


class Pusher:
    """Pushes a run, or a sweep, every few seconds from its own thread, and once at the end.

    After its first push also earlier runs. Calls `note(tracking=...)` with the place in MLflow.
    """

    def __init__(
        self, home: Path, run: str, note: Callable[..., object] = lambda **values: None
    ) -> None:
        self.home = home
        self.run = run
        self.note = note
        self.error = ""
        self._mirror = Mirror(home)
        self._stop = threading.Event()
        self._is_noted = self._has_warned = False
        self._thread = threading.Thread(target=self._loop, name="tracking", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> bool:
        """Push a last time; give up if MLflow is silent. Returns whether it succeeded."""
        asked = time.monotonic()
        self._stop.set()
        while self._thread.is_alive():
            self._thread.join(0.05)
            if self.error and time.monotonic() - asked > SILENT_SECONDS:
                break
        return not self.error

    def page(self, stage: str | None = None) -> str | None:
        """URL of the run, or of a stage, in MLflow after a push; None if no server displays it."""
        uri = without_user(self._mirror.uri)
        server = server_records.live_server(self.home, "mlflow")
        address = uri.rstrip("/") if uri.startswith("http") else server and server.url
        if address is None:
            return None
        self.push()
        bound = self._mirror.bound.get(id_of(runs.read(self.home, self.run) or {}, stage))
        return f"{address}/{bound.page}" if bound else None

    def _loop(self) -> None:
        has_pushed = is_over = False
        while not is_over:
            is_over = self._stop.is_set()
            self.push()
            if not has_pushed and not self.error:
                has_pushed = True
                push(self.home, mirror=self._mirror)  # which knows the points that it has sent
            self._stop.wait(RETRY_SECONDS if self.error else INTERVAL_SECONDS)

    def push(self) -> None:
        """Push what the run has recorded since the last time."""
        self.error = "".join(one.why for one in push(self.home, [self.run], mirror=self._mirror))
        if self.error and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s; the run goes on, and `ttrain track push` or the next run brings MLflow "
                "up to date",
                self.error,
            )
        bound = self._mirror.bound.get(id_of(runs.read(self.home, self.run) or {"run": self.run}))
        if bound and not self._is_noted:
            self._is_noted = True
            server = without_user(self._mirror.uri)
            url = f"{server.rstrip('/')}/{bound.page}" if server.startswith("http") else None
            self.note(
                tracking={"run_id": bound.run_id, "experiment_id": bound.experiment_id, "url": url}
            )


def track(execution: PipelineRun) -> None:
    if not execution.settings.tracking.enabled or execution.settings.runtime.node_rank:
        return
    pusher = Pusher(execution.store.root, execution.record.run, execution.record.note)
    execution.end_tracking = pusher.finish
    execution.page = pusher.page
    pusher.start()


def push_noted(home: Path, run: str) -> None:
    """Push a run that was changed after its end, such as by a decision."""
    for pushed in push(home, [run]) if is_tracked(runs.read(home, run)) else ():
        if pushed.why:
            log.warning("%s; `ttrain track push` brings MLflow up to date", pushed.why)
