"""A home with three registered sets of models."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.tracked_stores import opened

from ttrain import tracking
from ttrain.tracking import ModelSet
from ttrain.tracking import database as databases
from ttrain.tracking.database import database_of

SUFFIXES = {"pretrain": "base", "lora": "lora"}  # two of the four of a run: each costs a write more wherever an alias moves


def register(home: Path, number: int, stages: Any = SUFFIXES, name: str = "mine", **metrics: float) -> str | None:
    """The set of a run: a member for each stage, whose keys tell its number."""
    store = opened(home)
    run = store.start_run(f"full-{number}", tags={}, params={})
    models = []
    for stage in stages:
        model, key = f"{name}-{SUFFIXES[stage]}", f"{stage}-{number}"
        run.log_text(key, f"{stage}/x.txt")
        tags = {"ttrain.stage": stage, "ttrain.key": key, "ttrain.content": key}
        version = store.register_model(model, run=run, artifact_path=stage, tags=tags)
        assert version is not None or store.is_http, "it waits for files that go over the network, and for nothing else"
        models.append({"name": model, "stage": stage, "tags": tags, "artifact_path": stage, "path": None})
    keys = {**{stage: f"{stage}-{number}" for stage in stages}, "evaluate": f"evaluate-{number}"}
    figures = {"bits_per_byte": 2 - number / 10, **metrics}
    return store.register_models(name, run=run, run_name=f"full-{number}", models=models, keys=keys, metrics=figures)


@pytest.fixture(scope="session")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with three sets, none of them champion; made once, since its database takes 1 s to make."""
    home = tmp_path_factory.mktemp("three")
    assert [register(home, number) for number in (1, 2, 3)] == ["1", "2", "3"]
    return home


@pytest.fixture(scope="session")
def used(three: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one home that all tests use: to open another one costs MLflow 0.3 s."""
    home = tmp_path_factory.mktemp("used") / "a home"
    (home / "mlflow").mkdir(parents=True)
    return home


@pytest.fixture
def sets_home(used: Path, three: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """It with three sets, none of them champion."""
    monkeypatch.setenv("TTRAIN_HOME", str(used))
    for left in ("store", "runs"):
        shutil.rmtree(used / left, ignore_errors=True)
    return restored(used, database_of(three))


def restored(home: Path, kept: Path) -> Path:
    """The home with the database as it was kept; written over in place, since MLflow holds connections to it."""
    with closing(sqlite3.connect(kept)) as old, closing(sqlite3.connect(database_of(home))) as new:
        old.backup(new)
    return home


def kept(home: Path, path: Path) -> Path:
    """A copy of the home's database."""
    with closing(sqlite3.connect(database_of(home))) as old, closing(sqlite3.connect(path)) as new:
        old.backup(new)
    return path


def client_of(home: Path) -> Any:
    return databases.open_client(tracking.tracking_uri(home.resolve()), home.resolve())


def aliases(home: Path, alias: str = "champion") -> dict[str, str]:
    """Where an alias stands, on all registered models, as the database has it, where nobody mends it."""
    with closing(sqlite3.connect(database_of(home))) as db:
        rows = db.execute("SELECT name, version FROM registered_model_aliases WHERE alias = ?", (alias,))
        return {str(name): str(version) for name, version in rows}


def history(home: Path) -> str:
    with closing(sqlite3.connect(database_of(home))) as db:
        row = db.execute(
            "SELECT value FROM registered_model_tags WHERE name = 'mine' AND key = 'ttrain.champions'"
        ).fetchone()
        return str(row[0]) if row else ""


def everywhere(version: str, name: str = "mine") -> dict[str, str]:
    return {name: version, **{f"{name}-{suffix}": version for suffix in SUFFIXES.values()}}


def champion(home: Path) -> ModelSet:
    found = tracking.Champions(home).champion("mine")
    assert found is not None
    return found


def state(home: Path) -> tuple[str, dict[str, str], dict[str, str]]:
    return history(home), aliases(home), aliases(home, "challenger")
