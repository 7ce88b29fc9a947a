"""Read runs by MLflow's API: from a server, or from another database than the home's own."""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import tempfile
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from ttrain.core.files import parse_json
from ttrain.tracking.calls import is_refusal
from ttrain.tracking.database import database_of
from ttrain.tracking.model_sets import all_pages
from ttrain.tracking.tracker import open_reader
from ttrain.tracking.views import InputView, StoredRun

RUNS_PER_PAGE = 1000


@final
class ApiSource:
    """Read-only access to one MLflow. Raises MLflow's errors; a silent server costs one probe."""

    def __init__(self, home: Path) -> None:
        self._store = open_reader(home)
        self._experiments: list[str] = []

    def runs(self, ids: Iterable[str]) -> dict[str, StoredRun]:
        """The existing runs with these ids, without deleted ones, by id."""
        tracked_runs = {}
        for run_id in dict.fromkeys(ids):
            try:
                run = self._asked(lambda: self._store.client.get_run(run_id))  # noqa: B023
            except Exception as error:
                if is_refusal(error):
                    continue
                raise
            if run.info.lifecycle_stage == "active":
                tracked_runs[run_id] = _stored_run(run)
        return tracked_runs

    def with_tags(self, key: str, values: Iterable[str]) -> list[str]:
        """Ids of the runs whose tag has one of these values, the newest first."""
        matches: list[Any] = []
        for value in dict.fromkeys(values):
            if "'" in value:
                continue  # MLflow's filter language cannot escape it, and no value of ttrain contains one
            matches += self._search(f"tags.`{key}` = '{value}'")
        return [run.info.run_id for run in sorted(matches, key=lambda run: run.info.start_time or 0, reverse=True)]

    def history(self, run_id: str, metric: str) -> list[tuple[int, int, float]]:
        """(step, milliseconds since 1970, value) of a metric, as logged; from all pages."""
        points = self._asked(lambda: self._store.client.get_metric_history(run_id, metric))
        return sorted((point.step, point.timestamp, point.value) for point in points)

    def curves(self, run_id: str) -> list[str]:
        """Names of the metrics that were logged at a step; the metrics of a whole run are at step 0."""
        run = self._asked(lambda: self._store.client.get_run(run_id))
        return sorted(metric.key for metric in run.data.to_proto().metrics if metric.step > 0)

    def text(self, run_id: str, path: str) -> str:
        """The text of one of the run's files."""
        with tempfile.TemporaryDirectory() as folder:
            download_path = self._asked(lambda: self._store.client.download_artifacts(run_id, path, folder))
            return Path(download_path).read_text(encoding="utf-8", errors="replace")

    def files(self, run_id: str, under: str) -> list[str]:
        """Paths of the run's files below a directory."""
        paths: list[str] = []
        for entry in self._asked(lambda: self._store.client.list_artifacts(run_id, under or None)):
            paths += self.files(run_id, entry.path) if entry.is_dir else [entry.path]
        return paths

    def _search(self, query: str) -> list[Any]:
        if not self._experiments:
            self._experiments = [
                experiment.experiment_id for experiment in self._asked(self._store.client.search_experiments)
            ]
        experiment_ids, pages = self._experiments, RUNS_PER_PAGE

        def page(page_token: str | None = None) -> Any:
            return self._store.client.search_runs(experiment_ids, query, max_results=pages, page_token=page_token)

        return self._asked(lambda: all_pages(page)) if experiment_ids else []

    def _asked(self, action: Callable[[], Any]) -> Any:
        answer, error = self._store.caller.try_call(action)
        if error is not None:
            raise error
        return answer


def _stored_run(run: Any) -> StoredRun:
    inputs = []
    for dataset_input in run.inputs.dataset_inputs if run.inputs else ():
        context = next((tag.value for tag in dataset_input.tags if tag.key == "mlflow.data.context"), "")
        data = dataset_input.dataset
        inputs.append(input_of(data.name, data.digest, context, data.source, data.profile))
    info = run.info
    return StoredRun(
        info.run_id,
        info.run_name or "",
        info.status,
        (info.start_time or 0) / 1000,
        info.end_time / 1000 if info.end_time else None,
        info.artifact_uri,
        str(info.experiment_id),
        dict(run.data.params),
        dict(run.data.metrics),
        dict(run.data.tags),
        tuple(sorted(inputs, key=lambda dataset_input: dataset_input.name)),
    )


IN_VALUES = "IN (SELECT value FROM json_each(?))"  # any number of values in one parameter

RUNS_SQL = """
SELECT run_uuid, name, status, start_time, end_time, artifact_uri, experiment_id FROM runs
WHERE lifecycle_stage = 'active' AND run_uuid """

INPUTS_SQL = f"""
SELECT inputs.destination_id, datasets.name, datasets.digest, coalesce(context.value, ''), datasets.dataset_source,
datasets.dataset_profile FROM inputs
JOIN datasets ON datasets.dataset_uuid = inputs.source_id
LEFT JOIN input_tags AS context ON context.input_uuid = inputs.input_uuid AND context.name = 'mlflow.data.context'
WHERE inputs.source_type = 'DATASET' AND inputs.destination_type = 'RUN' AND inputs.destination_id {IN_VALUES}
ORDER BY datasets.name
"""


@final
class DatabaseSource:
    """Read-only access to the home's own MLflow. Raises sqlite3.Error if it has another schema, or is damaged."""

    def __init__(self, home: Path) -> None:
        self._home = home.resolve()
        self._path = database_of(self._home)
        self._connection: sqlite3.Connection | None = None
        self._lock = threading.Lock()

    def runs(self, ids: Iterable[str]) -> dict[str, StoredRun]:
        """The existing runs with these ids, without deleted ones, by id."""
        among = (json.dumps(sorted(set(ids))),)
        with self._open() as db:
            rows = db.execute(RUNS_SQL + IN_VALUES, among).fetchall()
            params, tags = _grouped(db, "params", among), _grouped(db, "tags", among)
            metrics: dict[str, dict[str, float]] = defaultdict(dict)
            latest = f"SELECT run_uuid, key, value, is_nan FROM latest_metrics WHERE run_uuid {IN_VALUES}"
            for run_id, key, value, is_nan in db.execute(latest, among):
                metrics[run_id][key] = math.nan if is_nan else value
            inputs: dict[str, list[InputView]] = defaultdict(list)
            for run_id, *columns in db.execute(INPUTS_SQL, among):
                inputs[run_id].append(input_of(*columns))
            moved = self._moved(db)
        return {
            run_id: StoredRun(
                run_id,
                name or tags[run_id].get("mlflow.runName", ""),
                status,
                (started or 0) / 1000,
                ended / 1000 if ended else None,
                moved[1] + uri[len(moved[0]) :] if uri.startswith(f"{moved[0]}/") else uri,
                str(experiment),
                params[run_id],
                metrics[run_id],
                tags[run_id],
                tuple(inputs[run_id]),
            )
            for run_id, name, status, started, ended, uri, experiment in rows
        }

    def delivered_identities(self) -> frozenset[str]:
        """Identities of the runs whose outcome is known, also of those deleted in MLflow."""
        ended = "SELECT run_uuid FROM tags WHERE key = 'ttrain.outcome'"
        with self._open() as db:
            return frozenset(
                value for (value,) in db.execute(f"SELECT value FROM tags WHERE key = 'ttrain.id' AND run_uuid IN ({ended})")
            )

    def with_tags(self, key: str, values: Iterable[str]) -> list[str]:
        """Ids of the runs whose tag has one of these values, the newest first."""
        ask = f"""SELECT runs.run_uuid FROM tags JOIN runs ON runs.run_uuid = tags.run_uuid
        WHERE runs.lifecycle_stage = 'active' AND tags.key = ? AND tags.value {IN_VALUES} ORDER BY runs.start_time DESC"""
        with self._open() as db:
            return [row[0] for row in db.execute(ask, (key, json.dumps(sorted(set(values)))))]

    def history(self, run_id: str, metric: str) -> list[tuple[int, int, float]]:
        """(step, milliseconds since 1970, value) of a metric, as logged."""
        # NaN is read as NULL, which costs nothing if there is none
        ask = """SELECT step, timestamp, CASE WHEN is_nan THEN NULL ELSE value END FROM metrics
        WHERE run_uuid = ? AND key = ? ORDER BY step, timestamp"""
        with self._open() as db:
            rows: list[tuple[int, int, float | None]] = db.execute(ask, (run_id, metric)).fetchall()
        return [(step, when, math.nan if value is None else value) for step, when, value in rows]

    def curves(self, run_id: str) -> list[str]:
        """Names of the metrics that were logged at a step; the metrics of a whole run are at step 0."""
        ask = "SELECT key FROM latest_metrics WHERE run_uuid = ? AND step > 0 ORDER BY key"
        with self._open() as db:
            return [row[0] for row in db.execute(ask, (run_id,))]

    def tags_under(self, name: str, alias: str) -> dict[str, str]:
        """Tags of the version of a registered model that has the alias; {} if none has."""
        ask = """SELECT tags.key, tags.value FROM model_version_tags AS tags JOIN registered_model_aliases AS aliases
        ON aliases.name = tags.name AND aliases.version = tags.version WHERE aliases.name = ? AND aliases.alias = ?"""
        with self._open() as db:
            return dict(db.execute(ask, (name, alias)).fetchall())

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """The shared connection: a new one would read MLflow's schema of 60 tables, 1 ms for each of hundreds of curves."""
        with self._lock:
            if self._connection is None:
                if not self._path.exists():
                    raise sqlite3.OperationalError(f"{self._path} does not exist")
                uri = f"{self._path.as_uri()}?mode=ro"
                self._connection = sqlite3.connect(uri, uri=True, timeout=10, check_same_thread=False)
                weakref.finalize(self, self._connection.close)
            yield self._connection

    def _moved(self, db: sqlite3.Connection) -> tuple[str, str]:
        """(recorded location of this home, current one), as URIs, to correct MLflow's absolute paths after a move."""
        recorded = None
        with contextlib.suppress(sqlite3.OperationalError):  # a database that ttrain has not opened yet
            recorded = db.execute("SELECT path FROM ttrain_home").fetchone()
        return Path(recorded[0] if recorded else self._home).as_uri(), self._home.as_uri()


def _grouped(db: sqlite3.Connection, table: str, among: Sequence[str]) -> Mapping[str, dict[str, str]]:
    values_by_run: dict[str, dict[str, str]] = defaultdict(dict)
    for run_id, key, value in db.execute(f"SELECT run_uuid, key, value FROM {table} WHERE run_uuid {IN_VALUES}", among):
        values_by_run[run_id][key] = value
    return values_by_run


def input_of(name: str, digest: str, context: str, source: str, profile: str | None) -> InputView:
    """A data set from MLflow's columns; without counts if the profile is not a JSON object."""
    counts: object = None
    with contextlib.suppress(ValueError):
        counts = parse_json(profile or "null")
    return InputView(name, digest, context, source, counts if isinstance(counts, dict) else {})
