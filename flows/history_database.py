"""The home's own Prefect database, which holds the history of runs: created in a moment, set aside where it is damaged."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sqlite3
from pathlib import Path

from ttrain.core.files import private_directory
from ttrain.core.sqlite_files import create, damage_of, revision_of_schema, set_aside

log = logging.getLogger("ttrain")
SCHEMA = Path(__file__).with_name("prefect_schema.sql")  # tests/core/test_schemas.py writes it
# Below the folder of the package: a file for each revision, with its name within.
MIGRATIONS = "server/database/_migrations/versions/sqlite"
ELSEWHERE = ("PREFECT_SERVER_DATABASE_", "PREFECT_API_DATABASE_")  # variables that name another database


def database_of(home: Path) -> Path:
    return home.resolve() / "prefect" / "prefect.db"


def prepare(home: Path) -> None:
    """Create the database from the shipped schema, where a server of this home is about to make one by its own migrations.

    With these `ttrain up` takes 24 s in a fresh home on two idle cores, without them 11 s. A server of a newer Prefect goes
    on from the schema's revision; one that does not know it makes its own.
    """
    database = database_of(home)
    is_elsewhere = any(name.startswith(ELSEWHERE) for name in os.environ)
    if database.exists() or is_elsewhere or os.environ.get("PREFECT_HOME", str(database.parent)) != str(database.parent):
        return
    schema = SCHEMA.read_text(encoding="utf-8")
    package = importlib.util.find_spec("prefect")
    assert package is not None and package.origin is not None, "a requirement of ttrain"
    if any((Path(package.origin).parent / MIGRATIONS).glob(f"*_{revision_of_schema(schema)}_*.py")):
        with contextlib.suppress(OSError, sqlite3.Error):  # then the server tries, and says what is wrong
            private_directory(database.parent, closes_files=False)
            create(database, schema)


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
