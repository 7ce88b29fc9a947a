"""The history of runs: newest first, readable while they go on, and honest about those whose process is gone."""

import errno
import itertools
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from unittest.mock import Mock

import pytest
from store.test_store import full_disk

from ttrain.errors import with_fix
from ttrain.flows import deploy, serve
from ttrain.nightly.records import InputSnapshot, Nights
from ttrain.store import run_views, runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.runs import RunRecord, history


def record(home: Path, started: float = 0.0, **notes: object) -> RunRecord:
    made = RunRecord(home, "full", ["tokenizer", "pretrain"], {"name": "x"})
    made.note(started_unix=started, **notes)
    return made


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    records = [record(tmp_path) for _ in range(3)]
    names = [run.run for run in records]
    (tmp_path / "runs" / "broken.json").write_text('{"run": ')
    (tmp_path / "runs" / "older.json").write_text('{"run": "older", "outcome": "completed"}')
    assert [run["run"] for run in history(tmp_path)] == names[::-1], (
        "the broken ones hide no others"
    )
    assert history(tmp_path / "empty") == []


def test_a_run_is_on_record_from_its_first_moment_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = RunRecord(tmp_path, "full", ["tokenizer", "pretrain"], {"name": "x"})
    assert [stage["outcome"] for stage in history(tmp_path)[0]["stages"]] == ["pending", "pending"]
    made.stage("pretrain", outcome="running", key="k")
    (run,) = history(tmp_path)
    assert (run["outcome"], run["stages"][1]) == (
        "running",
        {"name": "pretrain", "outcome": "running", "key": "k"},
    )
    yesterday = time.time() - 86400
    monkeypatch.setattr(time, "time", lambda: yesterday)
    made.finish("completed", {"eval/x": 1.0})
    (run,) = history(tmp_path)
    assert (run["outcome"], run["metrics"]) == ("completed", {"eval/x": 1.0}) and 0 <= run[
        "seconds"
    ] < 60


def test_a_run_whose_process_was_killed_is_shown_as_crashed(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        record(tmp_path, process={"pid": process.pid, "started": runs.process_started(process.pid)})
        assert history(tmp_path)[0]["outcome"] == "running"
        process.kill()
        process.wait()
    assert history(tmp_path)[0]["outcome"] == "crashed"


KEYS: dict[str, str | None] = {"tokenizer": "a", "pretrain": "b"}


def with_keys(made: RunRecord, **keys: str) -> RunRecord:
    for stage, key in {**KEYS, **keys}.items():
        made.stage(stage, key=key)
    return made


def maker(home: Path, keys: Mapping[str, str | None]) -> str | None:
    """The run that made these artifacts."""
    return next(filter(None, map(runs.made_by, runs.equal_runs(home, keys))), None)


def test_the_run_that_a_cached_one_equals_is_the_newest_completed_with_these_artifacts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert maker(tmp_path, KEYS) is None
    names, ticks = [], itertools.count(10**9)
    monkeypatch.setattr(
        runs,
        "datetime",
        Mock(wraps=datetime, now=lambda zone: datetime.fromtimestamp(next(ticks), zone)),
    )
    for outcome, pretrain in (
        ("completed", "b"),
        ("completed", "b"),
        ("completed", "c"),
        ("failed", "b"),
    ):
        made = with_keys(record(tmp_path), pretrain=pretrain)
        made.finish(outcome, {})
        names.append(made.run)
    assert maker(tmp_path, KEYS) == names[1]
    assert maker(tmp_path, {"tokenizer": "a"}) is None


def test_who_builds_a_key_is_told_by_its_process(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    assert runs.builder(store, "pretrain", "f00d") == "another run"
    with store.lock("pretrain", "f00d"):
        assert (
            runs.builder(store, "pretrain", "f00d") == f"process {os.getpid()} on {platform.node()}"
        )


def test_a_full_disk_costs_the_note_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = record(tmp_path)
    with full_disk(10):
        made.log("sft", "line")
        made.stage("pretrain", outcome="running", key="k")
        made.note(error="x")
    told = [entry.message for entry in caplog.records if "cannot be written" in entry.message]
    assert len(told) == 1 and f"the run's record {made.path}" in told[0], "once"
    assert history(tmp_path)[0]["stages"][1] == {"name": "pretrain", "outcome": "pending"}
    made.finish("completed", {})
    assert history(tmp_path)[0]["stages"][1] == {
        "name": "pretrain",
        "outcome": "running",
        "key": "k",
    }, "nothing is lost"


def test_a_run_that_could_not_write_its_record_is_not_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = record(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space") as full:
        patch.setattr(
            runs, "write_json", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        )
        RunRecord(tmp_path, "full", ["sft"], {})
    assert with_fix(full.value).endswith(
        "No space left on device; free some space and run the same command again"
    )
    assert [path.name for path in (tmp_path / "runs").glob("*.json")] == [f"{made.run}.json"]
    for name, text in (
        ("full-29991121-160222-1a2b4", ""),
        ("full-19991121-160222-1a2b4", '{"outcome": "completed"}'),
    ):
        (tmp_path / "runs" / f"{name}.json").write_text(
            text
        )  # of a kill in that moment; of another version
        assert run_views.need_run(tmp_path, "latest")["run"] == made.run
        assert run_views.find_run(tmp_path, name) is None


def test_records_and_logs_are_for_their_owner_alone(tmp_path: Path) -> None:
    """Also who serves."""
    nights = Nights(tmp_path, "mine")
    made = record(tmp_path)
    made.log("sft", "a line")
    with nights.lock():
        nights.begin(InputSnapshot({}, {}), None)
    nights.skipped(None, "a reason")
    with serve.serve_lock(tmp_path):
        folders = (tmp_path / "runs", tmp_path / "nightly", deploy.folder_of(tmp_path))
        paths = [path for root in folders for path in (root, *root.rglob("*"))]
        assert len(paths) > 8
        assert [
            path for path in paths if path.suffix != ".lock" and path.stat().st_mode & 0o077
        ] == []
