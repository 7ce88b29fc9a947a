"""Tracking: continued and not doubled, mended and not written into, silent and not in the way; real MLflow, SQLite."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.tracked_stores import opened
from support.waiting import stopwatch, wait_until

from ttrain.tracking import MetricsFollower, MlflowStore, NullStore, TrackedRun, client, open_store, tracking_uri
from ttrain.tracking.calls import clean
from ttrain.tracking.datasets import DataInput
from ttrain.tracking.delivery import stages_of


def started(
    store: MlflowStore, name: str = "stage", *, run_id: str | None = None, parent: str | None = None, **params: object
) -> TrackedRun:
    return store.start_run(name, run_id=run_id, parent_run_id=parent, tags={"ttrain.stage": name}, params=params)


def line(step: int, **metrics: float | None) -> str:
    row = {"step": step, "tokens": 100 * step, "time": 1.7e9 + time.time() % 1e6, "metrics": metrics or {"loss": 5 / step}}
    return json.dumps(row) + "\n"


def lines(first: int, last: int) -> str:
    return "".join(line(step) for step in range(first, last + 1))


def steps(run: TrackedRun, key: str = "loss") -> list[int]:
    """All steps that MLflow holds of one metric, doubled ones twice."""
    return sorted(metric.step for metric in run.store.client.get_metric_history(run.id, key))


def test_the_users_tracking_uri_wins_unless_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://there:5000")
    assert tracking_uri(tmp_path) == "http://there:5000"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    assert tracking_uri(tmp_path) == f"sqlite:///{tmp_path}/mlflow/mlflow.db"


def test_without_mlflow_everything_is_there_and_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "find_spec", lambda name: None)
    store = open_store(tmp_path, "ttrain")
    assert isinstance(store, NullStore)
    run = store.start_run("stage", run_id="kept", parent_run_id=None, tags={}, params={})
    (tmp_path / "metrics.jsonl").write_text(line(1))
    follower = MetricsFollower(tmp_path / "metrics.jsonl", run)
    for method in ("log_metrics", "log_summary", "set_tags", "finish"):
        getattr(run, method)({})
    run.log_file(tmp_path / "metrics.jsonl", "logs")
    follower.stop()
    assert (run.id, run.url) == ("kept", None)
    assert store.register_model("m", run=run, artifact_path="model", tags={}) is None
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_that_is_gone_is_made_anew(tracked_home: Path) -> None:
    store = opened(tracked_home)
    deleted = started(store)
    store.client.delete_run(deleted.id)
    assert started(store, run_id="0" * 32).id != "0" * 32
    assert started(store, run_id=deleted.id).id != deleted.id


def test_a_run_whose_clock_was_set_back_does_not_end_before_it_began(
    tracked_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tracked_home)
    run = started(store)
    yesterday = time.time() - 86400
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: yesterday)
        run.finish("FINISHED")
    wait_until(lambda: not run.waiting(), 60)
    info = store.client.get_run(run.id).info
    assert info.end_time >= info.start_time > 1000 * yesterday
    store.close()


def test_a_changed_parameter_warns_and_equal_ones_do_not(tracked_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(tracked_home)
    many: dict[str, Any] = {f"p{i}": i for i in range(250)}
    run = started(store, long="x" * 7000, lr=0.02, **many)
    started(store, run_id=run.id, long="x" * 7000, lr=0.02, **many)
    assert not caplog.records
    started(store, run_id=run.id, lr=0.03, new=1)
    assert [record.getMessage() for record in caplog.records] == [f"MLflow run {run.id} keeps lr = 0.02, now 0.03"]
    params = store.client.get_run(run.id).data.params
    assert (len(params), len(params["long"]), params["lr"], params["new"]) == (253, 6000, "0.02", "1")


def test_rows_become_points_with_their_step_time_and_tokens(tracked_home: Path) -> None:
    run = started(opened(tracked_home))
    metrics = {"loss": 2.5, "odd@name": 1.0, "missing": None, "bad": float("nan")}
    run.log_metrics([{"step": 10, "tokens": 4096, "time": 1732000000.12, "metrics": metrics}])
    run.log_metrics({"step": s, "tokens": s, "time": 1.7e9, "metrics": {"loss": 1.0}} for s in range(11, 600))
    (point,) = (point for point in run.store.client.get_metric_history(run.id, "loss") if point.step == 10)
    assert (point.value, point.step, point.timestamp) == (2.5, 10, 1732000000120)
    assert steps(run) == steps(run, "tokens") == list(range(10, 600)), "more than MLflow takes at once"
    data = run.store.client.get_run(run.id).data.metrics
    assert set(data) == {"loss", "tokens", clean("odd@name"), "missing", "bad"}
    assert math.isnan(data["missing"]) and math.isnan(data["bad"]), "what was no number is a gap, not a straight line"


def test_a_summary_given_again_adds_only_what_changed(tracked_home: Path) -> None:
    store = opened(tracked_home)
    run = started(store)
    run.log_summary({"eval/bits_per_byte": 2.1, "eval/accuracy": 0.5})
    again = started(store, run_id=run.id)
    again.log_summary({"eval/bits_per_byte": 2.0, "eval/accuracy": 0.5})
    assert store.client.get_run(run.id).data.metrics == {"eval/bits_per_byte": 2.0, "eval/accuracy": 0.5}
    assert (steps(run, "eval/bits_per_byte"), steps(run, "eval/accuracy")) == ([0, 0], [0])


def test_the_follower_logs_each_step_once_whole_and_after_a_cut(tracked_home: Path) -> None:
    store, path = opened(tracked_home), tracked_home / "metrics.jsonl"
    run = started(store)
    path.write_text((lines(1, 20) + line(20, val=1.0)).replace(": ", ":    ") + line(21)[:30])
    follower = MetricsFollower(path, run, seconds=0.02)
    wait_until(lambda: run.steps.get("val") == 20)
    assert steps(run) == list(range(1, 21)), "the half-written line waits"
    with path.open("a") as file:
        file.write(line(21)[30:] + line(22)[:30])
    wait_until(lambda: run.steps.get("loss") == 21)
    path.write_text(lines(1, 10))  # cut back to the checkpoint and grown again between two looks, with shorter lines
    with path.open("a") as file:
        file.write(lines(11, 20) + line(20, val=1.0) + lines(21, 40))
    follower.stop()
    assert steps(run) == list(range(1, 41))

    path.write_text(lines(1, 30))  # killed and resumed: the file ends before what was sent
    follower = MetricsFollower(path, started(store, run_id=run.id), seconds=0.02)
    with path.open("a") as file:
        file.write("not json\n" + lines(31, 60))
    follower.stop()
    assert steps(run) == steps(run, "tokens") == list(range(1, 61))
    assert steps(run, "val") == [20]


def test_a_new_run_does_not_inherit_the_steps_of_another(tracked_home: Path) -> None:
    store, path = opened(tracked_home), tracked_home / "metrics.jsonl"
    path.write_text(lines(1, 10))
    MetricsFollower(path, started(store)).stop()
    other = started(store)
    MetricsFollower(path, other).stop()
    assert steps(other) == list(range(1, 11))


def test_four_threads_share_one_database(tracked_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(tracked_home)
    runs = [started(store, f"shards-{i}") for i in range(4)]

    def log_rows(run: TrackedRun) -> None:
        for first in range(1, 61, 5):
            run.log_metrics({"step": step, "metrics": {"loss": 1.0 / step}} for step in range(first, first + 5))

    with ThreadPoolExecutor(len(runs)) as pool:
        list(pool.map(log_rows, runs))
    assert all(steps(run) == list(range(1, 61)) for run in runs)
    assert not caplog.records


def test_runs_side_by_side_that_read_the_same_data_all_note_it(tracked_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As the trials of a sweep: each with a client of its own."""
    runs = [started(opened(tracked_home), f"trial {number}") for number in range(3)]
    data = [DataInput(f"set {number}", f"{number:012d}", "training", {"documents": 1}, 5) for number in range(4)]
    together = threading.Barrier(len(runs))

    def note(run: TrackedRun) -> None:
        together.wait()
        run.log_inputs(data)

    with ThreadPoolExecutor(len(runs)) as pool:
        list(pool.map(note, runs))
    assert [len(run.store.client.get_run(run.id).inputs.dataset_inputs) for run in runs] == [4, 4, 4]
    assert caplog.records == []


def test_a_silent_server_costs_one_warning_and_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ttrain.tracking.client.PROBE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts connections and never answers
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:secret@127.0.0.1:{server.getsockname()[1]}")
        waited = stopwatch()
        store = opened(tmp_path)
        run = store.start_run("stage", run_id="kept", tags={}, params={})
        assert (run.id, run.url) == ("kept", None)
        run.finish("FINISHED")
        assert store.close() == 2, "that it goes on, and that it ended"
        assert waited() < 5
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["MLflow at http"] * 2
    assert "secret" not in caplog.text + "".join(path.read_text() for path in (tmp_path / "tracking").rglob("*.json*"))


def test_points_that_failed_are_not_passed_by_later_ones(tracked_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later steps in MLflow would make the earlier ones look as if they had been sent."""
    store = opened(tracked_home)
    run, log_batch, failures = started(store), store.client.log_batch, [ConnectionError("odd"), ConnectionError("odd")]

    def fail_first(*arguments: Any, **named: Any) -> None:
        if failures:
            raise failures.pop()
        log_batch(*arguments, **named)

    monkeypatch.setattr(store.client, "log_batch", fail_first)
    assert not run.log_metrics([json.loads(line(1))])
    run.log_metrics([json.loads(line(2))])
    wait_until(lambda: not run.waiting())
    assert steps(run) == [1, 2]


def test_a_metric_that_mlflow_refuses_takes_no_other_along(
    tracked_home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ttrain.tracking.runs.clean", lambda key: key)
    run, path = started(opened(tracked_home)), tracked_home / "metrics.jsonl"
    path.write_text(lines(1, 20) + line(20, **{"../up": 1.0}) + lines(21, 40))
    MetricsFollower(path, run).stop()
    assert steps(run) == list(range(1, 41))
    assert [record.getMessage().count("logging ../up failed") for record in caplog.records] == [1]


def test_a_deleted_run_holds_up_no_other(tracked_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(tracked_home)
    deleted, other = started(store), started(store)
    store.client.delete_run(deleted.id)
    assert deleted.log_metrics([{"step": 1, "metrics": {"loss": 1.0}}]), "refused for good, so there is nothing to retry"
    deleted.finish("FINISHED")
    other.finish("FINISHED")
    assert store.client.get_run(other.id).info.status == "FINISHED"
    assert store.close() == 0
    assert not list((tracked_home / "tracking").iterdir()) if (tracked_home / "tracking").exists() else True


def test_the_stages_of_a_run_stand_in_one_tag(tracked_home: Path) -> None:
    store = opened(tracked_home)
    parent = started(store, "full")
    child = store.start_run("sft", parent=parent, tags={}, params={})
    child.link_to_parent("sft")
    parent.note_stages({"sft": "k2", "tokenizer": "k1"})
    tags = store.client.get_run(parent.id).data.tags
    assert [tag for tag in tags if tag.startswith("ttrain.") and "stage" in tag] == ["ttrain.stage", "ttrain.stages"]
    assert stages_of(tags) == {"sft": {"run": child.id, "key": "k2"}, "tokenizer": {"key": "k1"}}
    assert stages_of({"ttrain.stages": "no JSON"}) == stages_of({"ttrain.stages": "[1]"}) == {}
