"""Troubles of the home's own MLflow and of its disk: locked, emptied, full. Pipelines go on, and say what is missing."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from killing import killed_everywhere
from waiting import stopwatch

from ttrain import tracking
from ttrain.config import Settings
from ttrain.pipeline.execution import Execution, _Watcher
from ttrain.store import artifacts as artifact_store
from ttrain.tracking import Run, Store, links, open_store, outbox, outboxes
from ttrain.tracking.orphaned_outbox import tell_one

pytestmark = pytest.mark.usefixtures("no_telemetry")


@pytest.fixture
def home(tracked_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a database of MLflow, whose lock is soon given up."""
    monkeypatch.setattr("ttrain.tracking.database.LOCKED_SECONDS", 0.2)
    return tracked_home


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
        waited = stopwatch()
        run = started(store)
        assert not run.log_metrics([row(1), row(2)])
        run.log_summary({"eval/bits_per_byte": 1.5})
        assert waited() < 2, "what cannot be told waits on disk"
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


IDENTITY = "1f" * 16


def unmade(home: Path, name: str, *, age: float = 0.0) -> Path:
    """What a kill leaves between the making of an outbox and the first write in it."""
    directory = home / "tracking" / (name * 16)
    directory.mkdir(parents=True)
    (directory / "lock").touch()
    os.utime(directory, (time.time() - age, time.time() - age))
    return directory


def test_a_run_whose_outbox_was_never_whole_keeps_its_identity(home: Path) -> None:
    left = unmade(home, "1f")
    store = opened(home)
    run = store.start_run("stage", identity=IDENTITY, tags={}, params={})
    assert isinstance(run, Run) and run.identity == IDENTITY
    assert (left / "run.json").is_file(), "and what waits is on disk"
    assert store.client.get_run(run.id).data.tags["ttrain.id"] == IDENTITY
    run.finish("FINISHED")
    assert store.close() == 0 and not left.exists()


def test_an_outbox_whose_making_is_killed_at_any_call_is_taken_over(tmp_path: Path) -> None:
    import filelock  # noqa: F401  # before the forks

    (tmp_path / "home").mkdir()

    def make(home: Path) -> outbox.Outbox:
        return outbox.create(home, id=IDENTITY, name="stage")

    calls = killed_everywhere(tmp_path / "home", tmp_path / "copies", ("mkdir", "open", "replace"), make, writing=True)
    assert calls > 5
    for copy in (tmp_path / "copies" / str(number) for number in range(1, calls + 1)):
        directory = copy / "tracking" / IDENTITY
        box = outbox.take(directory) or make(copy)
        assert (box.id, box.is_kept, box.about["name"]) == (IDENTITY, True, "stage")
        box.add("end", status="FINISHED", time=0)
        box.close()
        assert [entry.what for entry in outboxes.entries_of(directory)] == ["end"]


def test_an_identity_that_another_process_has_made_whole_is_not_taken(tmp_path: Path) -> None:
    held = outbox.create(tmp_path, id=IDENTITY, name="stage")
    held.add("end", status="FINISHED", time=0)
    held.close()
    other = outbox.create(tmp_path, id=IDENTITY, name="another")
    assert other.id != IDENTITY and other.is_kept
    assert len(outboxes.found(tmp_path)) == 2


@pytest.mark.parametrize("by", ["the next run", "sync"])
def test_outboxes_that_were_never_whole_are_removed_unless_one_is_being_made(home: Path, by: str) -> None:
    import filelock

    gone, young, held = unmade(home, "1f", age=100), unmade(home, "2f"), unmade(home, "3f", age=100)
    with filelock.FileLock(held / "lock"):
        opened(home) if by == "the next run" else tracking.sync(home)
        eventually(lambda: not gone.exists())
    assert set(outboxes.found(home)) == {young, held}


def test_what_a_killed_run_left_for_another_mlflow_is_kept_for_that(
    home: Path, tmp_path: Path, migrated_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = f"sqlite:///{shutil.copy(migrated_database, tmp_path / 'elsewhere.db')}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", elsewhere)
    heard, said = multiprocessing.Pipe()

    def be_killed() -> None:
        run = started(opened(home))
        said.send(run.id)
        os.kill(os.getpid(), signal.SIGKILL)

    victim = multiprocessing.get_context("fork").Process(target=be_killed)
    victim.start()
    run_id = heard.recv()
    victim.join()
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    store = opened(home)
    (left,) = outboxes.found(home)
    assert tell_one(store, left) is None
    assert store.close() == 0
    assert [(one.tracker, one.things) for one in tracking.waiting(home)] == [(elsewhere, {"end": 1})]
    (done,) = tracking.sync(home)
    assert (done.things, outboxes.found(home)) == ({}, [])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", elsewhere)
    assert tracking.open_reader(home).client.get_run(run_id).info.status == "KILLED"


STAGE = {"ttrain.stage": "sft", "ttrain.key": "k" * 64, "ttrain.run": "full-1"}


def publish(home: Path, run: str = "full-1") -> None:
    """The artifact of that stage, made by a pipeline's run."""
    artifacts = artifact_store.Store(home)
    output = artifacts.work("sft", "k" * 64) / "output"
    output.mkdir(parents=True)
    (output / "model.bin").write_bytes(b"weights")
    manifest = {"result": {"loss": 1.5}, "ingredients": {}, "inputs": {}, "provenance": {"run": run}}
    artifacts.publish("sft", "k" * 64, output, manifest)


@pytest.mark.parametrize(("made_by", "status"), [("full-1", "FINISHED"), ("full-2", "KILLED"), ("", "KILLED")])
def test_a_stage_that_was_killed_after_it_had_published_is_finished_in_mlflow_too(
    home: Path, made_by: str, status: str
) -> None:
    heard, said = multiprocessing.Pipe()

    def be_killed() -> None:
        run = opened(home).start_run("sft", tags=STAGE, params={}, keeps_files=True)
        if made_by:
            publish(home, made_by)
        said.send(run.id)
        os.kill(os.getpid(), signal.SIGKILL)

    victim = multiprocessing.get_context("fork").Process(target=be_killed)
    victim.start()
    run_id = heard.recv()
    victim.join()
    (done,) = tracking.sync(home)
    assert (done.things, outboxes.found(home)) == ({}, [])
    run = tracking.open_reader(home).client.get_run(run_id)
    assert run.info.status == status
    files = home / "mlflow" / "artifacts" / run_id / "artifacts" / "sft"
    if status == "FINISHED":
        assert run.data.params["result.loss"] == "1.5" and (files / "model.bin").is_file()
    else:
        assert not run.data.metrics and not files.exists()


def test_a_run_that_was_noted_as_killed_is_finished_by_the_next_one_that_takes_its_artifact(home: Path) -> None:
    store = opened(home)
    killed = store.start_run("sft", tags=STAGE, params={})
    killed.finish("KILLED")
    publish(home)
    run = started(store, "full-2")
    run.link_made_by("sft", "k" * 64)
    assert store.client.get_run(killed.id).info.status == "FINISHED"
    assert links.stages_of(store.client.get_run(run.id).data.tags)["sft"]["run"] == killed.id
    store.close()


def test_a_run_that_goes_on_in_another_mlflow_is_that_ones(
    home: Path, tmp_path: Path, migrated_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with locked(home):
        before = opened(home)
        identity = started(before).identity
        before.close()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{shutil.copy(migrated_database, tmp_path / 'elsewhere.db')}")
    outbox_of = home / "tracking" / identity / "run.json"
    about = json.loads(outbox_of.read_text())
    outbox_of.write_text(json.dumps({**about, "run_id": "0" * 32}))  # of the other one
    store = opened(home)
    run = store.start_run("stage", identity=identity, tags={}, params={})
    about = json.loads(outbox_of.read_text())
    assert (about["id"], about["tracker"], about["run_id"]) == (identity, store.tracker, run.id)
    assert store.client.get_run(run.id).data.tags["ttrain.id"] == identity
    run.finish("FINISHED")
    assert store.close() == 0


def test_a_text_of_half_a_letter_is_kept_and_waits_for_nobody(home: Path) -> None:
    store = opened(home)
    run = started(store)
    run.log_text("caf\udce9 \ud83d", "settings.yaml")
    assert not run.waiting()
    kept = home / "mlflow" / "artifacts" / str(run.id) / "artifacts" / "settings.yaml"
    assert kept.read_text(encoding="utf-8") == "caf? ?"
    assert store.close() == 0


def test_a_file_that_went_costs_a_warning(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(home)
    run = started(store)
    run.log_file(home / "gone.txt", changes=True)
    assert "gone.txt failed" in caplog.text and not run.waiting()
    store.close()


def test_samples_and_curves_that_cannot_be_read_end_no_pipeline(home: Path, tmp_path: Path) -> None:
    store = opened(home)
    run = started(store)
    watcher: Any = _Watcher(
        SimpleNamespace(display=SimpleNamespace(progressed=lambda *_: None), settings=Settings()),  # type: ignore[arg-type]
        SimpleNamespace(name="pretrain"),  # type: ignore[arg-type]
        lambda line: None,
    )
    watcher._log, watcher._child = tmp_path / "run" / "log.txt", run
    samples = tmp_path / "run" / "samples"
    watcher.progressed(watcher._stage, {})  # there are none yet
    samples.mkdir(parents=True)
    (samples / "step-00000001.txt").symlink_to(tmp_path / "gone")
    (samples / "step-00000002.txt").write_bytes(b"caf\xe9")
    watcher.progressed(watcher._stage, {})
    kept = home / "mlflow" / "artifacts" / str(run.id) / "artifacts" / "pretrain" / "run" / "samples"
    assert [path.name for path in kept.iterdir()] == ["step-00000002.txt"]
    before = samples.stat()
    (samples / "step-00000003.txt").write_text("seen at the next change")
    os.utime(samples, ns=(before.st_atime_ns, before.st_mtime_ns))
    watcher.progressed(watcher._stage, {})
    assert len(list(kept.iterdir())) == 1, "what did not change is not looked at again"
    watcher.process_ended(watcher._stage)
    assert len(list(kept.iterdir())) == 2

    (tmp_path / "artifact" / "run" / "metrics.jsonl").mkdir(parents=True)
    artifact = SimpleNamespace(path=tmp_path / "artifact", stage="pretrain")
    Execution._log_curves(SimpleNamespace(artifacts={"pretrain": artifact}, _parent=run))  # type: ignore[arg-type]
    assert store.close() == 0


@pytest.mark.soak
def test_a_lock_in_the_middle_costs_one_wait_of_mlflows(home: Path) -> None:
    """MLflow waits 20 s for its turn to write: once, not with each of the things that a run tells."""
    store = opened(home)
    run = started(store)
    with locked(home):
        waited = stopwatch()
        for step in range(1, 20):
            run.log_summary({f"eval/{step}": 1.0})
        assert waited() < 45
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
