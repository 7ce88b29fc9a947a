"""The history of runs: newest first, also while they go on; crashed if the process is gone."""

import itertools
import subprocess
import time
from datetime import datetime
from pathlib import Path
from unittest.mock import Mock

import pytest
from store.test_store import full_disk

from ttrain.flows import deploy, serve
from ttrain.nightly.records import InputSnapshot, Nights
from ttrain.store import runs
from ttrain.store.runs import RunRecord, history


def record(home: Path, **notes: object) -> RunRecord:
    made = RunRecord(home, "full", ["tokenizer", "pretrain"], {"name": "x"})
    made.note(**notes)
    return made


def test_runs_are_listed_newest_first_and_broken_records_hide_no_others(tmp_path: Path) -> None:
    names = [record(tmp_path).run for _ in range(3)]
    (tmp_path / "runs" / "broken.json").write_text('{"run": ')
    (tmp_path / "runs" / "older.json").write_text('{"run": "older", "outcome": "completed"}')
    assert [run["run"] for run in history(tmp_path)] == names[::-1]
    assert history(tmp_path / "empty") == []


def test_a_run_is_on_record_from_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = record(tmp_path)
    assert [stage["outcome"] for stage in history(tmp_path)[0]["stages"]] == ["pending", "pending"]
    made.stage("pretrain", outcome="running", key="k")
    (run,) = history(tmp_path)
    assert run["outcome"] == "running"
    assert run["stages"][1] == {"name": "pretrain", "outcome": "running", "key": "k"}
    yesterday = time.time() - 86400
    monkeypatch.setattr(time, "time", lambda: yesterday)
    made.finish("completed", {"eval/x": 1.0})
    (run,) = history(tmp_path)
    assert (run["outcome"], run["metrics"]) == ("completed", {"eval/x": 1.0})
    assert 0 <= run["seconds"] < 60


def test_a_run_whose_process_was_killed_is_shown_as_crashed(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        record(tmp_path, process={"pid": process.pid, "started": runs.process_started(process.pid)})
        assert history(tmp_path)[0]["outcome"] == "running"
        process.kill()
        process.wait()
    assert history(tmp_path)[0]["outcome"] == "crashed"


def test_a_full_disk_costs_only_the_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = record(tmp_path)
    with full_disk(10):
        made.log("sft", "line")
        made.stage("pretrain", outcome="running", key="k")
        made.note(error="x")
    warnings = [entry.message for entry in caplog.records if str(made.path) in entry.message]
    assert len(warnings) == 1
    stage = {"name": "pretrain", "outcome": "pending"}
    assert history(tmp_path)[0]["stages"][1] == stage
    made.finish("completed", {})
    assert history(tmp_path)[0]["stages"][1] == {**stage, "outcome": "running", "key": "k"}


def test_records_and_logs_are_for_their_owner_alone(tmp_path: Path) -> None:
    nights = Nights(tmp_path, "mine")
    record(tmp_path).log("sft", "a line")
    with nights.lock():
        nights.begin(InputSnapshot({}, {}), None)
    nights.skipped(None, "a reason")
    with serve.serve_lock(tmp_path):
        folders = (tmp_path / "runs", tmp_path / "nightly", deploy.folder_of(tmp_path))
        paths = [path for root in folders for path in (root, *root.rglob("*"))]
        assert len(paths) > 8
        guarded = [path for path in paths if path.suffix != ".lock"]
        assert [path for path in guarded if path.stat().st_mode & 0o077] == []


def test_the_run_that_a_cached_one_equals_is_the_newest_completed_with_these_artifacts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def makers(**keys: str) -> list[str | None]:
        return [runs.made_by(run) for run in runs.equal_runs(tmp_path, keys) if runs.made_by(run)]

    assert makers(tokenizer="a", pretrain="b") == []
    ticks = itertools.count(10**9)
    clock = Mock(wraps=datetime, now=lambda zone: datetime.fromtimestamp(next(ticks), zone))
    monkeypatch.setattr(runs, "datetime", clock)
    names = []
    for pretrain, outcome in zip("bbcb", [*["completed"] * 3, "failed"], strict=True):
        made = record(tmp_path)
        made.stage("tokenizer", key="a")
        made.stage("pretrain", key=pretrain)
        made.finish(outcome, {})
        names.append(made.run)
    assert makers(tokenizer="a", pretrain="b")[0] == names[1]
    assert makers(tokenizer="a") == []
