"""The shipped schema of MLflow's database; `python tests/tracking/test_schema.py` writes that of the installed MLflow."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from pathlib import Path

import pytest

from ttrain.tracking import database


def dump(path: Path) -> str:
    with closing(sqlite3.connect(path)) as db:
        return "\n".join(db.iterdump()) + "\n"


def lines(schema: str) -> list[str]:
    return sorted(line.strip("\t ,") for line in schema.splitlines())


def migrated(directory: Path) -> str:
    """The schema as the migrations of the installed MLflow make it."""
    tools, path = import_module("mlflow.store.db.utils"), directory / "migrated.db"
    engine = tools.create_sqlalchemy_engine(f"sqlite:///{path}")
    tools._initialize_tables(engine)
    engine.dispose()
    return dump(path)


@pytest.fixture
def other_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The shipped schema is of another MLflow than the installed one."""
    (tmp_path / "schema.sql").write_text("CREATE TABLE alembic_version (n); INSERT INTO alembic_version VALUES('other');")
    monkeypatch.setattr(database, "SCHEMA", tmp_path / "schema.sql")
    yield


def test_the_shipped_schema_is_what_the_migrations_make(tmp_path: Path) -> None:
    shipped = database.SCHEMA.read_text(encoding="utf-8")
    # Sorted: which of two indices or constraints comes first differs from migration to migration
    same = lines(shipped) == lines(migrated(tmp_path))
    assert same, "write it anew: python tests/tracking/test_schema.py"


def test_another_mlflow_creates_its_own_schema(tmp_path: Path, other_schema: None) -> None:
    database.open_client(f"sqlite:///{database.database_of(tmp_path)}", tmp_path)
    assert database.revision_of(database.database_of(tmp_path)) != "other"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        database.SCHEMA.write_text(migrated(Path(temporary)), encoding="utf-8")
