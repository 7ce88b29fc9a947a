"""The shipped schema of MLflow's database; `python tests/core/test_schemas.py` writes it anew."""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from importlib import import_module
from pathlib import Path

import pytest

from ttrain.tracking import database


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


def test_the_shipped_schema_is_what_the_migrations_make(tmp_path: Path) -> None:
    same = lines(database.SCHEMA.read_text(encoding="utf-8")) == lines(mlflow_migrated(tmp_path))
    assert same, "write it anew: python tests/core/test_schemas.py"


def test_another_mlflow_creates_its_own_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "schema.sql"
    other.write_text("""CREATE TABLE alembic_version (n); INSERT INTO "alembic_version" VALUES('other');""")
    monkeypatch.setattr(database, "SCHEMA", other)
    database.open_client(f"sqlite:///{database.database_of(tmp_path)}", tmp_path)
    assert database.revision_of(database.database_of(tmp_path)) != "other"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        database.SCHEMA.write_text(mlflow_migrated(Path(temporary)), encoding="utf-8")
