"""SQLite files: detect damage, rename a damaged file aside."""

import contextlib
import sqlite3
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

SIDE_FILES = ("-wal", "-shm", "-journal")
DAMAGED = (
    "file is not a database",
    "disk image is malformed",
    "malformed database schema",
    "unsupported file format",
)


def is_damage(error: object) -> bool:
    """Whether an error's text reports a damaged SQLite file, through any library."""
    return any(phrase in str(error) for phrase in DAMAGED)


def damage_of(database: Path) -> str | None:
    """SQLite's report on the file; None if it is good or absent. 200 MB take a second."""
    if not database.is_file():
        return None
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True, timeout=1.0)
        ) as db:
            answer = str(db.execute("PRAGMA quick_check(1)").fetchone()[0])
            return None if answer == "ok" else answer
    except sqlite3.Error as error:
        return str(error) if is_damage(error) else None


def set_aside(database: Path) -> Path:
    """Rename a file and its journals to `mlflow.db.damaged-20261121-160222`; return the path."""
    aside = database.with_name(f"{database.name}.damaged-{datetime.now():%Y%m%d-%H%M%S}")
    # The file last: after a kill in between the rest is renamed next time.
    for ending in (*SIDE_FILES, ""):
        with contextlib.suppress(FileNotFoundError):
            database.with_name(database.name + ending).rename(aside.with_name(aside.name + ending))
    return aside
