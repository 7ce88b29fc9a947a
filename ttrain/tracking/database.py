"""The home's own MLflow database: created atomically, backed up before an upgrade, repaired after a move."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
from importlib import import_module
from pathlib import Path
from typing import Any

from ttrain.core import sqlite_files
from ttrain.core.files import exclusive, private_directory
from ttrain.core.sqlite_files import damage_of, is_damage, set_aside
from ttrain.errors import TrackingError
from ttrain.tracking.calls import first_line

log = logging.getLogger("ttrain")

# Every column of MLflow 3.17's schema that holds a location on disk; a test reads the schema and names a new one.
LOCATIONS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
    ("logged_models", "artifact_location"),
    ("workspaces", "default_artifact_root"),
    ("workspaces", "trace_archival_location"),
    ("trace_tags", "value"),
    ("datasets", "dataset_source"),
)


REPAIR = "`ttrain track repair` sets the file aside and brings MLflow up to date from the home"
UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
SCHEMA = Path(__file__).with_name("mlflow_schema.sql")  # tests/core/test_schemas.py writes it
LOCKED_SECONDS = 10.0  # to wait for a file that another program is writing


def database_of(home: Path) -> Path:
    return home.resolve() / "mlflow" / "mlflow.db"


def champions_file(home: Path) -> Path:
    """The record of the champions that the database last told."""
    return database_of(home).with_name("champions.json")


def is_missing(uri: str, home: Path) -> bool:
    """Whether the URI names the home's own database, and that does not exist yet: a query would create it."""
    return uri == f"sqlite:///{database_of(home)}" and not database_of(home).exists()


def artifacts_of(home: Path) -> str:
    """The artifact root as a URI: a plain path with a space, % or # would be misread."""
    return (home.resolve() / "mlflow" / "artifacts").as_uri()


def open_client(uri: str, home: Path) -> Any:
    """Open a client; the home's own database is created, migrated and repaired under a lock, since two may start at once."""
    database = database_of(home)
    if uri != f"sqlite:///{database}":
        return _client(uri)
    if "?" in str(database):
        raise ValueError("a home whose path contains '?' cannot be named in a database URL; move it")
    import_module("mlflow.store.tracking.sqlalchemy_store")  # 1.5 s that another process need not wait for
    private_directory(database.parent, closes_files=False)
    os.environ["SQLITE_TMPDIR"] = str(database.parent)
    try:
        with exclusive(database.with_name("mlflow.lock")):
            _migrate(database)
            client = _client(uri)
            repair_moved_home(home)
            return client
    except OSError as error:
        if error.errno not in UNWRITABLE or not database.exists():
            raise
        return _client(uri)  # a home that cannot be written can be read
    except Exception as error:
        if not is_damage(error):
            raise
        raise DamagedDatabaseError(f"{database} is damaged ({first_line(error)}); {REPAIR}") from error


def set_damaged_aside(home: Path) -> tuple[str, Path] | None:
    """Move a damaged database aside, with the record of its champions; return (damage, new path), or None if it is whole or
    missing."""
    database = database_of(home)
    if not database.exists():
        return None
    with exclusive(database.with_name("mlflow.lock")):
        if (damage := damage_of(database)) is None:
            return None
        champions_file(home).unlink(missing_ok=True)
        return damage, set_aside(database)


class DamagedDatabaseError(Exception):
    """The home's own database is damaged; the message names the command that helps."""


class OtherVersionError(TrackingError):
    """A version of MLflow that the installed one does not know has written the home's own database."""


def _client(uri: str) -> Any:
    client = import_module("mlflow").MlflowClient(uri, uri)
    if not uri.startswith(("http://", "https://")):
        client.search_registered_models(max_results=1)  # opens the registry's half too, before threads start
    return client


def _migrate(database: Path) -> None:
    """Create the schema, or back up and upgrade an older one."""
    tools = import_module("mlflow.store.db.utils")
    if not database.exists() or not database.stat().st_size:
        _create_database(database, tools)
    elif (revision := revision_of(database)) != tools._get_latest_schema_revision():
        if revision not in _revisions(tools):
            raise OtherVersionError(
                f"{database} was written by another version of MLflow: its revision {revision} is unknown to the installed "
                f"MLflow {import_module('mlflow').__version__}; install that version again"
            )
        backup = database.with_name(f"mlflow-{revision}.db")
        with contextlib.closing(sqlite3.connect(database)) as db, contextlib.closing(sqlite3.connect(backup)) as copy:
            db.backup(copy)
        engine = tools.create_sqlalchemy_engine(f"sqlite:///{database}")
        tools._upgrade_db(engine)
        engine.dispose()
        log.info("MLflow's schema is upgraded; the database as it was is kept in %s", backup)


def _revisions(tools: Any) -> set[str]:
    """All revisions that the installed MLflow has migrations to."""
    scripts = import_module("alembic.script").ScriptDirectory.from_config(tools._get_alembic_config(""))
    return {script.revision for script in scripts.walk_revisions()}


def _create_database(database: Path, tools: Any) -> None:
    """Create it from the shipped schema where that is of the installed MLflow: 0.01 s. Else by its 67 migrations: 0.8 s."""
    schema = SCHEMA.read_text(encoding="utf-8")

    def migrate(temporary: Path) -> None:
        engine = tools.create_sqlalchemy_engine(f"sqlite:///{temporary}")
        listen = import_module("sqlalchemy").event.listen
        listen(engine, "connect", lambda connection, _: connection.executescript(sqlite_files.HASTY))
        tools._initialize_tables(engine)
        engine.dispose()

    is_newest = sqlite_files.revision_of_schema(schema) == tools._get_latest_schema_revision()
    sqlite_files.create(database, schema if is_newest else migrate)


def revision_of(database: Path) -> str:
    with contextlib.closing(sqlite3.connect(database, timeout=LOCKED_SECONDS)) as db:
        return str(db.execute("SELECT version_num FROM alembic_version").fetchone()[0])


def try_to_write(database: Path) -> None:
    """Begin and end a write; raises sqlite3.OperationalError if another program is writing."""
    with contextlib.closing(sqlite3.connect(database, timeout=0.1, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        db.execute("ROLLBACK")


def repair_moved_home(home: Path) -> int:
    """Point the database of a moved or copied home at this home instead of the recorded one.

    MLflow stores absolute locations, so a copy would go on writing into the original. Only this database is touched, in
    one transaction with the record. Returns the number of values rewritten. Call it before a server opens the database.
    """
    home, changed = home.resolve(), 0
    if not database_of(home).exists():
        return 0
    with contextlib.closing(sqlite3.connect(database_of(home), timeout=LOCKED_SECONDS, isolation_level=None)) as db:
        with contextlib.suppress(sqlite3.OperationalError):  # no such table: ttrain did not create it
            if db.execute("SELECT path FROM ttrain_home").fetchone() == (str(home),):
                return 0  # without a write lock, for which it may have to wait
        db.execute("BEGIN IMMEDIATE")
        db.execute("CREATE TABLE IF NOT EXISTS ttrain_home (path TEXT NOT NULL)")
        recorded = db.execute("SELECT path FROM ttrain_home").fetchone()
        if recorded is None:
            # MLflow puts the Default experiment, which it creates itself, under the working directory
            location = f"{artifacts_of(home)}/0"
            unused = "experiment_id = 0 AND NOT EXISTS (SELECT 1 FROM runs WHERE experiment_id = 0)"
            db.execute(f"UPDATE experiments SET artifact_location = ? WHERE {unused}", (location,))
        elif recorded[0] != str(home):
            changed = sum(_rewrite(db, table, column, Path(recorded[0]), home) for table, column in LOCATIONS)
        if recorded is None or recorded[0] != str(home):
            db.execute("DELETE FROM ttrain_home")
            db.execute("INSERT INTO ttrain_home VALUES (?)", (str(home),))
        db.execute("COMMIT")
    return changed


def _rewrite(db: sqlite3.Connection, table: str, column: str, old: Path, new: Path) -> int:
    """Rewrite one column, as a path, as a URI and inside JSON; return the number of values."""
    if column not in {row[1] for row in db.execute(f"PRAGMA table_info({table})")}:
        return 0
    changed = 0
    for old_prefix, new_prefix in ((f"{old}/", f"{new}/"), (f"{old.as_uri()}/", f"{new.as_uri()}/")):
        prefix = f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?"
        changed += db.execute(prefix, (new_prefix, len(old_prefix) + 1, len(old_prefix), old_prefix)).rowcount
        inside = f"UPDATE {table} SET {column} = replace({column}, ?, ?) WHERE instr({column}, ?)"
        changed += db.execute(inside, (f'"{old_prefix}', f'"{new_prefix}', f'"{old_prefix}')).rowcount
    return changed
