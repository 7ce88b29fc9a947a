"""Troubles of the home's own MLflow and of its disk: locked, emptied, full. Pipelines go on, and say what is missing."""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ttrain import tracking
from ttrain.tracking import Run, Store, open_store, outboxes


@pytest.fixture(scope="module", autouse=True)
def no_telemetry() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in tracking.ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database: migrating takes 1 s, copying and mending 10 ms."""
    home = tmp_path_factory.mktemp("pristine")
    tracking.prepare(home)
    return tracking.database_of(home)


@pytest.fixture
def home(tmp_path: Path, pristine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a database of MLflow."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr("ttrain.tracking.database.LOCKED_SECONDS", 0.2)
    home = tmp_path / "home"
    database(home).parent.mkdir(parents=True)
    shutil.copy(pristine, database(home))
    tracking.mend_moved_home(home)
    return home


def opened(home: Path) -> Store:
    store = open_store(home, "ttrain")
    assert isinstance(store, Store)
    return store


def started(store: Store, name: str = "stage") -> Run:
    run = store.start_run(name, tags={}, params={"lr": 0.02})
    assert isinstance(run, Run)
    return run


def row(step: int) -> dict[str, Any]:
    return {"step": step, "tokens": step, "time": 1.7e9 + step, "metrics": {"loss": 1.0 / step}}


def eventually(true: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.02)


def database(home: Path) -> Path:
    return tracking.database_of(home)


@contextmanager
def locked(home: Path) -> Iterator[None]:
    """Another program is writing to the database, and lets nobody read it either."""
    with closing(sqlite3.connect(database(home), isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield
        other.execute("ROLLBACK")


def test_a_database_that_another_program_locks_holds_nobody_up_and_gets_everything(home: Path) -> None:
    with locked(home):
        store = opened(home)
        began = time.monotonic()
        run = started(store)
        assert not run.log_metrics([row(1), row(2)])
        run.log_summary({"eval/bits_per_byte": 1.5})
        assert time.monotonic() - began < 2, "what cannot be told waits on disk"
        assert [one.things for one in tracking.waiting(home)] == [{"params": 1, "summary": 1, "end": 1}]
    eventually(lambda: not run.waiting())
    assert run.log_metrics([row(1), row(2)])
    run.finish("FINISHED")
    assert store.close() == 0
    found = store.client.get_run(run.id)
    assert (found.info.status, found.data.metrics["eval/bits_per_byte"]) == ("FINISHED", 1.5)
    assert found.data.params == {"lr": "0.02"}


def test_sync_says_that_the_database_is_locked(home: Path) -> None:
    with locked(home):
        store = opened(home)
        started(store).finish("FINISHED")
        assert store.close() == 2
        (left,) = tracking.sync(home)
        assert left.things == {"params": 1, "end": 1} and "database is locked" in left.why
    (done,) = tracking.sync(home)
    assert done.things == {} and not outboxes.found(home)


@pytest.mark.soak
def test_a_lock_in_the_middle_costs_one_wait_of_mlflows(home: Path) -> None:
    """MLflow waits 20 s for its turn to write: once, not with each of the things that a run tells."""
    store = opened(home)
    run = started(store)
    with locked(home):
        began = time.monotonic()
        for step in range(1, 20):
            run.log_summary({f"eval/{step}": 1.0})
        assert time.monotonic() - began < 45
    eventually(lambda: not run.waiting(), 60)
    assert len(store.client.get_run(run.id).data.metrics) == 19
    store.close()


def test_a_full_disk_costs_the_notes_and_nothing_that_mlflow_takes(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(home)
    run = started(store)
    journal = home / "tracking" / run.identity / "journal.jsonl"
    journal.unlink()
    journal.symlink_to("/dev/full")  # every write says: no space left on device
    assert run.log_metrics([row(1)])
    run.log_summary({"eval/bits_per_byte": 1.5})
    run.finish("FINISHED")
    assert store.close() == 0
    assert store.client.get_run(run.id).info.status == "FINISHED"
    assert caplog.text.count("cannot be kept in") == 1 and "lost" not in caplog.text


def test_what_neither_mlflow_nor_the_disk_took_is_said_to_be_lost(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    (home / "tracking").write_text("no directory can be here")
    with locked(home):
        store = opened(home)
        run = started(store)
        run.finish("FINISHED")
        assert store.close() == 2
    assert "was not told 2 things" in caplog.text and "they are lost there" in caplog.text
    assert "track sync" not in caplog.text, "which could tell none of it"


@pytest.mark.parametrize("emptied", [False, True], ids=["experiment deleted", "database emptied"])
def test_runs_after_their_experiment_is_gone_are_in_one_made_anew(
    home: Path, caplog: pytest.LogCaptureFixture, emptied: bool
) -> None:
    store = opened(home)
    before = started(store, "before")
    if emptied:  # as a server is that comes back on another database
        with closing(sqlite3.connect(database(home))) as db, db:
            for table in ("latest_metrics", "metrics", "params", "tags", "runs", "experiment_tags", "experiments"):
                db.execute(f"DELETE FROM {table} WHERE 1" + (" AND experiment_id > 0" if table == "experiments" else ""))
    else:
        store.client.delete_experiment(store.experiment_id())
    assert before.log_metrics([row(step) for step in range(1, 500)]), "no use to try again"
    assert len(caplog.records) == 1, "one warning, not one for each point"
    after = started(store, "after")
    eventually(lambda: not after.waiting())
    assert after.log_metrics([row(1)])
    after.finish("FINISHED")
    assert store.close() == 0
    found = store.client.get_run(after.id)
    assert (found.info.status, found.info.lifecycle_stage) == ("FINISHED", "active")
    assert store.client.get_experiment(found.info.experiment_id).lifecycle_stage == "active"


def test_a_run_deleted_while_its_process_was_gone_is_made_anew_for_what_waits(home: Path) -> None:
    store, path = opened(home), home / "metrics.jsonl"
    run = started(store)
    with locked(home):
        store.asking.is_silent = True
        path.write_text("")
        run.log_summary({"eval/bits_per_byte": 1.5})
        store.close()
    store = tracking.open_reader(home)
    store.client.delete_run(run.id)
    (done,) = tracking.sync(home)
    assert done.things == {}
    (only,) = store.client.search_runs([store.experiment_id("ttrain")], f"tags.`ttrain.id` = '{run.identity}'")
    assert only.info.run_id != run.id and only.data.metrics == {"eval/bits_per_byte": 1.5}
