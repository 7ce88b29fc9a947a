"""Bring MLflow up to date with the home: `Mirror.push` writes what differs.

It may be called any number of times, from any process. A run is found by the tag `ttrain.id`, else
created; everything is compared first, so nothing has to be sent in order.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from ttrain.core.files import link_or_copy
from ttrain.core.redact import masked
from ttrain.core.text import is_number
from ttrain.store.runs import MetricRow, parse_row, time_in_name
from ttrain.tracking.client import (
    artifacts_of,
    clean,
    local_path,
    open_client,
    plain,
    tracking_uri,
)
from ttrain.tracking.datasets import DataInput

# Tags
ID = "ttrain.id"
RUN = "ttrain.run"
PARENT = "mlflow.parentRunId"
KIND = "mlflow.experimentKind"
NAME = "ttrain.name"  # tag of the runs of pipelines; the runs of their stages have none
RUNNING, FINISHED, FAILED, KILLED = "RUNNING", "FINISHED", "FAILED", "KILLED"
BATCH = {"params": 100, "tags": 100, "metrics": 1000}  # in one request, by MLflow's limits
VALUE_CHARACTERS, NAME_CHARACTERS = 6000, 250  # of a parameter, of a run's name, by its limits
MOST_RUNS = 50_000  # that MLflow gives in one answer

Files = dict[str, str | Path]  # by path among the run's files: a text, or the file that has it
MetricPoint = tuple[str, float, int, int]  # name, value, milliseconds since 1970, step


@dataclass
class TrackedRun:
    """All that MLflow shows of a pipeline's run, of one of its stages, or of a sweep."""

    id: str  # by which it is found again
    name: str
    experiment: str
    started: float  # seconds since 1970
    status: str = RUNNING
    ended: float | None = None
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, object] = field(default_factory=dict)
    summary: Mapping[str, float] = field(default_factory=dict)  # of the whole run, at step 0
    curves: Sequence[Path] = ()  # files of metrics, `metrics.jsonl`
    rows: list[MetricRow] = field(default_factory=list)  # further points
    inputs: list[DataInput] = field(default_factory=list)
    files: Files = field(default_factory=dict)
    stages: list[TrackedRun] = field(default_factory=list)  # the runs below it
    parent: str = ""  # id of a run above it that is pushed by itself, as a sweep is


class Bound:
    """A run in MLflow, with what this process knows that it has."""

    def __init__(self, entity: Any) -> None:
        info = entity.info
        data = entity.data
        self.run_id = str(info.run_id)
        self.experiment_id = str(info.experiment_id)
        self.artifact_uri = str(info.artifact_uri)
        self.status = str(info.status)
        self.is_deleted = bool(info.lifecycle_stage == "deleted")
        self.tags = dict(data.tags)
        self.params = dict(data.params)
        self.values = dict(data.metrics)
        self.steps: dict[str, int] = {
            metric.key: metric.step for metric in data.to_proto().metrics
        }  # the last ones
        listed = entity.inputs.dataset_inputs if entity.inputs else ()
        self.inputs = {(one.dataset.name, one.dataset.digest) for one in listed}
        self.sizes: Any = None  # bytes of its files by path; None before they were listed

    @property
    def page(self) -> str:
        """Address of the run's page, relative to a server that shows this MLflow."""
        return f"#/experiments/{self.experiment_id}/runs/{self.run_id}"


class Mirror:
    """One MLflow, as the view of one home. Methods raise MLflow's errors."""

    _entities = property(lambda self: import_module("mlflow.entities"))

    def __init__(self, home: Path) -> None:
        self.home = home.resolve()
        self.uri = tracking_uri(self.home)
        # whether its files are on disks of this machine
        self.is_local = not self.uri.startswith(("http", "databricks", "uc"))
        self.forget()

    @cached_property
    def client(self) -> Any:
        return open_client(self.uri, self.home)

    def forget(self) -> None:
        """Forget what MLflow has: after an error nobody knows what arrived."""
        self.__dict__.pop("client", None)
        self.bound: dict[str, Bound] = {}  # by id
        self._offsets: dict[Path, int] = {}  # bytes of each curve that were read
        self._experiments: dict[str, str] = {}

    def push(self, run: TrackedRun, parent: Bound | None = None) -> Bound | None:
        """Write what MLflow lacks of a run and of its stages.

        Returns None if it was deleted in MLflow, or a later run continues it.
        """
        parent = parent or (self.find(run.experiment, run.parent) if run.parent else None)
        bound = self.find(run.experiment, run.id) or self._create(run)
        later = time_in_name(bound.tags.get(RUN, "")) > time_in_name(run.tags.get(RUN, ""))
        if bound.is_deleted or later:
            return None
        self._write(run, bound)
        if parent:
            self.tag(bound, {PARENT: parent.run_id})
        for stage in run.stages:
            self.push(stage, bound)
        if run.status not in (RUNNING, bound.status):
            ended = max(run.ended or time.time(), run.started)  # MLflow shows the time between
            self.client.set_terminated(bound.run_id, run.status, int(1000 * ended))
            bound.status = run.status
        return bound

    def find(self, experiment: str, identity: str) -> Bound | None:
        """The run with this id. Duplicates, as two machines may make them, are deleted."""
        if identity not in self.bound:
            found = self.search([self.experiment_id(experiment)], f"tags.`{ID}` = '{identity}'")
            bounds = sorted(map(Bound, found), key=lambda one: (one.is_deleted, one.run_id))
            for twin in bounds[1:]:
                self.client.delete_run(twin.run_id)  # a deleted one stays deleted
            if bounds:
                self.bound[identity] = bounds[0]
        return self.bound.get(identity)

    def search(self, experiments: Sequence[str], query: str) -> list[Any]:
        return list(
            self.client.search_runs(experiments, query, self._entities.ViewType.ALL, MOST_RUNS)
        )

    def experiment_id(self, name: str) -> str:
        """Id of the experiment, which is created or restored if needed."""
        if name not in self._experiments:
            found = self.client.get_experiment_by_name(name)
            if found and found.lifecycle_stage == "deleted":
                self.client.restore_experiment(found.experiment_id)  # no other can have its name
            # A server chooses the place itself; else it would be below the working directory
            place = artifacts_of(self.home) if self.is_local else None
            number = found.experiment_id if found else self.client.create_experiment(name, place)
            # MLflow's pages open on training runs, not on its pages for agents and traces.
            self.client.set_experiment_tag(number, KIND, "custom_model_development")
            self._experiments[name] = str(number)
        return self._experiments[name]

    def _create(self, run: TrackedRun) -> Bound:
        tags = {ID: run.id, **_clean_tags(run.tags)}
        created = self.client.create_run(
            self.experiment_id(run.experiment),
            int(1000 * run.started),
            tags,
            plain(run.name)[:NAME_CHARACTERS],
        )
        self.bound[run.id] = Bound(created)
        return self.bound[run.id]

    def _write(self, run: TrackedRun, bound: Bound) -> None:
        if run.status == RUNNING != bound.status:
            self.client.update_run(bound.run_id, status=RUNNING)
            bound.status = RUNNING
        self.tag(bound, run.tags)
        params = {
            clean(key): plain(value)[:VALUE_CHARACTERS] for key, value in masked(run.params).items()
        }
        fresh = {key: value for key, value in params.items() if key not in bound.params}
        self._log(bound, "params", self._entities.Param, fresh.items())  # MLflow's cannot change
        bound.params |= fresh
        now = int(1000 * (run.ended or time.time()))
        numbers = ((key, value) for key, value in run.summary.items() if is_number(value))
        summary = {clean(key): float(value) for key, value in numbers if math.isfinite(value)}
        points = [(*pair, now, 0) for pair in summary.items() - bound.values.items()]
        points += _new_points(
            itertools.chain(*map(self._new_rows, run.curves), run.rows), bound.steps
        )
        self._log(bound, "metrics", self._entities.Metric, points)
        bound.values |= summary
        inputs = {(data.name, data.digest): data for data in run.inputs}
        if lacking := inputs.keys() - bound.inputs:
            self.client.log_inputs(
                bound.run_id, datasets=[inputs[identity].entity() for identity in sorted(lacking)]
            )
            bound.inputs |= lacking
        self.place_files(run.files, bound)

    def tag(self, bound: Bound, tags: Mapping[str, str]) -> None:
        wanted = _clean_tags(tags)
        self._log(bound, "tags", self._entities.RunTag, wanted.items() - bound.tags.items())
        bound.tags |= wanted

    def _log(self, bound: Bound, kind: str, entity: Any, values: Iterable[Any]) -> None:
        entities = [entity(*value) for value in values]
        for first in range(0, len(entities), BATCH[kind]):
            self.client.log_batch(bound.run_id, **{kind: entities[first : first + BATCH[kind]]})

    def _new_rows(self, path: Path) -> list[MetricRow]:
        start = self._offsets.get(path, 0)
        lines = b""
        with (
            contextlib.suppress(OSError),
            path.open("rb") as file,
        ):  # not begun, or published meanwhile
            start = 0 if file.seek(0, os.SEEK_END) < start else start
            file.seek(start)
            lines = file.read()
        lines = lines[: lines.rfind(b"\n") + 1]  # one that is half written waits
        self._offsets[path] = start + len(lines)
        return [row for line in lines.splitlines() if (row := parse_row(line)) is not None]

    def place_files(self, files: Files, bound: Bound) -> None:
        """Place the files that the run lacks: as links on this machine's disks, else by uploads."""
        root = local_path(bound.artifact_uri)
        if bound.sizes is None and files:
            bound.sizes = dict(self.sizes(bound.run_id))
        for target, source in files.items():
            size = len(plain(source).encode()) if isinstance(source, str) else source.stat().st_size
            if bound.sizes.get(target) == size:
                continue
            bound.sizes[target] = size
            if isinstance(source, str):
                self.client.log_text(bound.run_id, plain(source), target)
            elif root:
                (root / target).parent.mkdir(parents=True, exist_ok=True)
                (root / target).unlink(missing_ok=True)
                link_or_copy(source, root / target)
            else:
                self.client.log_artifact(
                    bound.run_id, str(source), target.rpartition("/")[0] or None
                )

    def sizes(self, run_id: str, under: str | None = None) -> Iterator[tuple[str, int]]:
        """(path, bytes) of the run's files."""
        for entry in self.client.list_artifacts(run_id, under):
            if entry.is_dir:
                yield from self.sizes(run_id, entry.path)
            else:
                yield entry.path, entry.file_size


def _new_points(rows: Iterable[MetricRow], last: dict[str, int]) -> Iterator[MetricPoint]:
    for row in rows:
        step = row["step"]
        milliseconds = int(1000 * (row.get("time") or time.time()))
        tokens = {} if row.get("tokens") is None else {"tokens": row["tokens"]}
        for metric, value in {**tokens, **row["metrics"]}.items():
            key = clean(metric)
            if step > last.get(key, -1):
                last[key] = step
                is_finite = value is not None and math.isfinite(value)
                yield key, float(value) if is_finite else math.nan, milliseconds, step


def _clean_tags(tags: Mapping[str, str]) -> dict[str, str]:
    return {clean(key): plain(value) for key, value in masked(tags).items()}
