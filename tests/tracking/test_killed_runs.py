"""Runs whose process was killed, and homes that several processes write at once; the home's own MLflow."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tracked_stores import opened, row, started
from support.waiting import wait_until

from ttrain import tracking
from ttrain.store import artifacts as artifact_store
from ttrain.tracking import MetricsFollower, delivery, open_store, outbox


def killed_after(act: Callable[[], object]) -> Any:
    """The answer of `act` in a process that is killed then."""
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401  # before the fork

    heard, said = multiprocessing.Pipe()

    def be_killed() -> None:
        said.send(act())
        os.kill(os.getpid(), signal.SIGKILL)

    victim = multiprocessing.get_context("fork").Process(target=be_killed)
    victim.start()
    answer = heard.recv()
    victim.join()
    return answer


def test_a_killed_run_and_its_child_end_as_killed_when_the_next_one_starts(
    tracked_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of its curves only the one is missed that had been written and is gone, not one that was never begun."""
    curve, removed = tracked_home / "metrics.jsonl", tracked_home / "removed.jsonl"

    def train() -> tuple[Any, ...]:
        store = opened(tracked_home)
        parent = started(store, "full")
        child = store.start_run("sft", parent=parent, tags={}, params={})
        for path in (curve, removed):
            path.write_text("".join(json.dumps(row(step)) + "\n" for step in range(1, 8)))
        child.lock.acquire()  # so that none of it is sent before the end
        for path in (curve, tracked_home / "never-written.jsonl", removed):
            MetricsFollower(path, child)
        wait_until(lambda: sum("begun" in entry.parts for entry in child.outbox.entries) == 2)
        removed.unlink()
        return parent.id, child.id, child.identity

    parent, child, identity = killed_after(train)
    store = opened(tracked_home, "another experiment")
    wait_until(lambda: not outbox.list_outboxes(tracked_home))
    assert [store.client.get_run(run).info.status for run in (parent, child)] == ["KILLED", "KILLED"]
    points = store.client.get_metric_history(child, "loss")
    assert sorted(point.step for point in points) == list(range(1, 8)), "also what it had not sent"
    (missed,) = [record.getMessage() for record in caplog.records if "the curve is gone" in record.getMessage()]
    assert "removed.jsonl" in missed
    again = store.start_run("sft", tags={}, params={}, run_id=child, identity=identity)
    assert again.id == child and store.client.get_run(child).info.status == "RUNNING"
    again.finish("FINISHED")
    store.close()
    assert store.client.get_run(child).info.status == "FINISHED"


def test_what_a_killed_run_left_for_another_mlflow_is_kept_for_that(
    tracked_home: Path, tmp_path: Path, migrated_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = f"sqlite:///{shutil.copy(migrated_database, tmp_path / 'elsewhere.db')}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", elsewhere)
    run_id = killed_after(lambda: started(opened(tracked_home)).id)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    store = opened(tracked_home)
    (left,) = outbox.list_outboxes(tracked_home)
    assert store.deliver_orphan(left) is None
    assert store.close() == 0
    assert [(one.tracker, one.things) for one in tracking.undelivered_runs(tracked_home)] == [(elsewhere, {"end": 1})]
    (done,) = tracking.sync(tracked_home)
    assert (done.things, outbox.list_outboxes(tracked_home)) == ({}, [])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", elsewhere)
    assert tracking.open_reader(tracked_home).client.get_run(run_id).info.status == "KILLED"


def test_a_killed_run_that_had_delivered_all_is_noted_as_killed_once_mlflow_answers(
    tracked_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = killed_after(lambda: started(opened(tracked_home)).id)
    (left,) = outbox.list_outboxes(tracked_home)
    assert not outbox.read_journal(left)
    store = tracking.open_reader(tracked_home)
    store.caller.is_silent = True
    monkeypatch.setattr(store.caller, "probe", lambda: ConnectionError("away"))
    assert store.deliver_orphan(left) is False and left.exists()
    (done,) = tracking.sync(tracked_home)
    assert done.things == {} and store.client.get_run(run_id).info.status == "KILLED"


STAGE = {"ttrain.stage": "sft", "ttrain.key": "k" * 64, "ttrain.run": "full-1"}


def publish(home: Path, run: str = "full-1") -> None:
    """The artifact of that stage, made by a pipeline's run."""
    artifacts = artifact_store.ArtifactStore(home)
    output = artifacts.work("sft", "k" * 64) / "output"
    output.mkdir(parents=True)
    (output / "model.bin").write_bytes(b"weights")
    manifest = {"result": {"loss": 1.5}, "ingredients": {}, "inputs": {}, "provenance": {"run": run}}
    artifacts.publish("sft", "k" * 64, output, manifest)


@pytest.mark.parametrize(("made_by", "status"), [("full-1", "FINISHED"), ("full-2", "KILLED"), ("", "KILLED")])
def test_a_stage_that_was_killed_after_it_had_published_is_finished_in_mlflow_too(
    tracked_home: Path, made_by: str, status: str
) -> None:
    def train() -> str | None:
        run = opened(tracked_home).start_run("sft", tags=STAGE, params={}, keeps_files=True)
        if made_by:
            publish(tracked_home, made_by)
        return run.id

    run_id = killed_after(train)
    (done,) = tracking.sync(tracked_home)
    assert (done.things, outbox.list_outboxes(tracked_home)) == ({}, [])
    run = tracking.open_reader(tracked_home).client.get_run(run_id)
    assert run.info.status == status
    files = tracked_home / "mlflow" / "artifacts" / run_id / "artifacts" / "sft"
    if status == "FINISHED":
        assert run.data.params["result.loss"] == "1.5" and (files / "model.bin").is_file()
    else:
        assert not run.data.metrics and not files.exists()


def test_a_run_that_was_noted_as_killed_is_finished_by_the_next_one_that_takes_its_artifact(tracked_home: Path) -> None:
    store = opened(tracked_home)
    killed = store.start_run("sft", tags=STAGE, params={})
    killed.finish("KILLED")
    publish(tracked_home)
    run = started(store, "full-2")
    run.link_made_by("sft", "k" * 64)
    assert store.client.get_run(killed.id).info.status == "FINISHED"
    assert delivery.stages_of(store.client.get_run(run.id).data.tags)["sft"]["run"] == killed.id
    store.close()


def _write_cold(home: str, number: int) -> None:
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    store = open_store(Path(home), "cold")
    run = store.start_run(f"writer-{number}", run_id=None, tags={}, params={"number": number})
    run.log_metrics([{"step": step, "metrics": {"loss": 1.0 / step}} for step in range(1, 51)])
    run.finish("FINISHED")
    os._exit(store.close())


@pytest.mark.soak
def test_eight_writers_on_a_cold_home_all_get_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow.store.tracking.sqlalchemy_store
    import mlflow.tracking  # noqa: F401  # once, before the eight fork

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_cold, args=(str(tmp_path), number)) for number in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    assert [writer.exitcode for writer in writers] == [0] * 8
    store = tracking.open_reader(tmp_path)
    (experiment,) = [one for one in store.client.search_experiments() if one.name == "cold"]
    found = store.client.search_runs([experiment.experiment_id])
    assert sorted(run.data.params["number"] for run in found) == list("01234567")
    assert all(len(store.client.get_metric_history(run.info.run_id, "loss")) == 50 for run in found)


def test_an_experiment_that_is_deleted_while_a_run_goes_on_is_restored_with_all_of_the_run(
    tracked_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next run restores it anyway: the stage would then be there, without its end."""
    store = opened(tracked_home)
    parent = started(store, "full")
    stage = store.start_run("sft", parent=parent, tags={}, params={})
    experiment = store.client.get_run(parent.id).info.experiment_id
    for step in (1, 2):
        stage.log_metrics([row(step)])
        store.client.delete_experiment(experiment)
    for run in (stage, parent):
        run.finish("FINISHED")
    assert store.close() == 0
    assert [store.client.get_run(run.id).info.status for run in (parent, stage)] == ["FINISHED", "FINISHED"]
    assert sorted(point.step for point in store.client.get_metric_history(stage.id, "loss")) == [1, 2]
    warning = "the experiment ttrain was deleted in MLflow, but a run in it goes on, so it is restored"
    assert [record.getMessage() for record in caplog.records] == [warning] * 2
    store.client.delete_experiment(experiment)
    store = opened(tracked_home)
    again = store.start_run("sft", tags={}, params={}, run_id=stage.id, identity=stage.identity)
    assert again.id == stage.id, "a run that is continued, too"
    store.client.delete_run(again.id)
    again.log_metrics([row(3)])
    assert "the run was deleted in MLflow" in caplog.records[-1].getMessage(), "one run alone stays deleted"
    store.close()
