"""SQLite files: whether one is damaged, setting a damaged one aside, and creating one from a schema."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

from ttrain.core.files import temporary_path

CHECK_STEPS = 10_000  # of SQLite's virtual machine, between two looks at the clock
# The file need not be durable before it is renamed: without this, migrations flush it some 400 times.
HASTY = "PRAGMA synchronous = OFF; PRAGMA journal_mode = MEMORY;"
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


def revision_of_schema(schema: str) -> str:
    """The revision of Alembic that the text of a schema ends at."""
    insertion = re.search(r"""INSERT INTO "alembic_version" VALUES\('(\w+)'\)""", schema)
    return insertion[1] if insertion else ""


def create(database: Path, fill: str | Callable[[Path], None]) -> None:
    """Create a database in a temporary file and rename it: a kill meanwhile leaves no unusable file.

    `fill` is its schema, or fills the temporary file. A database that another process has made meanwhile stays.
    """
    temporary = temporary_path(database)
    temporary.unlink(missing_ok=True)
    try:
        if callable(fill):
            fill(temporary)
        else:
            with contextlib.closing(sqlite3.connect(temporary)) as db:
                db.executescript(f"{HASTY}\n{fill}")
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        if database.exists() and not database.stat().st_size:  # opened, and never written
            database.unlink(missing_ok=True)
        try:
            os.link(temporary, database)
        except FileExistsError:
            return
        except OSError:  # no second names on this disk
            temporary.replace(database)
    finally:
        temporary.unlink(missing_ok=True)
