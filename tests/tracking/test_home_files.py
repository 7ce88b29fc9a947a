"""The database and the files of a home: in any path, made quietly, upgraded, linked, copied, moved, damaged; real MLflow."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.tracked_stores import opened
from ttrain.tracking.uploads import LINK_FROM_BYTES

from ttrain.errors import TrackingError
from ttrain.tracking import MlflowStore, NullStore, TrackedRun, open_store, prepare, repair_moved_home, tracking_uri
from ttrain.tracking import database as databases


@pytest.fixture
def odd_home(tmp_path: Path, add_database: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh home, in a path that a careless URI would break."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    add_database(home := tmp_path / "a home #1 50%")
    return home


def started(store: MlflowStore, run_id: str | None = None) -> TrackedRun:
    return store.start_run("stage", run_id=run_id, tags={}, params={})


def test_a_fresh_home_is_made_quietly_and_keeps_everything_under_itself(tmp_path: Path) -> None:
    code = (
        "import pathlib; from ttrain.tracking import open_store\n"
        "s = open_store(pathlib.Path('home'), 'x')\n"
        "r = s.start_run('r', run_id=None, parent_run_id=None, tags={}, params={'a': 1})\n"
        "r.log_text('hello', 'a/b.txt'); r.log_summary({'x': 1.0}); r.finish('FINISHED')"
    )
    environment = {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout + done.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert {path.name for path in (tmp_path / "home" / "mlflow").iterdir()} == {"mlflow.db", "mlflow.lock", "artifacts"}
    assert [(tmp_path / "home" / name).stat().st_mode & 0o777 for name in ("mlflow", "tracking")] == [0o700, 0o700]


def test_an_older_schema_is_upgraded_and_the_old_database_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from alembic import command
    from alembic.script import ScriptDirectory
    from mlflow.store.db import utils
    from sqlalchemy import event

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "mlflow").mkdir()
    engine = utils.create_sqlalchemy_engine(tracking_uri(tmp_path))
    event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF"))
    utils.InitialBase.metadata.create_all(engine)
    config = utils._get_alembic_config(tracking_uri(tmp_path))
    older = ScriptDirectory.from_config(config).get_revision("head").down_revision
    assert isinstance(older, str)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, older)
    started(opened(tmp_path))
    assert databases.revision_of(tmp_path / "mlflow" / "mlflow.db") == utils._get_latest_schema_revision()
    assert databases.revision_of(tmp_path / "mlflow" / f"mlflow-{older}.db") == older


def test_every_location_in_the_schema_is_known(migrated_database: Path) -> None:
    not_on_disk = {("mcp_server_versions", "source"), ("evaluation_dataset_records", "source")}
    with closing(sqlite3.connect(migrated_database)) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = {(table, row[1]) for table in tables for row in db.execute(f"PRAGMA table_info({table})")}
    suspects = {(t, c) for t, c in columns if re.search(r"location|artifact_(uri|root)|directory|^(dataset_)?source$", c)}
    known = set(databases.LOCATIONS) - {("trace_tags", "value")}
    assert suspects - not_on_disk == known


def test_a_database_that_is_none_costs_a_warning_which_names_the_cure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "mlflow.db").write_text("not a database, but longer than nothing" * 100)
    assert opened(tmp_path).close() == 0
    assert len(caplog.records) == 1 and "`ttrain track repair`" in caplog.text
    prepare(tmp_path)
    assert len(caplog.records) == 2 and "cannot be prepared" in caplog.text


def test_a_database_of_a_later_mlflow_is_refused_and_stays_as_it_is(
    tracked_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = databases.database_of(tracked_home)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
    before = path.read_bytes()
    with pytest.raises(TrackingError, match="revision ffffffffffff is unknown to the installed MLflow"):
        prepare(tracked_home)
    assert isinstance(open_store(tracked_home, "ttrain"), NullStore) and "install that version again" in caplog.text
    assert path.read_bytes() == before and [file.name for file in path.parent.glob("*.db")] == [path.name]


def test_preparing_makes_the_homes_own_database_wherever_runs_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://there:5000")
    prepare(tmp_path)
    with closing(sqlite3.connect(tmp_path / "mlflow" / "mlflow.db")) as db:
        places = db.execute("SELECT name, artifact_location FROM experiments").fetchall()
    assert places == [("Default", f"{(tmp_path / 'mlflow' / 'artifacts').as_uri()}/0")]


def test_a_big_file_is_linked_and_a_small_one_copied(odd_home: Path) -> None:
    run, checkpoint = started(opened(odd_home)), odd_home / "work" / "step-10"
    (checkpoint / "nested").mkdir(parents=True)
    (checkpoint / "weights").write_bytes(b"w" * LINK_FROM_BYTES)
    (checkpoint / "nested" / "state.json").write_text("{}")
    run.log_directory(checkpoint, "checkpoint")
    run.log_directory(checkpoint, "checkpoint")
    run.log_file(checkpoint / "weights", "best")
    root = odd_home / "mlflow" / "artifacts" / run.id / "artifacts"
    weights = {path.stat().st_ino for path in (checkpoint / "weights", root / "checkpoint/weights", root / "best/weights")}
    assert len(weights) == 1
    state = root / "checkpoint" / "nested" / "state.json"
    assert (state.read_text(), state.stat().st_nlink) == ("{}", 1)
    assert {info.path for info in run.store.client.list_artifacts(run.id)} == {"checkpoint", "best"}
    assert len([path for path in root.rglob("*") if path.is_file()]) == 3


def test_a_link_that_cannot_be_is_a_copy(odd_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_disk(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", other_disk)
    run = started(opened(odd_home))
    (odd_home / "weights").write_bytes(b"w" * LINK_FROM_BYTES)
    run.log_file(odd_home / "weights", "model")
    copy = odd_home / "mlflow" / "artifacts" / run.id / "artifacts" / "model" / "weights"
    assert (copy.stat().st_size, copy.stat().st_nlink) == (LINK_FROM_BYTES, 1)


def test_mending_rewrites_each_form_once_even_into_a_nested_home(odd_home: Path) -> None:
    opened(odd_home)
    nested = odd_home / "inner"
    (nested / "mlflow").mkdir(parents=True)
    shutil.copy(odd_home / "mlflow" / "mlflow.db", nested / "mlflow" / "mlflow.db")
    database = nested / "mlflow" / "mlflow.db"
    with closing(sqlite3.connect(database)) as db, db:
        db.execute(
            "INSERT INTO experiments (experiment_id, name, artifact_location) VALUES (7, 'path', ?)", (f"{odd_home}/x",)
        )
        db.execute("INSERT INTO experiments (experiment_id, name, artifact_location) VALUES (8, 'far', 's3://bucket/x')")
        source = json.dumps({"uri": f"{odd_home}/data.jsonl"})
        row = ("u", 7, "n", "d", "local", source)
        columns = "dataset_uuid, experiment_id, name, digest, dataset_source_type, dataset_source"
        db.execute(f"INSERT INTO datasets ({columns}) VALUES (?, ?, ?, ?, ?, ?)", row)
    assert repair_moved_home(nested) == 4
    assert repair_moved_home(nested) == 0
    with closing(sqlite3.connect(database)) as db:
        places = dict(db.execute("SELECT name, artifact_location FROM experiments"))
        datasets = [json.loads(text) for (text,) in db.execute("SELECT dataset_source FROM datasets")]
    artifacts = (nested / "mlflow" / "artifacts").as_uri()
    assert places == {"Default": f"{artifacts}/0", "ttrain": artifacts, "path": f"{nested}/x", "far": "s3://bucket/x"}
    assert datasets == [{"uri": f"{nested}/data.jsonl"}]
