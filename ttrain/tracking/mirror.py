"""Bring MLflow up to date with what the home has: `Mirror.push` writes what differs, any number of times, from any process.

A run is found by the tag `ttrain.id`, else created. Parameters, tags, metrics, points after the last step that MLflow has,
files that it lacks, data sets, end states: each is compared first, so nothing is sent in order, repeated or repaired.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from ttrain.core.files import temporary_path
from ttrain.core.redact import masked
from ttrain.core.text import is_number
from ttrain.store.runs import MetricRow, parse_row, time_in_name
from ttrain.tracking import datasets
from ttrain.tracking.book import Book
from ttrain.tracking.client import (
    artifacts_of,
    clean,
    is_installed,
    is_missing,
    local_path,
    open_client,
    own_uri,
    plain,
    tracking_uri,
)
from ttrain.tracking.datasets import DataInput

log = logging.getLogger("ttrain")

ID, RUN, PARENT = "ttrain.id", "ttrain.run", "mlflow.parentRunId"  # tags
RUNNING, FINISHED, FAILED, KILLED = "RUNNING", "FINISHED", "FAILED", "KILLED"
LINK_FROM_BYTES = 1 << 20  # bigger files are hard links in the home's own MLflow
BATCH, POINTS = 100, 1000  # of parameters and tags, of points in one request, by MLflow's limits
VALUE_CHARACTERS, NAME_CHARACTERS = 6000, 250  # of a parameter, of a run's name, by MLflow's limits

MetricPoint = tuple[str, float, int, int]  # name, value, milliseconds since 1970, step


@dataclass
class TrackedRun:
    """All that MLflow shows of a pipeline's run, of one of its stages, or of a sweep. `files` and `texts` by their path
    among the run's files."""

    id: str  # by which it is found again
    owner: str  # the pipeline's run that it is, or is a stage of
    name: str
    experiment: str
    started: float  # seconds since 1970
    status: str = RUNNING
    ended: float | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, object] = field(default_factory=dict)
    summary: Mapping[str, float] = field(default_factory=dict)  # metrics of the whole run, at step 0
    curves: Sequence[Path] = ()  # files of metrics, `metrics.jsonl`
    rows: Sequence[MetricRow] = ()  # further points
    inputs: Sequence[DataInput] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    stages: list[TrackedRun] = field(default_factory=list)  # the runs below it
    parent: str = ""  # id of a run above it that is pushed by itself, as a sweep is


@dataclass
class Bound:
    """A run in MLflow, and what it has by the knowledge of this process."""

    run_id: str
    experiment_id: str
    artifact_uri: str
    status: str
    tags: dict[str, str]
    params: dict[str, str]
    values: dict[str, float]
    steps: dict[str, int]  # the last one of each metric
    inputs: set[tuple[str, str]]
    sizes: dict[str, int] | None = None  # bytes of its files by path, on a server; None before it was asked
    curves: dict[Path, CurveReader] = field(default_factory=dict)

    @property
    def page(self) -> str:
        """Address of the run's page, to append to that of any server that shows this MLflow."""
        return page_of(self.experiment_id, self.run_id)


def page_of(experiment_id: str, run_id: str) -> str:
    """Address of a run's page on any server that shows this MLflow."""
    return f"#/experiments/{experiment_id}/runs/{run_id}"


class Mirror:
    """One MLflow, as the view of one home. Methods raise MLflow's errors."""

    def __init__(self, home: Path, uri: str | None = None) -> None:
        self.home = home.resolve()
        self.uri = uri or tracking_uri(self.home)
        self.is_own = self.uri == own_uri(self.home)
        self.is_local = not self.uri.startswith(("http", "databricks", "uc"))  # its files are on disks of this machine
        if self.is_own and is_missing(self.home):
            Book(self.home, self.uri).forget()  # first: a kill meanwhile leaves nothing that is taken for pushed
        self.client, self.is_new = open_client(self.uri, self.home)
        if self.is_new:
            Book(self.home, self.uri).forget()
        self.bound: dict[str, Bound] = {}  # by id
        self.answered = time.monotonic()  # when MLflow answered last
        self.patience = 0.0  # seconds that the present request may take beyond the usual, for a large file
        self._experiments: dict[str, str] = {}
        self._entities = import_module("mlflow.entities")

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a method of MLflow's client."""
        answer = getattr(self.client, method)(*arguments, **keywords)
        self.answered = time.monotonic()
        return answer

    def push(self, run: TrackedRun, parent: Bound | None = None) -> Bound | None:
        """Write what MLflow lacks of a run and of its stages; None if somebody deleted the run in MLflow, which stays so, or
        if a later run of the pipeline goes on with it."""
        parent = parent or (self._find(run.experiment, run.parent) if run.parent else None)
        bound = self.bound.get(run.id) or self._bind(run, parent)
        if bound is None or time_in_name(bound.tags.get(RUN, run.owner)) > time_in_name(run.owner):
            return None
        self._write(run, bound, parent)
        for stage in run.stages:
            self.push(stage, bound)
        self._end(run, bound)
        return bound

    def forget(self) -> None:
        """Ask MLflow anew what it has: after an error nobody knows what arrived."""
        self.bound.clear()
        self._experiments.clear()

    def experiment_id(self, name: str) -> str:
        """Id of the experiment, which is created or restored if needed."""
        if name not in self._experiments:
            experiment = self.call("get_experiment_by_name", name)
            if experiment is None:
                self._create_experiment(name)
                experiment = self.call("get_experiment_by_name", name)
            if experiment.lifecycle_stage == "deleted":
                self.call("restore_experiment", experiment.experiment_id)  # no other experiment can have its name
            # MLflow's pages open on training runs, not on its pages for agents and traces.
            self.call("set_experiment_tag", experiment.experiment_id, "mlflow.experimentKind", "custom_model_development")
            self._experiments[name] = str(experiment.experiment_id)
        return self._experiments[name]

    def _create_experiment(self, name: str) -> None:
        # A server chooses the artifact root itself; everything else would write below the working directory
        place = artifacts_of(self.home) if self.is_local else None
        try:
            self.call("create_experiment", name, place)
        except Exception as error:
            if getattr(error, "error_code", "") != "RESOURCE_ALREADY_EXISTS":  # another process has just created it
                raise

    def _find(self, experiment: str, run_id: str) -> Bound | None:
        """The run with this id; None if there is none, or if it was deleted."""
        if run_id not in self.bound and (active := self._search(experiment, run_id)[0]):
            self.bound[run_id] = _bound(active[0])
        return self.bound.get(run_id)

    def _search(self, experiment: str, run_id: str) -> tuple[list[Any], bool]:
        """(the runs with this id, whether there were others that somebody deleted)."""
        everything = self._entities.ViewType.ALL
        query = f"tags.`{ID}` = '{run_id}'"
        entities = self.call("search_runs", [self.experiment_id(experiment)], query, run_view_type=everything)
        active = [one for one in entities if one.info.lifecycle_stage == "active"]
        return sorted(active, key=lambda one: str(one.info.run_id)), len(active) < len(entities)

    def _bind(self, run: TrackedRun, parent: Bound | None) -> Bound | None:
        """Find the run in MLflow, or create it. Twins, which two machines with one home can make, are deleted."""
        active, were_deleted = self._search(run.experiment, run.id)
        if were_deleted and not active:
            return None
        for twin in active[1:]:
            self.call("delete_run", twin.info.run_id)
        if not active:
            tags = {ID: run.id, **_clean_tags(run.tags), **({PARENT: parent.run_id} if parent else {})}
            name = plain(run.name).strip()[:NAME_CHARACTERS] or "unnamed"
            experiment = self.experiment_id(run.experiment)
            active = [self.call("create_run", experiment, int(1000 * run.started), tags, name)]
        bound = self.bound[run.id] = _bound(active[0])
        return bound

    def _write(self, run: TrackedRun, bound: Bound, parent: Bound | None) -> None:
        tags = {**_clean_tags(run.tags), **({PARENT: parent.run_id} if parent else {})}
        if run.status == RUNNING != bound.status:
            self.call("update_run", bound.run_id, status=RUNNING)
            bound.status = RUNNING
        self._log(bound, "tags", self._entities.RunTag, _changed(tags, bound.tags))
        params = {clean(key): plain(value)[:VALUE_CHARACTERS] for key, value in masked(run.params).items()}
        fresh = {key: value for key, value in params.items() if key not in bound.params}  # MLflow's cannot change
        self._log(bound, "params", self._entities.Param, fresh)
        now = int(1000 * (run.ended or time.time()))
        summary = {key: value for key, value, _, _ in points_of([{"step": 0, "time": now / 1000, "metrics": run.summary}])}
        changed = _changed(summary, bound.values)
        self._send(bound, [(key, value, now, 0) for key, value in changed.items() if math.isfinite(value)])
        bound.values |= changed
        for path in run.curves:
            reader = bound.curves.setdefault(path, CurveReader(path))
            self._send(bound, list(_new_points(reader.new_rows(), bound)))
        self._send(bound, list(_new_points(run.rows, bound)))
        lacking = [data for data in run.inputs if (data.name, data.digest) not in bound.inputs]
        if lacking:
            datasets.log(self.client, bound.run_id, lacking)
            bound.inputs |= {(data.name, data.digest) for data in lacking}
        self.place_files(run.texts, run.files, bound)

    def _log(self, bound: Bound, kind: str, entity: Callable[..., Any], values: Mapping[str, str]) -> None:
        """Log tags or parameters."""
        pairs = [*values.items()]
        for first in range(0, len(pairs), BATCH):
            self.call("log_batch", bound.run_id, **{kind: [entity(*pair) for pair in pairs[first : first + BATCH]]})
        getattr(bound, kind).update(values)

    def _send(self, bound: Bound, points: Sequence[MetricPoint]) -> None:
        """Send points. A batch whose answer was lost is sent again unchanged: MLflow's key of a point is its step, time and
        value, so it is stored once."""
        for first in range(0, len(points), POINTS):
            batch = points[first : first + POINTS]
            self.call("log_batch", bound.run_id, metrics=[self._entities.Metric(*point) for point in batch])
            for key, _, _, step in batch:
                bound.steps[key] = max(step, bound.steps.get(key, -1))

    def _end(self, run: TrackedRun, bound: Bound) -> None:
        """Set the end state; MLflow shows the time between begin and end, which is not negative."""
        if run.status != RUNNING and run.status != bound.status:
            ended = max(run.ended or time.time(), run.started)
            self.call("set_terminated", bound.run_id, run.status, int(1000 * ended))
            bound.status = run.status

    def place_files(self, texts: Mapping[str, str], files: Mapping[str, Path], bound: Bound) -> None:
        """Place the files that the run lacks: on this machine's disks as links or copies, else by uploads."""
        root = local_path(bound.artifact_uri)
        if root is not None:
            for target, text in texts.items():
                _write_text(root / target, plain(text))
            for target, source in files.items():
                place_file(source, root / target)
            return
        if bound.sizes is None and (texts or files):
            bound.sizes = dict(self.sizes(bound.run_id))
        sizes = bound.sizes or {}
        for target, text in texts.items():
            size = len(plain(text).encode())
            if sizes.get(target) != size:
                self.call("log_text", bound.run_id, plain(text), target)
                sizes[target] = size
        for target, source in files.items():
            size = source.stat().st_size
            if sizes.get(target) != size:
                self.patience = size / 1e6  # at least 1 MB/s
                self.call("log_artifact", bound.run_id, str(source), target.rpartition("/")[0] or None)
                self.patience = 0.0
                sizes[target] = size

    def sizes(self, run_id: str, under: str | None = None) -> Iterator[tuple[str, int]]:
        """(path, bytes) of the run's files on a server."""
        for entry in self.call("list_artifacts", run_id, under):
            if entry.is_dir:
                yield from self.sizes(run_id, entry.path)
            else:
                yield entry.path, entry.file_size


def prepare(home: Path) -> None:
    """Make or open the home's own database before a server does, which would refuse a damaged one."""
    if is_installed():
        Mirror(home, own_uri(home.resolve()))


class CurveReader:
    """Reads the lines that a training appends to its `metrics.jsonl`, each once; from the beginning if the file was cut,
    as a stage that continues cuts it back to its checkpoint."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._tail = path, 0, b""

    def new_rows(self) -> list[MetricRow]:
        """The rows of the whole lines since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset - len(self._tail))
                if file.read(len(self._tail)) != self._tail:
                    self._offset, self._tail = 0, b""
                    file.seek(0)
                chunk = file.read()
        except OSError:  # not begun, or published meanwhile: then the next push has its new path
            return []
        chunk = chunk[: chunk.rfind(b"\n") + 1]
        self._offset, self._tail = self._offset + len(chunk), (self._tail + chunk)[-256:]
        return [row for line in chunk.splitlines() if (row := parse_row(line)) is not None]


def points_of(rows: Iterable[MetricRow]) -> Iterator[MetricPoint]:
    """The points of rows of `metrics.jsonl`; `tokens` is one of them, so that curves can be compared by it.

    A value that was not finite, null in JSON Lines, is NaN: the curve has a gap there instead of a straight line.
    """
    for row in rows:
        milliseconds = int(1000 * (row.get("time") or time.time()))
        for key, value in {"tokens": row.get("tokens"), **row["metrics"]}.items():
            if is_number(value):
                yield clean(key), float(value) if math.isfinite(value) else math.nan, milliseconds, row["step"]
            elif value is None and key != "tokens":
                yield clean(key), math.nan, milliseconds, row["step"]


def place_file(source: Path, target: Path) -> None:
    """Put a file into the artifacts unless it is there; a big one as a hard link, if both are on one disk."""
    size = source.stat().st_size
    if target.exists() and target.stat().st_size == size and target.stat().st_mtime_ns == source.stat().st_mtime_ns:
        return

    def link_or_copy(temporary: Path) -> None:
        if size >= LINK_FROM_BYTES:
            try:
                os.link(source.resolve(), temporary)
                return
            except OSError:  # another disk, or one without links
                pass
        shutil.copy2(source, temporary)

    _replace(target, link_or_copy)


def _write_text(target: Path, text: str) -> None:
    data = text.encode()
    if not target.exists() or target.read_bytes() != data:
        _replace(target, lambda temporary: temporary.write_bytes(data))


def _replace(target: Path, write: Callable[[Path], object]) -> None:
    """Write a temporary file and rename it, so that no half of a file is ever shown."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(target)
    temporary.unlink(missing_ok=True)
    try:
        write(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _bound(entity: Any) -> Bound:
    info, data = entity.info, entity.data
    listed = entity.inputs.dataset_inputs if entity.inputs else ()
    metrics = data.to_proto().metrics
    steps: dict[str, int] = {}
    for metric in metrics:
        steps[metric.key] = max(metric.step, steps.get(metric.key, -1))
    return Bound(
        info.run_id,
        str(info.experiment_id),
        info.artifact_uri,
        info.status,
        dict(data.tags),
        dict(data.params),
        dict(data.metrics),
        steps,
        {(one.dataset.name, one.dataset.digest) for one in listed},
    )


def _new_points(rows: Iterable[MetricRow], bound: Bound) -> Iterator[MetricPoint]:
    """The points after the last step that MLflow has of their metric; of several rows of a step the first counts."""
    last = dict(bound.steps)
    for point in points_of(rows):
        key, step = point[0], point[3]
        if step > last.get(key, -1):
            last[key] = step
            yield point


def _changed(values: Mapping[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if earlier.get(key) != value}


def _clean_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Tags as MLflow accepts them, without secrets."""
    return {clean(key): plain(value) for key, value in masked(tags).items()}
