"""One MLflow run: its curves, figures, parameters and files, first written to its outbox, then delivered to MLflow."""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrain.core.files import read_json
from ttrain.core.redact import masked, without_user
from ttrain.core.text import is_number
from ttrain.store.runs import MetricRow
from ttrain.tracking import outbox
from ttrain.tracking.calls import RefusedError, Tags, clean, code_of, create_if_missing, is_refusal, plain
from ttrain.tracking.calls import artifact_path as checked
from ttrain.tracking.client import MlflowCaller
from ttrain.tracking.database import artifacts_of, database_of, open_client
from ttrain.tracking.outbox import Entry, Outbox

if TYPE_CHECKING:
    from ttrain.tracking.datasets import DataInput


log = logging.getLogger("ttrain")

MetricPoint = tuple[str, float, int, int]  # name, value, milliseconds since 1970, step

BEGUN = "begun"  # part of a followed curve's entry, once the curve has a row

POINTS_PER_ENTRY = 10_000  # of the outbox

VALUE_CHARACTERS = 6000  # of a parameter, by MLflow's rule


class TrackingStore(ABC):
    """One experiment of one MLflow, as its runs need it: access to MLflow, and the order of deliveries."""

    progress: Any  # `uploads.UploadProgress`, which imports this module

    def __init__(self, uri: str, home: Path, experiment: str) -> None:
        self.uri, self.home = uri, home
        self.caller = MlflowCaller(uri, is_own=self.tracker == "")
        self.is_http, self.lock = self.caller.is_http, self.caller.lock
        self._experiment, self._experiment_ids = experiment, dict[str, str]()
        # A server chooses the artifact root itself; everything else would write below the working directory
        self._place = None if self.is_http or uri.startswith(("databricks", "uc")) else artifacts_of(home)

    @cached_property
    def client(self) -> Any:
        """MLflow's client, opened when it is first used. Raises MLflow's errors."""
        return open_client(self.uri, self.home)

    @abstractmethod
    def deliver(self, run: TrackedRun) -> bool:
        """Deliver the run's outbox, but for what goes over the network; False if something is left."""

    @abstractmethod
    def deliver_soon(self, run: TrackedRun, entry: Entry) -> None:
        """Deliver the entry now if that is quick, else in the background."""

    def experiment_id(self, name: str | None = None) -> str:
        """Id of the experiment, which is created or restored if needed. Raises MLflow's errors."""
        name = name or self._experiment
        if name not in self._experiment_ids:
            experiment = self.client.get_experiment_by_name(name)
            if experiment is None:
                create_if_missing(partial(self.client.create_experiment, name, self._place))
                experiment = self.client.get_experiment_by_name(name)
            if experiment.lifecycle_stage == "deleted":
                self.client.restore_experiment(experiment.experiment_id)  # MLflow lets no other experiment have its name
            # MLflow's pages open on training runs, not on its pages for agents and traces.
            self.client.set_experiment_tag(experiment.experiment_id, "mlflow.experimentKind", "custom_model_development")
            self._experiment_ids[name] = str(experiment.experiment_id)
        return self._experiment_ids[name]

    def forget_experiments(self) -> None:
        """Clear the cached experiment ids: the experiment of a new run is gone, or the database was replaced."""
        self._experiment_ids.clear()

    def relative(self, path: Path) -> str:
        """A path for an outbox, to be joined to the home: relative to it, as it may be moved meanwhile, or absolute."""
        path = path.absolute()
        return str(path.relative_to(self.home)) if path.is_relative_to(self.home) else str(path)

    @property
    def tracker(self) -> str:
        """This MLflow's name in outboxes: "" for the home's own, which moves with the home; without a password."""
        return "" if self.uri == f"sqlite:///{database_of(self.home)}" else without_user(self.uri)


class TrackedRun:
    """One MLflow run, created by `MlflowStore`. Until it is in MLflow, `id`, `artifact_uri`, `page` and `url` are None."""

    def __init__(self, store: TrackingStore, box: Outbox, parent: TrackedRun | None = None) -> None:
        self.store, self.outbox, self.parent = store, box, parent
        self.id: str | None = box.run_info.get("run_id")
        self.artifact_uri: str | None = None
        self.page: str | None = None  # relative to any server that shows this store
        self.is_bound = False
        self.is_again = False  # it was started before: MLflow may have it already
        self.failed: set[int] = set()  # numbers of entries that are not retried at once
        self.steps: dict[str, int] = {}
        self.params: dict[str, str] = {}
        self.values: dict[str, float] = {}
        self.lock, self.upload_lock = threading.RLock(), threading.RLock()  # for deliveries of this run, and for its uploads
        self._adding = threading.Lock()
        self._added: dict[str, int] = {}  # the last step of each metric in the outbox
        for entry in box.entries:
            for key, _, _, step in entry.data.get("points", ()):
                self._added[key] = max(step, self._added.get(key, -1))

    @property
    def identity(self) -> str:
        """Id of the outbox, by which this run is found again, also before it is in MLflow."""
        return self.outbox.id

    @property
    def url(self) -> str | None:
        """URL of the run's page, if the tracker is a server."""
        return f"{without_user(self.store.uri).rstrip('/')}/{self.page}" if self.store.is_http and self.page else None

    def bind(self, entity: Any) -> None:
        """Take over MLflow's state of the run. Its last step of each metric is right even after a kill during a send."""
        self.id, self.artifact_uri = entity.info.run_id, entity.info.artifact_uri
        self.page = f"#/experiments/{entity.info.experiment_id}/runs/{self.id}"
        self.params, self.values = dict(entity.data.params), dict(entity.data.metrics)
        for metric in entity.data.to_proto().metrics:
            self.steps[metric.key] = max(metric.step, self.steps.get(metric.key, -1))
        self.is_bound = True

    def log_metrics(self, rows: Iterable[MetricRow]) -> bool:
        """Log rows of `metrics.jsonl`; a step that a metric has already passed is not logged again. False if some wait."""
        if self.add_rows(rows):
            self.store.deliver(self)
        return not self.rows_wait

    def add_rows(self, rows: Iterable[MetricRow]) -> bool:
        """Write rows into the outbox, as `log_metrics` does, without delivering them; False if nothing in them is new."""
        with self._adding:
            points = []
            for point in points_of(rows):
                key, step = point[0], point[3]
                if step > max(self.steps.get(key, -1), self._added.get(key, -1)):
                    self._added[key] = step
                    points.append(point)
            for first in range(0, len(points), POINTS_PER_ENTRY):
                self.outbox.add("rows", points=points[first : first + POINTS_PER_ENTRY])
        return bool(points)

    @property
    def rows_wait(self) -> bool:
        """Whether rows are in the outbox that MLflow has not accepted yet."""
        return any(entry.kind == "rows" for entry in list(self.outbox.entries))

    def log_summary(self, values: Mapping[str, float]) -> None:
        """Log metrics of the whole run, at step 0; without those that the run has already."""
        finite = {key: value for key, value in _values_of({"metrics": values}) if math.isfinite(value)}
        if finite:
            self.enqueue("summary", values=finite, time=int(1000 * time.time()))

    def log_params(self, params: Mapping[str, object]) -> None:
        """Log parameters, without secrets; one that the run already has keeps its value: MLflow's cannot change."""
        waiting = {key for entry in self.waiting() if entry.kind == "params" for key in entry.data["values"]}
        values = {clean(key): plain(value)[:VALUE_CHARACTERS] for key, value in masked(params).items()}
        if fresh := {key: value for key, value in values.items() if key not in waiting}:
            self.enqueue("params", values=fresh)

    def set_tags(self, tags: Tags) -> None:
        """Set tags, replacing old values."""
        self.enqueue("tags", values=clean_tags(tags))

    def log_inputs(self, inputs: Iterable[DataInput]) -> None:
        """Log the data sets that the run reads."""
        if listed := [asdict(data_input) for data_input in inputs]:
            self.enqueue("inputs", inputs=listed)

    def log_file(self, path: Path, artifact_path: str = "") -> None:
        """Log a file that stays as it is under the run's directory `artifact_path`; linked, not copied, if possible."""
        self._enqueue_file("file", f"{artifact_path}/{path.name}".lstrip("/"), path=self.store.relative(path))

    def log_directory(self, directory: Path, artifact_path: str = "") -> None:
        """Log a finished directory's files under the run's `artifact_path`, as `log_file` does."""
        self._enqueue_file("directory", artifact_path, path=self.store.relative(directory))

    def log_text(self, text: str, artifact_file: str) -> None:
        """Log a text as the file `artifact_file` of the run."""
        self._enqueue_file("text", artifact_file, text=text)

    def note_stages(self, keys: Mapping[str, str]) -> None:
        """Note the artifact keys of the run's stages, by stage name."""
        if keys:
            self.enqueue("stages", values={stage: {"key": key} for stage, key in keys.items()})

    def link_to_parent(self, stage: str) -> None:
        """Note this run in its parent's tag, as the one of its stage."""
        self.enqueue("to_parent", stage=stage)

    def link_made_by(self, stage: str, key: str) -> None:
        """Note the run that made a stage's artifact, if one is found, as the one of this stage."""
        self.enqueue("made_by", stage=stage, key=key)

    def finish(self, status: str, *, at: float | None = None) -> None:
        """End the run as FINISHED, FAILED or KILLED, now or `at` an earlier time; it can still be continued.

        MLflow shows the time between its begin and its end, which is not negative where the clock was set back meanwhile.
        """
        ended = max(time.time(), float(self.outbox.run_info.get("started", 0.0))) if at is None else at
        self.outbox.update_run_info(ended=True)
        self.enqueue("end", status=status, time=int(1000 * ended))

    def waiting(self) -> list[Entry]:
        """The entries to deliver now: all but the curve that a follower still follows."""
        return [entry for entry in list(self.outbox.entries) if entry.kind != "follow"]

    def enqueue(self, kind: str, **data: Any) -> Entry:
        """Add an entry to the outbox, and deliver it if that is quick."""
        entry = self.outbox.add(kind, **data)
        self.store.deliver_soon(self, entry)
        return entry

    def _enqueue_file(self, kind: str, to: str, **data: Any) -> None:
        """Enqueue files for the path `to` below the run, if that is safe."""
        try:
            checked(to) if to else None
        except ValueError as error:
            self.store.caller.warn(f"logging {to[:80]!a}", error)
            return
        self.enqueue(kind, to=to, **data)

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a method of MLflow's client, under the lock. Raises MLflow's errors."""
        with self.store.lock:
            return getattr(self.store.client, method)(*arguments, **keywords)


class NullRun:
    """A run that is not tracked; `id` keeps the id of the run to continue, so that a later start still finds it."""

    url: str | None = None
    page: str | None = None
    artifact_uri: str | None = None

    def __init__(self, run_id: str | None = None, identity: str | None = None) -> None:
        self.id, self.identity = run_id, identity

    def _nothing(self, *_: object, **__: object) -> None:
        """Does nothing."""

    log_metrics = log_summary = log_params = set_tags = log_file = log_directory = log_text = log_inputs = _nothing
    note_stages = link_to_parent = link_made_by = finish = _nothing


class NullStore:
    """The store if MLflow is missing or switched off."""

    def start_run(self, name: str, *, run_id: str | None = None, identity: str | None = None, **_: object) -> NullRun:
        """A run that is not tracked."""
        return NullRun(run_id, identity)

    def register_model(self, name: str, **_: object) -> str | None:
        """Register nothing."""
        return None

    register_models = register_model

    def finish_uploads(self) -> None:
        """Upload nothing."""

    def on_upload(self, on_progress: Callable[[int, int], object]) -> None:
        """Ignores the callback: nothing is uploaded."""

    def close(self) -> int:
        """Return 0: nothing is open or undelivered."""
        return 0


AnyRun = TrackedRun | NullRun


def clean_tags(tags: Tags) -> dict[str, str]:
    """Tags as MLflow accepts them, without secrets."""
    return {clean(key): plain(value) for key, value in masked(tags).items()}


def points_of(rows: Iterable[MetricRow]) -> Iterator[MetricPoint]:
    """The points of rows of `metrics.jsonl`, as MLflow takes them."""
    for row in rows:
        milliseconds = int(1000 * (row.get("time") or time.time()))
        yield from ((key, value, milliseconds, row["step"]) for key, value in _values_of(row))


def _values_of(row: MetricRow) -> Iterator[tuple[str, float]]:
    """The metrics of a row; `tokens` is one of them, so that curves can be compared by it.

    A value that was not finite, null in JSON Lines, is NaN: the curve has a gap there instead of a straight line.
    """
    for key, value in {"tokens": row.get("tokens"), **row["metrics"]}.items():
        if is_number(value):
            yield clean(key), float(value) if math.isfinite(value) else math.nan
        elif value is None and key != "tokens":
            yield clean(key), math.nan


ID = "ttrain.id"  # tag: the id of the run's outbox, to find the run if the answer to its creation was lost

PARENT = "mlflow.parentRunId"  # tag by which MLflow's pages nest


def ensure_run(run: TrackedRun) -> None:
    """Bind the run to the one in MLflow, creating it if there is none. Raises MLflow's errors."""
    with run.lock:
        if run.is_bound:
            return
        parent = parent_id(run)
        with run.store.lock:
            entity = _find_run(run)
            if entity is None and run.outbox.run_info.get("is_made"):
                raise RefusedError(f"MLflow has no run {run.id} any more")
            if entity is None:
                entity = _create_run(run, parent)
        run.bind(entity)
        if run.outbox.run_info.get("run_id") != run.id:
            run.outbox.update_run_info(run_id=run.id)


def parent_id(run: TrackedRun) -> str | None:
    """MLflow's id of the run's parent, which is created first if needed. Raises MLflow's errors."""
    if run.parent is not None:
        ensure_run(run.parent)
        return run.parent.id
    run_info = run.outbox.run_info
    identity = str(run_info.get("parent"))
    if run_info.get("parent_run_id") or not outbox.ID.fullmatch(identity):
        return run_info.get("parent_run_id")
    waiting = read_json(run.store.home / outbox.FOLDER / identity / "run.json")
    if isinstance(waiting, dict) and waiting.get("run_id"):
        return str(waiting["run_id"])
    with run.store.lock:
        runs = _runs_of_identity(run, identity)
    if not runs and isinstance(waiting, dict):
        raise ConnectionError(f"the parent of {run_info['name']} is not in MLflow yet")
    return runs[0].info.run_id if runs else None


def delete_duplicates(run: TrackedRun) -> None:
    """Delete duplicates of this run, which were created because the answer to its first creation was lost."""
    with run.store.lock:
        for twin in _runs_of_identity(run, run.identity):
            if twin.info.run_id != run.id:
                run.store.client.delete_run(twin.info.run_id)
    run.outbox.update_run_info(doubtful=False)


def _find_run(run: TrackedRun) -> Any:
    """The run in MLflow; None if there is none, or if the user deleted it."""
    if run.id is None:
        runs = _runs_of_identity(run, run.identity) if run.is_again or run.outbox.run_info.get("doubtful") else []
        return runs[0] if runs else None
    try:
        return active_run(run)
    except Exception as error:
        if code_of(error) == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise


def active_run(run: TrackedRun) -> Any:
    """The run as MLflow has it; None if the user deleted it. If its whole experiment was deleted, that is restored.

    The next new run restores it anyway (`experiment_id`), and this one would never end in it. Raises MLflow's errors.
    """
    with run.store.lock:
        client = run.store.client
        entity = client.get_run(run.id)
        if entity.info.lifecycle_stage == "active":
            return entity
        experiment = client.get_experiment(entity.info.experiment_id)
        if experiment.lifecycle_stage != "deleted":
            return None
        client.restore_experiment(experiment.experiment_id)
        log.warning("the experiment %s was deleted in MLflow, but a run in it goes on, so it is restored", experiment.name)
        return client.get_run(run.id)


def _create_run(run: TrackedRun, parent: str | None) -> Any:
    run_info = run.outbox.run_info
    tags = {**run_info["tags"], ID: run.identity, **({PARENT: parent} if parent else {})}
    started = int(1000 * float(run_info.get("started", time.time())))
    try:
        return run.store.client.create_run(
            run.store.experiment_id(run.outbox.run_info.get("experiment")), started, tags, run_info["name"]
        )
    except Exception as error:
        if is_refusal(error):
            run.store.forget_experiments()  # the cached one is gone
        elif run.store.is_http:
            run.outbox.update_run_info(doubtful=True)
        raise


def _runs_of_identity(run: TrackedRun, identity: str) -> list[Any]:
    """The runs of this outbox in MLflow; duplicates of the first one are deleted later."""
    runs = run.store.client.search_runs(
        [run.store.experiment_id(run.outbox.run_info.get("experiment"))], f"tags.`{ID}` = '{identity}'"
    )
    return sorted(runs, key=lambda run: str(run.info.run_id))
