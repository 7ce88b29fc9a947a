"""The shipped schemas of MLflow's and Prefect's databases; `python tests/core/test_schemas.py` writes them anew."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ttrain.core import sqlite_files
from ttrain.errors import UsageError
from ttrain.flows import history_database
from ttrain.tracking import database

PREFECT_DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"


def dump(path: Path) -> str:
    with closing(sqlite3.connect(path)) as db:
        return "\n".join(db.iterdump()) + "\n"


def lines(schema: str) -> list[str]:
    """Sorted: which of two indices or constraints comes first differs from migration to migration."""
    return sorted(line.strip("\t ,") for line in schema.splitlines())


def mlflow_migrated(directory: Path) -> str:
    """The schema as the migrations of the installed MLflow make it."""
    tools, path = import_module("mlflow.store.db.utils"), directory / "migrated.db"
    engine = tools.create_sqlalchemy_engine(f"sqlite:///{path}")
    tools._initialize_tables(engine)
    engine.dispose()
    return dump(path)


def prefect_migrated(directory: Path) -> str:
    """The same of the installed Prefect, in a process of its own: 11 s."""
    path = directory / "migrated.db"
    environment = {**os.environ, PREFECT_DATABASE: f"sqlite+aiosqlite:///{path}", "PREFECT_HOME": str(directory)}
    subprocess.run([sys.executable, __file__, "migrate"], env=environment, check=True)
    return dump(path)


SHIPPED = [
    pytest.param(database.SCHEMA, mlflow_migrated, id="mlflow"),
    pytest.param(history_database.SCHEMA, prefect_migrated, id="prefect", marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("schema", "migrated"), SHIPPED)
def test_a_shipped_schema_is_what_the_migrations_make(tmp_path: Path, schema: Path, migrated: Callable[[Path], str]) -> None:
    same = lines(schema.read_text(encoding="utf-8")) == lines(migrated(tmp_path))
    assert same, "write it anew: python tests/core/test_schemas.py"


def test_another_mlflow_creates_its_own_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "schema.sql"
    other.write_text("""CREATE TABLE alembic_version (n); INSERT INTO "alembic_version" VALUES('other');""")
    monkeypatch.setattr(database, "SCHEMA", other)
    database.open_client(f"sqlite:///{database.database_of(tmp_path)}", tmp_path)
    assert database.revision_of(database.database_of(tmp_path)) != "other"


def test_prefect_s_schema_is_of_the_newest_revision() -> None:
    prefect = Path(str(import_module("importlib.util").find_spec("prefect").origin)).parent
    newest = max(path.name for path in (prefect / history_database.MIGRATIONS).glob("2*.py"))  # names begin with dates
    revision = sqlite_files.revision_of_schema(history_database.SCHEMA.read_text(encoding="utf-8"))
    assert f"_{revision}_" in newest, "write it anew: python tests/core/test_schemas.py"


@pytest.fixture
def no_other_database(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith((*history_database.ELSEWHERE, "PREFECT_HOME"))]:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_other_database")
def test_prefect_s_database_is_made_of_the_schema_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, link = history_database.database_of(tmp_path), os.link

    def late(source: Path, target: Path) -> None:
        target.write_bytes(b"the other's")
        link(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", late)
        history_database.prepare(tmp_path)
    assert path.read_bytes() == b"the other's", "what another process makes meanwhile stays"
    path.unlink()
    history_database.prepare(tmp_path)
    assert lines(dump(path)) == lines(history_database.SCHEMA.read_text(encoding="utf-8"))
    assert [file.name for file in path.parent.iterdir()] == [path.name] and path.parent.stat().st_mode & 0o777 == 0o700
    path.write_bytes(b"")
    history_database.prepare(tmp_path)
    assert path.read_bytes() == b"", "what is there is the server's"


@pytest.mark.usefixtures("no_other_database")
@pytest.mark.parametrize("case", ["a revision that is not known", "another database", "another home of Prefect"])
def test_prefect_makes_its_own_database_in(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Callable[[], Any]] = {
        "a revision that is not known": lambda: monkeypatch.setattr(history_database, "SCHEMA", tmp_path / "other.sql"),
        "another database": lambda: monkeypatch.setenv(PREFECT_DATABASE, "postgresql+asyncpg://nowhere/prefect"),
        "another home of Prefect": lambda: monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "other")),
    }
    (tmp_path / "other.sql").write_text("""INSERT INTO "alembic_version" VALUES('ffffffffffff');""")
    changes[case]()
    history_database.prepare(tmp_path)
    assert not history_database.database_of(tmp_path).exists()


@pytest.mark.usefixtures("no_other_database")
def test_a_database_of_another_prefect_is_refused_and_one_of_an_earlier_one_is_not(tmp_path: Path) -> None:
    history_database.prepare(tmp_path)
    for revision in ("4dfa692e02a7", "ffffffffffff"):  # of an earlier Prefect, in no file's name; of a later one
        with closing(sqlite3.connect(path := history_database.database_of(tmp_path))) as db, db:
            db.execute("UPDATE alembic_version SET version_num = ?", (revision,))
        before = path.read_bytes()
        if revision == "ffffffffffff":
            with pytest.raises(UsageError, match="revision ffffffffffff is unknown to the installed Prefect"):
                history_database.prepare(tmp_path)
        else:
            history_database.prepare(tmp_path)
        assert path.read_bytes() == before


if __name__ == "__main__":
    if sys.argv[1:] == ["migrate"]:
        asyncio.run(import_module("prefect.server.database").provide_database_interface().create_db())
    else:
        for schema, migrated in ((database.SCHEMA, mlflow_migrated), (history_database.SCHEMA, prefect_migrated)):
            with tempfile.TemporaryDirectory() as temporary:
                schema.write_text(migrated(Path(temporary)), encoding="utf-8")
