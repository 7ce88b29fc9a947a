"""Troubles of the home's own MLflow and of its disk: locked, emptied, full. Pipelines go on, and say what is missing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from store.test_store import full_disk
from support.kill_points import killed_everywhere
from support.tracked_stores import opened, row, started
from support.waiting import stopwatch, wait_until

from ttrain import tracking
from ttrain.errors import TrackingError
from ttrain.pipeline import run_summary
from ttrain.tracking import MetricsFollower, MlflowStore, SampleFollower, TrackedRun, outbox


@pytest.fixture
def hasty_home(tracked_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a database of MLflow, whose lock is soon given up."""
    monkeypatch.setattr("ttrain.tracking.database.LOCKED_SECONDS", 0.2)
    return tracked_home


def database(home: Path) -> Path:
    return tracking.database_of(home)


@contextmanager
def locked(home: Path) -> Iterator[None]:
    """Another program is writing to the database, and lets nobody read it either."""
    with closing(sqlite3.connect(database(home), isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield
        other.execute("ROLLBACK")


def left_behind(home: Path, entries: Sequence[tuple[str, dict[str, Any]]], *, ended: bool = False) -> outbox.Outbox:
    """The outbox of a run whose process was killed."""
    left = outbox.create(home, tracker="", experiment="ttrain", name="stage", tags={}, parent=None, ended=ended)
    for kind, data in entries:
        left.add(kind, **data)
    left._file_lock.close()
    return left


def test_a_run_that_goes_on_takes_its_outbox_from_the_thread_that_delivers_it(
    tracked_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a long backlog held the run up for 20 s, and it got a second identity."""
    left = left_behind(tracked_home, [("tags", {"values": {f"step-{step}": "1"}}) for step in range(60)])
    deliver, delivered = MlflowStore._deliver_entry, list[int]()

    def deliver_slowly(self: MlflowStore, run: TrackedRun, entry: outbox.Entry) -> None:
        delivered.append(entry.number)
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.1)
        deliver(self, run, entry)

    monkeypatch.setattr(MlflowStore, "_deliver_entry", deliver_slowly)
    monkeypatch.setattr("ttrain.tracking.tracker.TAKE_SECONDS", 3.0)  # half of what all of it takes
    store = opened(tracked_home)
    store.deliver_orphans()
    wait_until(lambda: len(delivered) > 2)
    run = store.start_run("stage", identity=left.id, tags={}, params={})
    assert run.identity == left.id
    monkeypatch.undo()
    store.close()
    assert {f"step-{step}" for step in range(60)} <= set(store.client.get_run(run.id).data.tags)
    assert sorted(set(delivered)) == sorted(delivered), "each entry once"


def test_what_cannot_be_taken_in_time_is_delivered_all_the_same(tracked_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is within one entry for longer than a run waits, which then is another run."""
    left = left_behind(tracked_home, [("tags", {"values": {f"step-{step}": "1"}}) for step in range(3)])
    deliver, begun = MlflowStore._deliver_entry, threading.Event()

    def deliver_slowly(self: MlflowStore, run: TrackedRun, entry: outbox.Entry) -> None:
        if not begun.is_set():
            begun.set()
            time.sleep(1.0)
        deliver(self, run, entry)

    monkeypatch.setattr(MlflowStore, "_deliver_entry", deliver_slowly)
    monkeypatch.setattr("ttrain.tracking.tracker.TAKE_SECONDS", 0.1)
    store = opened(tracked_home)
    store.deliver_orphans()
    assert begun.wait(60)
    run = store.start_run("stage", identity=left.id, tags={}, params={})
    assert run.identity != left.id
    wait_until(lambda: not (tracked_home / outbox.FOLDER / left.id).exists())
    store.close()


def test_a_database_that_another_program_locks_holds_nobody_up_and_gets_everything(hasty_home: Path) -> None:
    with locked(hasty_home):
        store = opened(hasty_home)
        waited = stopwatch()
        run = started(store)
        assert not run.log_metrics([row(1), row(2)])
        run.log_summary({"eval/bits_per_byte": 1.5})
        run.log_params({"lr": 0.03})  # as when a repair logs the run again: a parameter keeps its first value
        assert waited() < 2, "what cannot be told waits on disk"
        (waits,) = tracking.undelivered_runs(hasty_home)
        assert waits.things == {"params": 1, "rows": 1, "summary": 1, "end": 1}
    wait_until(lambda: not run.waiting())
    assert run.log_metrics([row(1), row(2)])
    run.finish("FINISHED")
    assert store.close() == 0
    found = store.client.get_run(run.id)
    assert (found.info.status, found.data.metrics["eval/bits_per_byte"]) == ("FINISHED", 1.5)
    assert found.data.params == {"lr": "0.02"}


def test_sync_says_that_the_database_is_locked(hasty_home: Path) -> None:
    with locked(hasty_home):
        store = opened(hasty_home)
        started(store).finish("FINISHED")
        assert store.close() == 2
        (left,) = tracking.sync(hasty_home)
        assert left.things == {"params": 1, "end": 1} and "database is locked" in left.why
        with pytest.raises(TrackingError, match="database is locked; end the other program that is writing to it"):
            tracking.Champions(hasty_home).sets()
    (done,) = tracking.sync(hasty_home)
    assert done.things == {} and not outbox.list_outboxes(hasty_home)


IDENTITY = "1f" * 16


def test_an_outbox_whose_making_is_killed_at_any_call_is_taken_over(tmp_path: Path) -> None:
    import filelock  # noqa: F401  # before the forks

    (tmp_path / "home").mkdir()

    def make(home: Path) -> outbox.Outbox:
        return outbox.create(home, id=IDENTITY, name="stage")

    calls = killed_everywhere(
        tmp_path / "home", tmp_path / "copies", ("mkdir", "open", "replace", "rename"), make, writing=True
    )
    assert calls > 5
    for copy in (tmp_path / "copies" / str(number) for number in range(1, calls + 1)):
        directory = copy / "tracking" / IDENTITY
        box = outbox.take(directory) or make(copy)
        assert (box.id, box.is_kept, box.run_info["name"]) == (IDENTITY, True, "stage")
        box.add("end", status="FINISHED", time=0)
        box.close()
        assert [entry.kind for entry in outbox.read_journal(directory).values()] == ["end"]


def test_an_identity_that_another_process_has_made_whole_is_not_taken(tmp_path: Path) -> None:
    held = outbox.create(tmp_path, id=IDENTITY, name="stage")
    held.add("end", status="FINISHED", time=0)
    held.close()
    other = outbox.create(tmp_path, id=IDENTITY, name="another")
    assert other.id != IDENTITY and other.is_kept
    assert len(outbox.list_outboxes(tmp_path)) == 2


@pytest.mark.parametrize("by", ["the next run", "sync"])
def test_what_killed_makers_of_outboxes_left_is_removed_unless_one_is_being_made(hasty_home: Path, by: str) -> None:
    left, young = (hasty_home / "tracking" / name for name in (".1f.0a", ".2f.0a"))
    for directory in (left, young):
        directory.mkdir(parents=True)
        (directory / "lock").touch()
    os.utime(left, (time.time() - 7200, time.time() - 7200))
    opened(hasty_home) if by == "the next run" else tracking.sync(hasty_home)
    assert young.exists() and not left.exists() and not outbox.list_outboxes(hasty_home)


def test_the_journal_of_a_long_run_is_cut_to_what_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "COMPACT_BYTES", 2000)
    box = outbox.create(tmp_path, id=IDENTITY, name="stage")
    first = box.add("file", path="weights", to="model")
    box.mark_part_delivered(first, "model")
    for step in range(1, 201):
        box.mark_delivered(box.add("rows", points=[["loss", 1.0, 1, step]]))
    directory = tmp_path / "tracking" / IDENTITY
    assert (directory / "journal.jsonl").stat().st_size < 2500
    (left,) = outbox.read_journal(directory).values()
    assert (left.number, left.kind, left.data, left.parts) == (first.number, "file", dict(first.data), {"model"})
    box.close()


def test_an_outbox_of_which_all_had_arrived_before_a_kill_is_removed(hasty_home: Path) -> None:
    box = outbox.create(hasty_home, name="stage", tags={}, tracker="", experiment="ttrain", ended=True)
    entry = box.add("params", values={})
    directory = box.directory
    assert directory is not None
    copy = shutil.copytree(directory, hasty_home / "copy")
    box.mark_delivered(entry)
    box.close()
    copy.rename(directory)
    (directory / "journal.jsonl").unlink()
    (done,) = tracking.sync(hasty_home)
    assert done.things == {} and done.why == "" and not outbox.list_outboxes(hasty_home)


def test_a_run_that_goes_on_in_another_mlflow_is_that_ones_with_the_rows_before_those_that_waited(
    hasty_home: Path, tmp_path: Path, migrated_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, store = hasty_home / "metrics.jsonl", opened(hasty_home)
    run = started(store)
    path.write_text("".join(f"{json.dumps(row(step))}\n" for step in (1, 2)))
    MetricsFollower(path, run).stop()
    with locked(hasty_home):
        store.caller.is_silent = True
        assert not run.log_metrics([row(3)])
        store.close()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{shutil.copy(migrated_database, tmp_path / 'elsewhere.db')}")
    store = opened(hasty_home)
    again = store.start_run("stage", identity=run.identity, tags={}, params={})
    about = json.loads((hasty_home / "tracking" / run.identity / "run.json").read_text())
    assert (about["id"], about["tracker"], about["run_id"]) == (run.identity, store.tracker, again.id)
    assert again.id != run.id and store.client.get_run(again.id).data.tags["ttrain.id"] == run.identity
    MetricsFollower(path, again).stop()
    assert sorted(point.step for point in store.client.get_metric_history(again.id, "loss")) == [1, 2]
    again.finish("FINISHED")
    assert store.close() == 0


def test_a_text_of_half_a_letter_is_kept_and_waits_for_nobody(hasty_home: Path) -> None:
    store = opened(hasty_home)
    run = started(store)
    run.log_text("caf\udce9 \ud83d", "settings.yaml")
    assert not run.waiting()
    kept = hasty_home / "mlflow" / "artifacts" / str(run.id) / "artifacts" / "settings.yaml"
    assert kept.read_text(encoding="utf-8") == "caf? ?"
    assert store.close() == 0


def test_samples_and_curves_that_cannot_be_read_end_no_pipeline(hasty_home: Path, tmp_path: Path) -> None:
    store = opened(hasty_home)
    run = started(store)
    samples = tmp_path / "run" / "samples"
    follower = SampleFollower(samples, run, "pretrain/run/samples")
    follower.log_new(only_if_changed=True)  # there are none yet
    samples.mkdir(parents=True)
    (samples / "step-00000001.txt").symlink_to(tmp_path / "gone")
    (samples / "step-00000002.txt").write_bytes(b"caf\xe9")
    follower.log_new(only_if_changed=True)
    kept = hasty_home / "mlflow" / "artifacts" / str(run.id) / "artifacts" / "pretrain" / "run" / "samples"
    assert [path.name for path in kept.iterdir()] == ["step-00000002.txt"]
    before = samples.stat()
    (samples / "step-00000003.txt").write_text("seen at the next change")
    os.utime(samples, ns=(before.st_atime_ns, before.st_mtime_ns))
    follower.log_new(only_if_changed=True)
    assert len(list(kept.iterdir())) == 1, "what did not change is not looked at again"
    follower.log_new()
    assert len(list(kept.iterdir())) == 2

    (tmp_path / "artifact" / "run" / "metrics.jsonl").mkdir(parents=True)
    artifact = SimpleNamespace(path=tmp_path / "artifact", stage="pretrain")
    run_summary.log_curves(run, [artifact])  # type: ignore[list-item]
    assert store.close() == 0


@pytest.mark.soak
def test_a_lock_in_the_middle_costs_one_wait_of_mlflows(hasty_home: Path) -> None:
    """MLflow waits 20 s for its turn to write: once, not with each of the things that a run tells."""
    store = opened(hasty_home)
    run = started(store)
    with locked(hasty_home):
        waited = stopwatch()
        for step in range(1, 20):
            run.log_summary({f"eval/{step}": 1.0})
        assert waited() < 45
    wait_until(lambda: not run.waiting(), 60)
    assert len(store.client.get_run(run.id).data.metrics) == 19
    store.close()


def test_a_full_disk_costs_the_notes_and_nothing_that_mlflow_takes(
    hasty_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(hasty_home)
    run = started(store)
    journal = hasty_home / "tracking" / run.identity / "journal.jsonl"
    journal.unlink()
    journal.symlink_to("/dev/full")  # every write says: no space left on device
    assert run.log_metrics([row(1)])
    run.log_summary({"eval/bits_per_byte": 1.5})
    run.finish("FINISHED")
    assert store.close() == 0
    assert store.client.get_run(run.id).info.status == "FINISHED"
    assert caplog.text.count("cannot be saved in") == 1 and "lost" not in caplog.text


def test_a_full_disk_is_named_once_and_what_waited_arrives_when_there_is_room(
    hasty_home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, no_space = sqlite3.OperationalError("database or disk is full"), OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patched:
        patched.setattr("ttrain.tracking.runs.open_client", Mock(side_effect=full))
        store = opened(hasty_home)
        run = started(store)
    wait_until(lambda: not run.waiting(), 60)
    with monkeypatch.context() as patched:
        patched.setattr(store.client, "log_batch", Mock(side_effect=full))
        patched.setattr("ttrain.tracking.delivery.write_text", Mock(side_effect=no_space))
        run.log_summary({"eval/bits_per_byte": 1.5})
        run.set_tags({"a": "b"})
        run.log_text("x", "note.txt")
    run.finish("FINISHED")
    assert store.close() == 0
    assert store.client.get_run(str(run.id)).data.metrics == {"eval/bits_per_byte": 1.5}
    assert caplog.text.count("the pipeline continues") == caplog.text.count("free some space on its disk") == 1


def test_a_disk_with_room_for_a_part_of_an_entry_gets_none_of_it_and_the_entry_is_not_taken_for_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    box = outbox.create(tmp_path, name="stage")
    box.add("text", text="short")
    journal = tmp_path / "tracking" / box.id / "journal.jsonl"
    whole = journal.read_bytes()
    with full_disk(1000):
        box.add("text", text="x" * 5000)
        assert journal.read_bytes() == whole and not box.is_kept
        box.add("text", text="fits")
    assert [entry.data["text"] for entry in outbox.read_journal(journal.parent).values()] == ["short", "fits"]
    assert "cannot be saved in the outbox" in caplog.text and not journal.read_bytes().count(b"xx")


def test_what_neither_mlflow_nor_the_disk_took_is_said_to_be_lost(
    hasty_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (hasty_home / "tracking").write_text("no directory can be here")
    with locked(hasty_home):
        store = opened(hasty_home)
        run = started(store)
        run.finish("FINISHED")
        assert store.close() == 2
    assert "did not receive 2 entries" in caplog.text and "they are lost there" in caplog.text
    assert "track sync" not in caplog.text, "which could tell none of it"


@pytest.mark.parametrize("emptied", [False, True], ids=["experiment deleted", "database emptied"])
def test_runs_after_their_experiment_is_gone_are_in_one_made_anew(
    hasty_home: Path, caplog: pytest.LogCaptureFixture, emptied: bool
) -> None:
    store = opened(hasty_home)
    before = started(store, "before")
    if emptied:  # as a server is that comes back on another database
        with closing(sqlite3.connect(database(hasty_home))) as db, db:
            for table in ("latest_metrics", "metrics", "params", "tags", "runs", "experiment_tags", "experiments"):
                db.execute(f"DELETE FROM {table} WHERE 1" + (" AND experiment_id > 0" if table == "experiments" else ""))
    else:
        store.client.delete_experiment(store.experiment_id())
    assert before.log_metrics([row(step) for step in range(1, 500)]), "no use to try again"
    assert len(caplog.records) == 1, "one warning, not one for each point"
    after = started(store, "after")
    wait_until(lambda: not after.waiting())
    assert after.log_metrics([row(1)])
    after.finish("FINISHED")
    assert store.close() == 0
    found = store.client.get_run(after.id)
    assert (found.info.status, found.info.lifecycle_stage) == ("FINISHED", "active")
    assert store.client.get_experiment(found.info.experiment_id).lifecycle_stage == "active"


def test_a_run_deleted_while_its_process_was_gone_is_made_anew_for_what_waits(hasty_home: Path) -> None:
    store, path = opened(hasty_home), hasty_home / "metrics.jsonl"
    run = started(store)
    with locked(hasty_home):
        store.caller.is_silent = True
        path.write_text("")
        run.log_summary({"eval/bits_per_byte": 1.5})
        store.close()
    store = tracking.open_reader(hasty_home)
    store.client.delete_run(run.id)
    (done,) = tracking.sync(hasty_home)
    assert done.things == {}
    (only,) = store.client.search_runs([store.experiment_id("ttrain")], f"tags.`ttrain.id` = '{run.identity}'")
    assert only.info.run_id != run.id and only.data.metrics == {"eval/bits_per_byte": 1.5}
