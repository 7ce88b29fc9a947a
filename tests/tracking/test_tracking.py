"""Tracking: continued and not doubled, mended and not written into, silent and not in the way; real MLflow, SQLite."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.tracked_stores import opened
from support.waiting import stopwatch, wait_until

from ttrain.tracking import (
    MetricsFollower,
    MlflowStore,
    NullStore,
    TrackedRun,
    client,
    open_store,
    prepare,
    repair_moved_home,
    tracking_uri,
)
from ttrain.tracking import database as databases
from ttrain.tracking.datasets import DataInput
from ttrain.tracking.delivery import stages_of
from ttrain.tracking.uploads import LINK_FROM_BYTES

MODEL_TAGS = {"ttrain.key": "k1", "ttrain.content": "c1"}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated, unclaimed database: migrating takes 1 s, copying 1 ms."""
    home = tmp_path_factory.mktemp("pristine")
    assert isinstance(open_store(home, "ttrain"), MlflowStore)
    with closing(sqlite3.connect(home / "mlflow" / "mlflow.db")) as db, db:
        db.execute("DROP TABLE ttrain_home")
        db.execute("DELETE FROM experiments WHERE experiment_id > 0")
    return home / "mlflow" / "mlflow.db"


@pytest.fixture
def odd_home(tmp_path: Path, pristine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh home, in a path that a careless URI would break."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    home = tmp_path / "a home #1 50%"
    (home / "mlflow").mkdir(parents=True)
    shutil.copy(pristine, home / "mlflow" / "mlflow.db")
    return home


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


def fingerprint(root: Path) -> dict[str, tuple[str, int]]:
    """Digest and mtime of every file."""
    files = (path for path in sorted(root.rglob("*")) if path.is_file())
    return {str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}


@pytest.fixture
def silent_server() -> Iterator[str]:
    """An address that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


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
    assert store.register_model("m", run=run, artifact_path="model", tags=MODEL_TAGS) is None
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_fresh_home_is_made_quietly_and_keeps_everything_under_itself(tmp_path: Path) -> None:
    code = (
        "import pathlib; from ttrain.tracking import open_store\n"
        "s = open_store(pathlib.Path('home'), 'x')\n"
        "r = s.start_run('r', run_id=None, parent_run_id=None, tags={}, params={'a': 1})\n"
        "r.log_text('hello', 'a/b.txt'); r.log_summary({'x': 1.0}); r.finish('FINISHED')"
    )
    environment = {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout + done.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert {path.name for path in (tmp_path / "home" / "mlflow").iterdir()} == {"mlflow.db", "mlflow.lock", "artifacts"}
    assert [(tmp_path / "home" / name).stat().st_mode & 0o777 for name in ("mlflow", "tracking")] == [0o700, 0o700]


def test_an_older_schema_is_upgraded_and_the_old_database_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from alembic import command
    from alembic.script import ScriptDirectory
    from mlflow.store.db import utils
    from sqlalchemy import event

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "mlflow").mkdir()
    engine = utils.create_sqlalchemy_engine(tracking_uri(tmp_path))
    event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF"))
    utils.InitialBase.metadata.create_all(engine)
    config = utils._get_alembic_config(tracking_uri(tmp_path))
    older = ScriptDirectory.from_config(config).get_revision("head").down_revision
    assert isinstance(older, str)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, older)
    started(opened(tmp_path))
    assert databases.revision_of(tmp_path / "mlflow" / "mlflow.db") == utils._get_latest_schema_revision()
    assert databases.revision_of(tmp_path / "mlflow" / f"mlflow-{older}.db") == older


def test_every_location_in_the_schema_is_known(pristine: Path) -> None:
    not_on_disk = {("mcp_server_versions", "source"), ("evaluation_dataset_records", "source")}
    with closing(sqlite3.connect(pristine)) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = {(table, row[1]) for table in tables for row in db.execute(f"PRAGMA table_info({table})")}
    suspects = {(t, c) for t, c in columns if re.search(r"location|artifact_(uri|root)|directory|^(dataset_)?source$", c)}
    known = set(databases.LOCATIONS) - {("trace_tags", "value")}
    assert suspects - not_on_disk == known


def test_a_child_is_nested_and_both_are_continued_not_doubled(odd_home: Path) -> None:
    store = opened(odd_home)
    parent = started(store, "full", lr=0.02)
    child = started(store, "pretrain", parent=parent.id)
    child.finish("FAILED")

    store = opened(odd_home)
    again = started(store, "full", run_id=parent.id, lr=0.02)
    child_again = started(store, "pretrain", run_id=child.id, parent=again.id)
    assert (again.id, child_again.id) == (parent.id, child.id)
    assert store.client.get_run(child.id).info.status == "RUNNING"
    assert store.client.get_run(child.id).data.tags["mlflow.parentRunId"] == parent.id
    child_again.finish("FINISHED")
    assert store.client.get_run(child.id).info.status == "FINISHED"
    assert len(store.client.search_runs([store.experiment_id()])) == 2


def test_a_run_that_is_gone_is_made_anew(odd_home: Path) -> None:
    store = opened(odd_home)
    deleted = started(store)
    store.client.delete_run(deleted.id)
    assert started(store, run_id="0" * 32).id != "0" * 32
    assert started(store, run_id=deleted.id).id != deleted.id


def test_a_changed_parameter_warns_and_equal_ones_do_not(odd_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(odd_home)
    many: dict[str, Any] = {f"p{i}": i for i in range(250)}
    run = started(store, long="x" * 7000, lr=0.02, **many)
    started(store, run_id=run.id, long="x" * 7000, lr=0.02, **many)
    assert not caplog.records
    started(store, run_id=run.id, lr=0.03, new=1)
    assert [record.getMessage() for record in caplog.records] == [f"MLflow run {run.id} keeps lr = 0.02, now 0.03"]
    params = store.client.get_run(run.id).data.params
    assert (len(params), len(params["long"]), params["lr"], params["new"]) == (253, 6000, "0.02", "1")


def test_rows_become_points_with_their_step_time_and_tokens(odd_home: Path) -> None:
    run = started(opened(odd_home))
    metrics = {"loss": 2.5, "odd@name": 1.0, "missing": None, "bad": float("nan")}
    run.log_metrics([{"step": 10, "tokens": 4096, "time": 1732000000.12, "metrics": metrics}])
    run.log_metrics({"step": s, "tokens": s, "time": 1.7e9, "metrics": {"loss": 1.0}} for s in range(11, 1500))
    (point,) = (point for point in run.store.client.get_metric_history(run.id, "loss") if point.step == 10)
    assert (point.value, point.step, point.timestamp) == (2.5, 10, 1732000000120)
    assert steps(run) == steps(run, "tokens") == list(range(10, 1500))
    data = run.store.client.get_run(run.id).data.metrics
    assert set(data) == {"loss", "tokens", "odd_name", "missing", "bad"}
    assert math.isnan(data["missing"]) and math.isnan(data["bad"]), "what was no number is a gap, not a straight line"


def test_a_summary_given_again_adds_only_what_changed(odd_home: Path) -> None:
    store = opened(odd_home)
    run = started(store)
    run.log_summary({"eval/bits_per_byte": 2.1, "eval/accuracy": 0.5})
    again = started(store, run_id=run.id)
    again.log_summary({"eval/bits_per_byte": 2.0, "eval/accuracy": 0.5})
    assert store.client.get_run(run.id).data.metrics == {"eval/bits_per_byte": 2.0, "eval/accuracy": 0.5}
    assert (steps(run, "eval/bits_per_byte"), steps(run, "eval/accuracy")) == ([0, 0], [0])


def test_after_a_cut_the_follower_logs_each_step_once(odd_home: Path) -> None:
    store, path = opened(odd_home), odd_home / "metrics.jsonl"
    run = started(store)
    path.write_text((lines(1, 20) + line(20, val=1.0)).replace(": ", ":    ") + line(21)[:30])
    follower = MetricsFollower(path, run, seconds=0.02)
    wait_until(lambda: run.steps.get("val") == 20)
    assert steps(run) == list(range(1, 21))  # the half-written line waits
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


def test_a_half_written_last_line_is_logged_when_it_is_completed(odd_home: Path) -> None:
    store, path = opened(odd_home), odd_home / "metrics.jsonl"
    run = started(store)
    path.write_text(lines(1, 20) + line(21)[:30])
    follower = MetricsFollower(path, run, seconds=0.02)
    wait_until(lambda: run.steps.get("loss") == 20)
    with path.open("a") as file:
        file.write(line(21)[30:] + line(22))
    follower.stop()
    assert steps(run) == list(range(1, 23))


def test_a_new_run_does_not_inherit_the_steps_of_another(odd_home: Path) -> None:
    store, path = opened(odd_home), odd_home / "metrics.jsonl"
    path.write_text(lines(1, 10))
    MetricsFollower(path, started(store)).stop()
    other = started(store)
    MetricsFollower(path, other).stop()
    assert steps(other) == list(range(1, 11))


def test_four_threads_share_one_database(odd_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(odd_home)
    runs = [started(store, f"shards-{i}") for i in range(4)]

    def log_rows(run: TrackedRun) -> None:
        for first in range(1, 201, 5):
            run.log_metrics({"step": step, "metrics": {"loss": 1.0 / step}} for step in range(first, first + 5))

    threads = [threading.Thread(target=log_rows, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(steps(run) == list(range(1, 201)) for run in runs)
    assert not caplog.records


def test_runs_side_by_side_that_read_the_same_data_all_note_it(odd_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As the trials of a sweep: each with a client of its own."""
    runs = [started(opened(odd_home), f"trial {number}") for number in range(3)]
    data = [DataInput(f"set {number}", f"{number:012d}", "training", {"documents": 1}, 5) for number in range(4)]
    together = threading.Barrier(len(runs))

    def note(run: TrackedRun) -> None:
        together.wait()
        run.log_inputs(data)

    threads = [threading.Thread(target=note, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(run.store.client.get_run(run.id).inputs.dataset_inputs) for run in runs] == [4, 4, 4]
    assert caplog.records == []


def test_a_big_file_is_linked_and_a_small_one_copied(odd_home: Path) -> None:
    run, checkpoint = started(opened(odd_home)), odd_home / "work" / "step-10"
    (checkpoint / "nested").mkdir(parents=True)
    (checkpoint / "weights").write_bytes(b"w" * LINK_FROM_BYTES)
    (checkpoint / "nested" / "state.json").write_text("{}")
    run.log_directory(checkpoint, "checkpoint")
    run.log_directory(checkpoint, "checkpoint")
    run.log_file(checkpoint / "weights", "best")
    root = odd_home / "mlflow" / "artifacts" / run.id / "artifacts"
    weights = {path.stat().st_ino for path in (checkpoint / "weights", root / "checkpoint/weights", root / "best/weights")}
    assert len(weights) == 1
    state = root / "checkpoint" / "nested" / "state.json"
    assert (state.read_text(), state.stat().st_nlink) == ("{}", 1)
    assert {info.path for info in run.store.client.list_artifacts(run.id)} == {"checkpoint", "best"}
    assert len([path for path in root.rglob("*") if path.is_file()]) == 3


def test_a_link_that_cannot_be_is_a_copy(odd_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_disk(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", other_disk)
    run = started(opened(odd_home))
    (odd_home / "weights").write_bytes(b"w" * LINK_FROM_BYTES)
    run.log_file(odd_home / "weights", "model")
    copy = odd_home / "mlflow" / "artifacts" / run.id / "artifacts" / "model" / "weights"
    assert (copy.stat().st_size, copy.stat().st_nlink) == (LINK_FROM_BYTES, 1)


def register(store: MlflowStore, run: TrackedRun, **tags: str) -> str:
    version = store.register_model("quickstart-sft", run=run, artifact_path="model", tags=MODEL_TAGS | tags)
    assert version is not None
    return version


def downloaded(version: str) -> Path:
    from mlflow.artifacts import download_artifacts

    return Path(download_artifacts(f"models:/quickstart-sft/{version}"))


def test_the_same_model_is_registered_once_and_downloads_as_its_directory(
    odd_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(odd_home)
    run = started(store)
    run.log_text("{}", "model/config.json")
    assert register(store, run) == register(store, started(store)) == "1"
    assert register(store, run, **{"ttrain.content": "c2"}) == "2"
    assert store.client.get_model_version("quickstart-sft", "1").run_id == run.id
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.uri)
    directory = downloaded("1")
    assert [path.name for path in directory.iterdir()] == ["config.json"]


def test_a_copied_home_leaves_the_original_alone(odd_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(odd_home)
    run = started(store)
    run.log_text("{}", "model/config.json")
    register(store, run)
    copy = odd_home.parent / "b copy" / "home"
    shutil.copytree(odd_home, copy)
    before = fingerprint(odd_home)

    store = opened(copy)
    again, new = started(store, run_id=run.id), started(store)
    for either in (again, new):
        either.log_text("later", "model/later.txt")
        either.log_metrics([{"step": 1, "tokens": 1, "time": 1.7e9, "metrics": {"loss": 1.0}}])
        assert either.artifact_uri.startswith(copy.as_uri())
    assert register(store, new) == "1"
    assert register(store, new, **{"ttrain.content": "c2"}) == "2"
    assert fingerprint(odd_home) == before
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.uri)
    for version in "12":
        directory = downloaded(version)
        assert (directory / "later.txt").is_file()
        assert directory.is_relative_to(copy)
    with closing(sqlite3.connect(copy / "mlflow" / "mlflow.db")) as db:
        dump = "\n".join(db.iterdump())
    assert str(odd_home) not in dump
    assert odd_home.as_uri() not in dump


def test_mending_rewrites_each_form_once_even_into_a_nested_home(odd_home: Path) -> None:
    opened(odd_home)
    nested = odd_home / "inner"
    (nested / "mlflow").mkdir(parents=True)
    shutil.copy(odd_home / "mlflow" / "mlflow.db", nested / "mlflow" / "mlflow.db")
    database = nested / "mlflow" / "mlflow.db"
    with closing(sqlite3.connect(database)) as db, db:
        db.execute(
            "INSERT INTO experiments (experiment_id, name, artifact_location) VALUES (7, 'path', ?)", (f"{odd_home}/x",)
        )
        db.execute("INSERT INTO experiments (experiment_id, name, artifact_location) VALUES (8, 'far', 's3://bucket/x')")
        source = json.dumps({"uri": f"{odd_home}/data.jsonl"})
        row = ("u", 7, "n", "d", "local", source)
        columns = "dataset_uuid, experiment_id, name, digest, dataset_source_type, dataset_source"
        db.execute(f"INSERT INTO datasets ({columns}) VALUES (?, ?, ?, ?, ?, ?)", row)
    assert repair_moved_home(nested) == 4
    assert repair_moved_home(nested) == 0
    with closing(sqlite3.connect(database)) as db:
        places = dict(db.execute("SELECT name, artifact_location FROM experiments"))
        datasets = [json.loads(text) for (text,) in db.execute("SELECT dataset_source FROM datasets")]
    artifacts = (nested / "mlflow" / "artifacts").as_uri()
    assert places == {"Default": f"{artifacts}/0", "ttrain": artifacts, "path": f"{nested}/x", "far": "s3://bucket/x"}
    assert datasets == [{"uri": f"{nested}/data.jsonl"}]


def test_a_silent_server_costs_one_warning_and_bounded_time(
    tmp_path: Path, silent_server: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", silent_server.replace("//", "//user:secret@"))
    monkeypatch.setattr("ttrain.tracking.client.PROBE_SECONDS", 0.3)
    waited = stopwatch()
    store = opened(tmp_path)
    run = store.start_run("stage", run_id="kept", tags={}, params={})
    assert (run.id, run.url) == ("kept", None)
    run.finish("FINISHED")
    assert store.close() == 2, "that it goes on, and that it ended"
    assert waited() < 5
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["MLflow at http"] * 2
    assert "secret" not in caplog.text + "".join(path.read_text() for path in (tmp_path / "tracking").rglob("*.json*"))


def test_points_that_failed_are_not_passed_by_later_ones(odd_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later steps in MLflow would make the earlier ones look as if they had been sent."""
    store = opened(odd_home)
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
    odd_home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ttrain.tracking.runs.clean", lambda key: key)
    run, path = started(opened(odd_home)), odd_home / "metrics.jsonl"
    path.write_text(lines(1, 20) + line(20, **{"../up": 1.0}) + lines(21, 40))
    MetricsFollower(path, run).stop()
    assert steps(run) == list(range(1, 41))
    assert [record.getMessage().count("logging ../up failed") for record in caplog.records] == [1]


def test_a_deleted_run_holds_up_no_other(odd_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(odd_home)
    deleted, other = started(store), started(store)
    store.client.delete_run(deleted.id)
    assert deleted.log_metrics([{"step": 1, "metrics": {"loss": 1.0}}]), "refused for good, so there is nothing to retry"
    deleted.finish("FINISHED")
    other.finish("FINISHED")
    assert store.client.get_run(other.id).info.status == "FINISHED"
    assert store.close() == 0
    assert not list((odd_home / "tracking").iterdir()) if (odd_home / "tracking").exists() else True


def test_a_database_that_is_none_costs_a_warning_which_names_the_cure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "mlflow.db").write_text("not a database, but longer than nothing" * 100)
    assert opened(tmp_path).close() == 0
    assert len(caplog.records) == 1 and "`ttrain track repair`" in caplog.text
    prepare(tmp_path)
    assert len(caplog.records) == 2 and "cannot be prepared" in caplog.text


def test_preparing_makes_the_homes_own_database_wherever_runs_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://there:5000")
    prepare(tmp_path)
    with closing(sqlite3.connect(tmp_path / "mlflow" / "mlflow.db")) as db:
        places = db.execute("SELECT name, artifact_location FROM experiments").fetchall()
    assert places == [("Default", f"{(tmp_path / 'mlflow' / 'artifacts').as_uri()}/0")]


def test_the_stages_of_a_run_stand_in_one_tag(odd_home: Path) -> None:
    store = opened(odd_home)
    parent = started(store, "full")
    child = store.start_run("sft", parent=parent, tags={}, params={})
    child.link_to_parent("sft")
    parent.note_stages({"sft": "k2", "tokenizer": "k1"})
    tags = store.client.get_run(parent.id).data.tags
    assert [tag for tag in tags if tag.startswith("ttrain.") and "stage" in tag] == ["ttrain.stage", "ttrain.stages"]
    assert stages_of(tags) == {"sft": {"run": child.id, "key": "k2"}, "tokenizer": {"key": "k1"}}
    assert stages_of({"ttrain.stages": "no JSON"}) == stages_of({"ttrain.stages": "[1]"}) == {}
