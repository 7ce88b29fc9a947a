"""The home's own Prefect database, which holds the history of runs: created in a moment, set aside where it is damaged."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sqlite3
from importlib.metadata import version
from pathlib import Path
from urllib.parse import quote

from ttrain.core.files import private_directory
from ttrain.core.sqlite_files import create, damage_of, revision_of_schema, set_aside
from ttrain.errors import UsageError

log = logging.getLogger("ttrain")
SCHEMA = Path(__file__).with_name("prefect_schema.sql")  # tests/core/test_schemas.py writes it
# Below the folder of the package: a file for each revision.
MIGRATIONS = "server/database/_migrations/versions/sqlite"
ELSEWHERE = ("PREFECT_SERVER_DATABASE_", "PREFECT_API_DATABASE_")  # variables that name another database


def database_of(home: Path) -> Path:
    return home.resolve() / "prefect" / "prefect.db"


def prepare(home: Path) -> None:
    """Create the database from the shipped schema, where a server of this home is about to make one by its own migrations.

    With these `ttrain up` takes 24 s in a fresh home on two idle cores, without them 11 s. A server of a newer Prefect goes
    on from the schema's revision; one that does not know it makes its own. Raises UsageError where an existing database is
    of a version of Prefect that the installed one does not know.
    """
    database = database_of(home)
    is_elsewhere = any(name.startswith(ELSEWHERE) for name in os.environ)
    if is_elsewhere or os.environ.get("PREFECT_HOME", str(database.parent)) != str(database.parent):
        return
    if database.exists():
        _check_revision(database)
        return
    schema = SCHEMA.read_text(encoding="utf-8")
    if _is_known(revision_of_schema(schema)):
        with contextlib.suppress(OSError, sqlite3.Error):  # then the server tries, and says what is wrong
            private_directory(database.parent, closes_files=False)
            create(database, schema)


def _check_revision(database: Path) -> None:
    """Raise UsageError where another version of Prefect wrote the database: the server ends with 80 lines of Alembic's."""
    revision = None
    with contextlib.suppress(sqlite3.Error, TypeError):  # damaged, or empty
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True, timeout=1.0)) as db:
            revision = str(db.execute("SELECT version_num FROM alembic_version").fetchone()[0])
    if revision and not _is_known(revision):
        raise UsageError(
            f"{database} was written by another version of Prefect: its revision {revision} is unknown to the installed "
            f"Prefect {version('prefect')}; install that version again, or move the file away, which loses the history of "
            f"runs alone; --engine none runs without Prefect"
        )


def _is_known(revision: str) -> bool:
    """Whether the installed Prefect has a migration to this revision."""
    package = importlib.util.find_spec("prefect")
    assert package is not None and package.origin is not None, "a requirement of ttrain"
    newest_first = sorted((Path(package.origin).parent / MIGRATIONS).glob("*.py"), reverse=True)  # names begin with dates
    texts = (path.read_text(encoding="utf-8") for path in newest_first)  # not all names have the revision
    return bool(revision) and any(revision in text for text in texts)


def set_damaged_aside(home: Path, seconds: float | None = None) -> bool:
    """Set the database aside for a new one if it is damaged; returns whether it was. `seconds`: limit of the check.

    It holds only the history of runs: schedules are files of the home, and `ttrain pipeline serve` deploys them anew.
    """
    database = database_of(home)
    damage = damage_of(database, seconds)
    if damage is None:
        return False
    aside = set_aside(database)
    log.warning(
        "Prefect's database %s is damaged (%s): it is kept as %s, and a new one begins without the history of runs",
        database, damage, aside.name,
    )  # fmt: skip
    return True
