"""Push runs of a home to MLflow: `push` for some, and `Pusher` for a run that goes on, from a thread of its own.

The pipeline's result does not depend on MLflow, so a failure is one warning; the home has everything, and the next run or
`ttrain track push` brings what is missing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ttrain.config.training import MODEL_STAGES
from ttrain.core.files import PRIVATE_FILE, JsonDict, Taken, exclusive, read_json, refuse, write_json
from ttrain.core.redact import without_user
from ttrain.core.sqlite_files import is_damage
from ttrain.engine.execution import PipelineRun
from ttrain.store import runs, server_records
from ttrain.store.registry import ModelSet, Registry, Version
from ttrain.tracking import registration
from ttrain.tracking.book import Book, noted_bytes
from ttrain.tracking.client import cannot_be_asked, is_installed, own_uri, rename_aside, tracking_uri
from ttrain.tracking.mirror import Bound, Mirror, TrackedRun, page_of
from ttrain.tracking.registered import (
    Registration,
    facts_of,
    identity_of,
    number_of,
    push_aliases,
    register,
    take_over_champion,
)
from ttrain.tracking.tracked_runs import RunContent, is_tracked
from ttrain.tracking.views import NAME, refresh_view

log = logging.getLogger("ttrain")

SWEEP = "tracked.json"  # in the folder of a sweep: what trackers show of it
SWEEPS = f"sweeps/*/{SWEEP}"
INTERVAL_SECONDS = 3.0  # between two pushes of a run that goes on
SILENT_SECONDS = 10.0  # without an answer: after this the end of a run waits no longer
RETRY_SECONDS = 30.0  # between two tries of an MLflow that does not answer

_one_at_a_time = threading.RLock()  # SQLite has one writer; threads without a lock met "database is locked" (mlflow #20014)


@dataclass(frozen=True)
class Pushed:
    """What became of the push of a run: `why` says what failed, or is empty."""

    run: str
    run_id: str | None = None
    why: str = ""

    def to_json(self) -> JsonDict:
        """The run as `track push --json` prints it."""
        return {"run": self.run, "run_id": self.run_id, "pushed": not self.why, "why": self.why}


def push(home: Path, names: Sequence[str] | None = None, on_run: Callable[[str], object] = lambda run: None) -> list[Pushed]:
    """Push these runs, or all that changed since their last push, oldest first; one that fails ends nothing but itself."""
    home, uri = home.resolve(), tracking_uri(home.resolve())
    if not runs.names(home):
        return []  # and no database is made
    try:
        mirror = Mirror(home)
    except Exception as error:  # MLflow may raise anything
        return [Pushed(name, why=cannot_be_asked(uri, error)) for name in (waiting(home) if names is None else names)]
    done = [] if names is not None else list(_push_sweeps(mirror))
    for name in waiting(home) if names is None else names:
        on_run(name)
        try:
            with _one_at_a_time, _lock(home):
                bound = push_run(mirror, name)
            done.append(Pushed(name, bound.run_id if bound else None))
        except Exception as error:
            log.debug("from MLflow", exc_info=True)
            if mirror.is_own and is_damage(error):
                rename_aside(home, error)
                return push(home, on_run=on_run)  # all runs, to a new database
            mirror.forget()
            done.append(Pushed(name, why=cannot_be_asked(uri, error)))
    return done


def _push_sweeps(mirror: Mirror) -> Iterator[Pushed]:
    """Push the sweeps that MLflow does not have as they are: before their trials, which are shown below them."""
    book = Book(mirror.home, mirror.uri)
    for path in sorted(mirror.home.glob(SWEEPS)):
        noted = f"{path.parent.name} {path.stat().st_mtime_ns}"
        if noted in book.runs:
            continue
        try:
            with _one_at_a_time, _lock(mirror.home):
                bound = mirror.push(TrackedRun(**read_json(path)))
            book.note_run(noted)
            yield Pushed(path.parent.name, bound.run_id if bound else None)
        except Exception as error:
            mirror.forget()
            yield Pushed(path.parent.name, why=cannot_be_asked(mirror.uri, error))


def waiting(home: Path) -> list[str]:
    """The runs that have changed since their last push, oldest first, but for those that are in progress."""
    book = Book(home, tracking_uri(home))
    records = {name: runs.read(home, name) for name in reversed(book.lacking(runs.names(home)))}
    book.note_untracked([name for name, record in records.items() if not is_tracked(record)])
    return [name for name, record in records.items() if record and is_tracked(record) and record["outcome"] != "running"]


def push_run(mirror: Mirror, name: str, without: Iterable[str] = ()) -> Bound | None:
    """Push one run of the home with its stages, registered versions and aliases; `without` some stages. Raises MLflow's
    errors."""
    home, book = mirror.home, Book(mirror.home, mirror.uri)
    size = noted_bytes(home, name)
    record = runs.read(home, name)
    if record is None:
        return None
    content = RunContent(home, record, mirror.is_local, frozenset(without))
    run = content.tracked()
    bound = mirror.push(run)
    if bound is None:
        book.note_run(name, noted=size)
        return None
    if content.has_ended:
        _register(mirror, content, bound)
        refresh_view(mirror, run.experiment, run.tags[NAME])
    stages = {stage.tags["ttrain.stage"]: mirror.bound[stage.id].run_id for stage in run.stages if stage.id in mirror.bound}
    earlier = book.runs.get(name, {}).get("stages", {})
    book.note_run(name, run_id=bound.run_id, experiment_id=bound.experiment_id, stages={**earlier, **stages})
    if content.has_ended:
        book.note_run(name, noted=size)
        book.note_seen()
    return bound


def _register(mirror: Mirror, content: RunContent, bound: Bound) -> None:
    """Bring the versions that the run registered up to date, and the aliases of its sets."""
    numbers: dict[str, str] = {}
    for version in content.versions():
        if isinstance(version, ModelSet):
            numbers[version.name] = register(mirror, _set(content, version, numbers, bound))
        elif version.run == content.record["run"] or (number := number_of(mirror, version)) is None:
            numbers[version.name] = register(mirror, _model(mirror, content, version, bound))
        else:
            numbers[version.name] = number  # another run's, which describes it
    for name in sorted(Registry(content.home).read()["sets"]):
        take_over_champion(mirror, name)  # before the home's own alias replaces it
    for name in {model_set.name for model_set in content.sets}:
        push_aliases(mirror, Registry(content.home), name)


def _model(mirror: Mirror, content: RunContent, version: Version, bound: Bound) -> Registration:
    """A model as MLflow shows it; its files are with its stage's run, or else go to the pipeline's."""
    model = content.registered(content.artifacts[version.stage])
    texts, files = content.model_files(version.stage)
    holder = mirror.bound.get(content.stage_id(version.stage)) if version.stage in content.made else None
    if holder is None:
        mirror.place_files(texts, files, bound)
    opens = any(path.endswith("/MLmodel") for path in texts)
    words = model.descriptions(opens=opens, note=str(content.record.get("note") or ""))
    source = f"{(holder or bound).artifact_uri}/{model.path}"
    return Registration(version.name, identity_of(version), source, (holder or bound).run_id, tags=model.tags, **words)


def _set(content: RunContent, model_set: ModelSet, numbers: dict[str, str], bound: Bound) -> Registration:
    """A set as MLflow shows it: it opens as the last of its models, and is referenced, not copied."""
    last = model_set.last
    source = f"models:/{last.name}/{numbers[last.name]}" if last and last.name in numbers else bound.artifact_uri
    stages = [stage for stage in ("tokenizer", *MODEL_STAGES) if stage in model_set.members and stage in content.artifacts]
    models = {model_set.members[stage].name: content.artifacts[stage] for stage in stages}  # the last one is judged
    note, evaluation = str(content.record.get("note") or ""), content.artifacts.get("evaluate")
    intervals = evaluation.result.get("intervals", {}) if evaluation else {}
    text = registration.of_set(model_set.name, model_set.run, models, model_set.metrics, intervals=intervals, note=note)
    if table := model_set.decided.get("table"):
        text += f"\n\n## Decision\n\n{table}"
    about = registration.SETS.format(name=model_set.name)
    return Registration(model_set.name, identity_of(model_set), source, bound.run_id, text, about, facts_of(model_set))


def _lock(home: Path, *, waits: bool = True) -> Any:
    """One push at a time in a home: two that see that a run is missing would both create it."""
    return exclusive(home / "mlflow" / "push.lock", None if waits else refuse)


@dataclass
class Pusher:
    """Pushes a run every few seconds from a thread of its own, before that what earlier runs left, and once at the end.

    `show(bound)` is called when the run is in MLflow. `content` makes what is pushed, if it is no run of the home but a
    sweep; it is kept in `kept`, so that a push after its end finds it.
    """

    home: Path
    run: str
    show: Callable[[Bound], object] = lambda bound: None
    content: Callable[[], TrackedRun] | None = None
    kept: Path | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _is_at_end: bool = False
    _mirror: Mirror | None = None
    _is_shown: bool = False
    _warned: bool = False
    _pushed: dict[str, Any] = field(default_factory=dict)  # by stage: its entry as it was pushed last, once it had ended
    error: str = ""

    def start(self) -> None:
        """Begin to push, if MLflow is installed."""
        self._thread = threading.Thread(target=self._loop, name="tracking", daemon=True)
        if is_installed():
            self._thread.start()
        else:
            log.info("MLflow is not installed, so nothing is tracked; to track runs: pip install mlflow")

    def finish(self) -> bool:
        """Push for the last time; waits as long as MLflow answers. Returns whether MLflow has everything.

        The home's own database always answers, though making it takes ten seconds on a slow disk.
        """
        if not self._thread.is_alive():  # MLflow is not installed
            return False
        self._is_at_end = True
        self._stop.set()
        asked, uri = time.monotonic(), tracking_uri(self.home)
        while self._thread.is_alive():
            self._thread.join(0.05)
            answered, patience = (self._mirror.answered, self._mirror.patience) if self._mirror else (0.0, 0.0)
            if uri != own_uri(self.home) and time.monotonic() - max(asked, answered) > SILENT_SECONDS + patience:
                self._warn(f"MLflow at {without_user(uri)} does not answer")
                return False
        if self.error:
            self._warn(self.error)
        elif self.content is None:
            Book(self.home, uri).note_pushed(self.run)
        return not self.error

    def page(self, stage: str | None = None) -> str | None:
        """URL of the run in MLflow, or of a stage's, after pushing it; None if no server displays it."""
        uri, server = without_user(tracking_uri(self.home)), server_records.live_server(self.home, "mlflow")
        address = uri.rstrip("/") if uri.startswith("http") else server and server.url
        if address is None:
            return None
        self._try()
        notes = Book(self.home, tracking_uri(self.home)).runs.get(self.run, {})
        run_id = notes.get("stages", {}).get(stage) if stage else notes.get("run_id")
        return f"{address}/{page_of(notes['experiment_id'], run_id)}" if run_id else None

    def _loop(self) -> None:
        pause = 0.0
        while not self._stop.wait(pause):
            pause = INTERVAL_SECONDS if self._try() else RETRY_SECONDS
        self._try(is_last=True)

    def _try(self, *, is_last: bool = False) -> bool:
        self.error = ""
        try:
            with _one_at_a_time:
                self._push()
        except Taken:  # another process pushes at this moment
            return True
        except Exception as error:  # MLflow may raise anything
            log.debug("from MLflow", exc_info=True)
            self.error = cannot_be_asked(tracking_uri(self.home), error)
            if self._mirror and self._mirror.is_own and is_damage(error):
                rename_aside(self.home, error)
                self._mirror = None
            elif self._mirror:
                self._mirror.forget()  # so that the next push asks what has arrived
            self._pushed.clear()
            if not is_last:
                self._warn(self.error)
            return False
        return True

    def _push(self) -> None:
        is_first = self._mirror is None
        if self._mirror is None:
            self._mirror = Mirror(self.home)
        with _lock(self.home, waits=self._is_at_end):
            bound = self._push_run() if self.content is None else self._mirror.push(self._kept_content(self.content))
        if bound and not self._is_shown:
            self._is_shown = True
            self.show(bound)
        if is_first and self.content is None:
            self._push_earlier(self._mirror)

    def _kept_content(self, content: Callable[[], TrackedRun]) -> TrackedRun:
        run = content()
        if self.kept:
            write_json(self.kept, asdict(run), PRIVATE_FILE)
        return run

    def _push_earlier(self, mirror: Mirror) -> None:
        """Push what earlier runs left; one that fails waits for the next run, or for `ttrain track push`, which says why."""
        for earlier in waiting(self.home):
            try:
                with _lock(self.home, waits=False):
                    push_run(mirror, earlier)
            except Exception:
                log.debug("pushing %s", earlier, exc_info=True)
                mirror.forget()
                return

    def _push_run(self) -> Bound | None:
        assert self._mirror is not None, "MLflow is open"
        record = runs.read(self.home, self.run) or {}
        ended = {entry["name"]: entry for entry in record.get("stages", ()) if entry["outcome"] != "running"}
        same = [name for name, entry in ended.items() if self._pushed.get(name) == entry]
        is_whole = self._is_at_end and record.get("outcome") != "running"
        bound = push_run(self._mirror, self.run, () if is_whole else same)
        self._pushed = ended
        return bound

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s; the run goes on, and `ttrain track push` or the next run brings MLflow up to date", text)


def track(execution: PipelineRun) -> None:
    """Push a run that begins, until its end, if its settings say so."""
    if not execution.settings.tracking.enabled or execution.settings.runtime.node_rank:
        return
    home = execution.store.root

    def note(bound: Bound) -> None:
        """Note where MLflow has the run."""
        uri = without_user(tracking_uri(home))
        url = f"{uri.rstrip('/')}/{bound.page}" if uri.startswith("http") else None
        noted = {"run_id": bound.run_id, "experiment_id": bound.experiment_id, "url": url}
        execution.record.note(tracking=noted)

    pusher = Pusher(home, execution.record.run, note)
    execution.tracker = pusher
    pusher.start()


def push_noted(home: Path, run: str) -> None:
    """Push a run that something was noted about after its end, such as a decision; a failure is a warning."""
    for pushed in push(home, [run]):
        if pushed.why:
            log.warning("%s; `ttrain track push` brings MLflow up to date", pushed.why)
