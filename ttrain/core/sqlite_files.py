"""SQLite files: whether one is damaged, and setting a damaged one aside."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

CHECK_STEPS = 10_000  # of SQLite's virtual machine, between two looks at the clock
SIDE_FILES = ("-wal", "-shm", "-journal")
DAMAGED = ("file is not a database", "disk image is malformed", "malformed database schema", "unsupported file format")


def is_damage(error: object) -> bool:
    """Whether an error's text says that a SQLite file is damaged, whichever libraries passed it on."""
    return any(phrase in str(error) for phrase in DAMAGED)


def damage_of(database: Path, seconds: float | None = None) -> str | None:
    """What is wrong with the file, in SQLite's words; None where it is whole, absent, or was not read within `seconds`.

    200 MB take a second; the header alone is read first.
    """
    if not database.is_file():
        return None
    deadline = None if seconds is None else time.monotonic() + seconds
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True, timeout=1.0)) as db:
            if deadline is not None:
                db.set_progress_handler(lambda: time.monotonic() > deadline, CHECK_STEPS)
            answer = str(db.execute("PRAGMA quick_check(1)").fetchone()[0])
            return None if answer == "ok" else " ".join(answer.split())
    except sqlite3.Error as error:  # also: no time left, another program is writing
        return str(error) if is_damage(error) else None


def set_aside(database: Path) -> Path:
    """Rename the file and what SQLite keeps beside it: `mlflow.db.damaged-20261121-160222`. Returns the new path."""
    aside = database.with_name(f"{database.name}.damaged-{datetime.now():%Y%m%d-%H%M%S}")
    for ending in (*SIDE_FILES, ""):  # the file last: what is left by a kill in between is set aside next time
        with contextlib.suppress(FileNotFoundError):
            database.with_name(database.name + ending).rename(aside.with_name(aside.name + ending))
    return aside
