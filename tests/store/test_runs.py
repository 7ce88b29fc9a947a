"""The history of runs: newest first, also while they go on; crashed if the process is gone."""

import errno
import itertools
import os
import platform
import subprocess
import time
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
from ttrain.store.runs import RunRecord, guard_warning, history


def record(home: Path, **notes: object) -> RunRecord:
    made = RunRecord(home, "full", ["tokenizer", "pretrain"], {"name": "x"})
    if notes:
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


def test_the_process_that_builds_a_key_is_named(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    assert runs.builder(store, "pretrain", "f00d") == "another run"
    with store.lock("pretrain", "f00d"):
        process = f"process {os.getpid()} on {platform.node()}"
        assert runs.builder(store, "pretrain", "f00d") == process


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


def test_a_run_without_a_record_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = record(tmp_path)
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="space") as raised:
        patch.setattr(runs, "write_json", Mock(side_effect=full))
        RunRecord(tmp_path, "full", ["sft"], {})
    assert with_fix(raised.value).endswith("; free some space and run the same command again")
    assert [path.name for path in (tmp_path / "runs").glob("*.json")] == [f"{made.run}.json"]
    # of a kill in that moment; of another version
    for year, text in ((2999, ""), (1999, '{"outcome": "completed"}')):
        name = f"full-{year}1121-160222-1a2b4"
        (tmp_path / "runs" / f"{name}.json").write_text(text)
        assert run_views.need_run(tmp_path, "latest")["run"] == made.run
        assert run_views.find_run(tmp_path, name) is None


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


@pytest.mark.parametrize(
    ("line", "warning"),
    [
        ("2026-11-30 03:09:25,335 guard overfit: step 9: rose", "guard overfit: step 9: rose"),
        ("2026-11-30 03:09:25,335 rank 0: guard loss-spike: step 9", "guard loss-spike: step 9"),
        ("2026-11-30 03:09:25,335 the guards are on", ""),
    ],
)
def test_a_guards_warning_is_known_in_the_log(line: str, warning: str) -> None:
    assert guard_warning(line) == warning
