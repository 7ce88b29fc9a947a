"""SQLite files: whether one is damaged, and setting a damaged one aside."""

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
    """Whether an error's text says that a SQLite file is damaged, whichever libraries passed it on."""
    return any(phrase in str(error) for phrase in DAMAGED)


def damage_of(database: Path) -> str | None:
    """What is wrong with the file, in SQLite's words; None where it is whole or absent. 200 MB take a second."""
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
    """Rename the file and what SQLite keeps beside it: `mlflow.db.damaged-20261121-160222`. Returns the new path."""
    aside = database.with_name(f"{database.name}.damaged-{datetime.now():%Y%m%d-%H%M%S}")
    for ending in (
        *SIDE_FILES,
        "",
    ):  # the file last: what is left by a kill in between is set aside next time
        with contextlib.suppress(FileNotFoundError):
            database.with_name(database.name + ending).rename(aside.with_name(aside.name + ending))
    return aside
