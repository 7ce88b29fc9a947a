"""The home's own MLflow database: made whole or not at all, upgraded with a copy kept, mended after a move."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
from importlib import import_module
from pathlib import Path
from typing import Any, Final, final

from ttrain.core.files import private_directory
from ttrain.core.sqlite_files import damage_of, is_damage, set_aside
from ttrain.tracking.calls import first_line

log = logging.getLogger("ttrain")

# Every column of MLflow 3.17's schema that holds a place on disk; a test reads the schema and names a new one.
LOCATIONS: Final = (
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


REPAIR: Final = "`ttrain track repair` sets the file aside and brings MLflow up to date from the home"
UNWRITABLE: Final = (errno.EROFS, errno.EACCES, errno.EPERM)
LOCKED_SECONDS = 10.0  # that a file which another program is writing to is waited for


def database_of(home: Path) -> Path:
    return home.resolve() / "mlflow" / "mlflow.db"


def artifacts_of(home: Path) -> str:
    """As a URI, for a path with a space, % or # would be read wrongly."""
    return (home.resolve() / "mlflow" / "artifacts").as_uri()


def open_client(uri: str, home: Path) -> Any:
    """A client; the home's own database is made, migrated and mended under a lock, since two may start at once."""
    database = database_of(home)
    if uri != f"sqlite:///{database}":
        return _client(uri)
    if "?" in str(database):
        raise ValueError("a home whose path contains '?' cannot be named in a database URL; move it")
    from filelock import FileLock

    import_module("mlflow.store.tracking.sqlalchemy_store")  # 1.5 s that another process need not wait for
    private_directory(database.parent, closes_files=False)
    os.environ["SQLITE_TMPDIR"] = str(database.parent)
    try:
        with FileLock(database.with_name("mlflow.lock")):
            _migrate(database)
            client = _client(uri)
            mend_moved_home(home)
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
    """What is wrong with the home's database and where it is now; None where it is whole, or there is none."""
    from filelock import FileLock

    database = database_of(home)
    if not database.exists():
        return None
    with FileLock(database.with_name("mlflow.lock")):
        damage = damage_of(database)
        return (damage, set_aside(database)) if damage else None


class DamagedDatabaseError(Exception):
    """The home's own database is damaged; the message names the command that helps."""


@final
class Later:
    """A client that could not be opened since its database is locked or damaged: it is opened when it is first used."""

    def __init__(self, uri: str, home: Path) -> None:
        self._uri, self._home = uri, home
        self._client: Any = None

    def __getattr__(self, name: str) -> Any:
        if self._client is None:
            self._client = open_client(self._uri, self._home)
        return getattr(self._client, name)


def _client(uri: str) -> Any:
    client = import_module("mlflow").MlflowClient(uri, uri)
    if not uri.startswith(("http://", "https://")):
        client.search_registered_models(max_results=1)  # the registry's half is opened here too, before threads come
    return client


def _migrate(database: Path) -> None:
    """Makes the schema, or upgrades an older one after keeping a copy."""
    tools = import_module("mlflow.store.db.utils")
    if not database.exists() or not database.stat().st_size:
        _make(database, tools)
    elif (found := revision_of(database)) != tools._get_latest_schema_revision():
        backup = database.with_name(f"mlflow-{found}.db")
        with contextlib.closing(sqlite3.connect(database)) as db, contextlib.closing(sqlite3.connect(backup)) as copy:
            db.backup(copy)
        engine = tools.create_sqlalchemy_engine(f"sqlite:///{database}")
        tools._upgrade_db(engine)
        engine.dispose()
        log.info("MLflow's schema is upgraded; the database as it was is kept in %s", backup)


def _make(database: Path, tools: Any) -> None:
    """A fresh database, made beside and renamed: a kill during the 67 migrations leaves what MLflow cannot go on from.

    So it need not be safe before the rename, and the disk is spared some 400 flushes: 1 s, not 6 s, on a busy one.
    """
    part = database.with_name("mlflow.db.part")
    part.unlink(missing_ok=True)
    engine = tools.create_sqlalchemy_engine(f"sqlite:///{part}")
    hasty = "PRAGMA synchronous = OFF; PRAGMA journal_mode = MEMORY"
    import_module("sqlalchemy").event.listen(engine, "connect", lambda connection, _: connection.executescript(hasty))
    tools._initialize_tables(engine)
    engine.dispose()
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(database)


def revision_of(database: Path) -> str:
    with contextlib.closing(sqlite3.connect(database, timeout=LOCKED_SECONDS)) as db:
        return str(db.execute("SELECT version_num FROM alembic_version").fetchone()[0])


def try_to_write(database: Path) -> None:
    """Raises sqlite3.OperationalError where another program is writing."""
    with contextlib.closing(sqlite3.connect(database, timeout=0.1, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        db.execute("ROLLBACK")


def mend_moved_home(home: Path) -> int:
    """Points the database of a moved or copied home at this home instead of the one it was recorded under.

    MLflow stores absolute locations, so a copy would go on writing into the original. Only this database is touched, in
    one transaction with the record. Returns the number of values rewritten. Call it before a server opens the database.
    """
    home, changed = home.resolve(), 0
    if not database_of(home).exists():
        return 0
    with contextlib.closing(sqlite3.connect(database_of(home), timeout=LOCKED_SECONDS, isolation_level=None)) as db:
        with contextlib.suppress(sqlite3.OperationalError):  # no such table: it was not ttrain that made it
            if db.execute("SELECT path FROM ttrain_home").fetchone() == (str(home),):
                return 0  # without the turn of a writer, for which others may have it wait
        db.execute("BEGIN IMMEDIATE")
        db.execute("CREATE TABLE IF NOT EXISTS ttrain_home (path TEXT NOT NULL)")
        recorded = db.execute("SELECT path FROM ttrain_home").fetchone()
        if recorded is None:
            # MLflow puts the Default experiment, which it makes by itself, under the working directory
            place = f"{artifacts_of(home)}/0"
            unused = "experiment_id = 0 AND NOT EXISTS (SELECT 1 FROM runs WHERE experiment_id = 0)"
            db.execute(f"UPDATE experiments SET artifact_location = ? WHERE {unused}", (place,))
        elif recorded[0] != str(home):
            changed = sum(_rewrite(db, table, column, Path(recorded[0]), home) for table, column in LOCATIONS)
        if recorded is None or recorded[0] != str(home):
            db.execute("DELETE FROM ttrain_home")
            db.execute("INSERT INTO ttrain_home VALUES (?)", (str(home),))
        db.execute("COMMIT")
    return changed


def _rewrite(db: sqlite3.Connection, table: str, column: str, old: Path, new: Path) -> int:
    """Rewrites one column, as a path, as a URI and inside JSON; returns the number of values."""
    if column not in {row[1] for row in db.execute(f"PRAGMA table_info({table})")}:
        return 0
    changed = 0
    for before, after in ((f"{old}/", f"{new}/"), (f"{old.as_uri()}/", f"{new.as_uri()}/")):
        prefix = f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?"
        changed += db.execute(prefix, (after, len(before) + 1, len(before), before)).rowcount
        inside = f"UPDATE {table} SET {column} = replace({column}, ?, ?) WHERE instr({column}, ?)"
        changed += db.execute(inside, (f'"{before}', f'"{after}', f'"{before}')).rowcount
    return changed
