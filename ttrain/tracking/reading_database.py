"""Runs from the home's own database, read as it is: no MLflow is imported (1.5 s), and few questions serve many runs."""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import final

from ttrain.core.files import parse_json
from ttrain.tracking.database import database_of
from ttrain.tracking.views import InputView, Tracked

AMONG = "IN (SELECT value FROM json_each(?))"  # any number of values in one parameter
RUNS = """
SELECT run_uuid, name, status, start_time, end_time, artifact_uri, experiment_id FROM runs
WHERE lifecycle_stage = 'active' AND run_uuid """
INPUTS = f"""
SELECT inputs.destination_id, datasets.name, datasets.digest, coalesce(context.value, ''), datasets.dataset_source,
datasets.dataset_profile FROM inputs
JOIN datasets ON datasets.dataset_uuid = inputs.source_id
LEFT JOIN input_tags AS context ON context.input_uuid = inputs.input_uuid AND context.name = 'mlflow.data.context'
WHERE inputs.source_type = 'DATASET' AND inputs.destination_type = 'RUN' AND inputs.destination_id {AMONG}
ORDER BY datasets.name
"""


@final
class Database:
    """The home's own MLflow, for questions alone. Raises sqlite3.Error where it is of another schema, or damaged."""

    def __init__(self, home: Path) -> None:
        self._home = home.resolve()
        self._path = database_of(self._home)
        self._connection: sqlite3.Connection | None = None
        self._lock = threading.Lock()

    def runs(self, ids: Iterable[str]) -> dict[str, Tracked]:
        """The runs of these ids that there are and that were not deleted, by id."""
        among = (json.dumps(sorted(set(ids))),)
        with self._open() as db:
            found = db.execute(RUNS + AMONG, among).fetchall()
            params, tags = _grouped(db, "params", among), _grouped(db, "tags", among)
            metrics: dict[str, dict[str, float]] = defaultdict(dict)
            latest = f"SELECT run_uuid, key, value, is_nan FROM latest_metrics WHERE run_uuid {AMONG}"
            for run_id, key, value, is_nan in db.execute(latest, among):
                metrics[run_id][key] = math.nan if is_nan else value
            inputs: dict[str, list[InputView]] = defaultdict(list)
            for run_id, *columns in db.execute(INPUTS, among):
                inputs[run_id].append(input_of(*columns))
            moved = self._moved(db)
        return {
            run_id: Tracked(
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
            for run_id, name, status, started, ended, uri, experiment in found
        }

    def told_identities(self) -> frozenset[str]:
        """Identities of the runs whose outcome is known, those that were deleted in MLflow among them."""
        ended = "SELECT run_uuid FROM tags WHERE key = 'ttrain.outcome'"
        with self._open() as db:
            return frozenset(
                value for (value,) in db.execute(f"SELECT value FROM tags WHERE key = 'ttrain.id' AND run_uuid IN ({ended})")
            )

    def with_tags(self, key: str, values: Iterable[str]) -> list[str]:
        """Ids of the runs whose tag has one of these values, the newest first."""
        ask = f"""SELECT runs.run_uuid FROM tags JOIN runs ON runs.run_uuid = tags.run_uuid
        WHERE runs.lifecycle_stage = 'active' AND tags.key = ? AND tags.value {AMONG} ORDER BY runs.start_time DESC"""
        with self._open() as db:
            return [row[0] for row in db.execute(ask, (key, json.dumps(sorted(set(values)))))]

    def history(self, run_id: str, metric: str) -> list[tuple[int, int, float]]:
        """(step, milliseconds since 1970, value) of a metric, as it was logged."""
        # NaN comes as NULL, which costs nothing where there is none
        ask = """SELECT step, timestamp, CASE WHEN is_nan THEN NULL ELSE value END FROM metrics
        WHERE run_uuid = ? AND key = ? ORDER BY step, timestamp"""
        with self._open() as db:
            rows: list[tuple[int, int, float | None]] = db.execute(ask, (run_id, metric)).fetchall()
        return [(step, when, math.nan if value is None else value) for step, when, value in rows]

    def curves(self, run_id: str) -> list[str]:
        """Names of the metrics that were logged at a step; the figures of a whole run stand at step 0."""
        ask = "SELECT key FROM latest_metrics WHERE run_uuid = ? AND step > 0 ORDER BY key"
        with self._open() as db:
            return [row[0] for row in db.execute(ask, (run_id,))]

    def tags_under(self, name: str, alias: str) -> dict[str, str]:
        """Tags of the version of a registered model that bears the alias; {} where none does."""
        ask = """SELECT tags.key, tags.value FROM model_version_tags AS tags JOIN registered_model_aliases AS aliases
        ON aliases.name = tags.name AND aliases.version = tags.version WHERE aliases.name = ? AND aliases.alias = ?"""
        with self._open() as db:
            return dict(db.execute(ask, (name, alias)).fetchall())

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """The one connection: a new one reads MLflow's schema of 60 tables first, 1 ms for each of hundreds of curves."""
        with self._lock:
            if self._connection is None:
                if not self._path.exists():
                    raise sqlite3.OperationalError(f"{self._path} does not exist")
                where = f"{self._path.as_uri()}?mode=ro"
                self._connection = sqlite3.connect(where, uri=True, timeout=10, check_same_thread=False)
                weakref.finalize(self, self._connection.close)
            yield self._connection

    def _moved(self, db: sqlite3.Connection) -> tuple[str, str]:
        """(where this home was when its places were written, where it is now), as URIs; MLflow's places are absolute."""
        recorded = None
        with contextlib.suppress(sqlite3.OperationalError):  # a database that ttrain has not opened yet
            recorded = db.execute("SELECT path FROM ttrain_home").fetchone()
        return Path(recorded[0] if recorded else self._home).as_uri(), self._home.as_uri()


def _grouped(db: sqlite3.Connection, table: str, among: Sequence[str]) -> Mapping[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for run_id, key, value in db.execute(f"SELECT run_uuid, key, value FROM {table} WHERE run_uuid {AMONG}", among):
        found[run_id][key] = value
    return found


def input_of(name: str, digest: str, context: str, source: str, profile: str | None) -> InputView:
    """A data set from the columns of MLflow; a profile that is no JSON object counts nothing."""
    counts: object = None
    with contextlib.suppress(ValueError):
        counts = parse_json(profile or "null")
    return InputView(name, digest, context, source, counts if isinstance(counts, dict) else {})
