"""MLflow's view of a home, as tests fill, read and compare it."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from ttrain.tracking import pusher
from ttrain.tracking.client import database_of, local_path, tracking_uri


def pushed(home: Path, names: Sequence[str] | None = None) -> list[str | None]:
    results = pusher.push(home, names)
    assert [result.why for result in results if result.why] == []
    return [result.run_id for result in results]


def client_of(home: Path) -> Any:
    from mlflow import MlflowClient

    uri = tracking_uri(home.resolve())
    return MlflowClient(uri, uri)


def tracked(home: Path, identity: str, experiment: str = "ttrain") -> list[Any]:
    client = client_of(home)
    known = client.get_experiment_by_name(experiment)
    query = f"tags.`ttrain.id` = '{identity}'"
    return list(client.search_runs([known.experiment_id], query)) if known else []


def only(home: Path, identity: str, experiment: str = "ttrain") -> Any:
    [run] = tracked(home, identity, experiment)
    return run


def steps(home: Path, run_id: str, key: str = "loss") -> list[int]:
    return sorted(point.step for point in client_of(home).get_metric_history(run_id, key))


def files_of(run: Any) -> dict[str, Path]:
    root = local_path(run.info.artifact_uri)
    assert root
    return {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}


def rows_of_database(home: Path) -> dict[str, list[Any]]:
    with closing(sqlite3.connect(database_of(home))) as db:
        tables = db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        return {
            name: sorted(map(repr, db.execute(f'SELECT * FROM "{name}"'))) for (name,) in tables
        }
