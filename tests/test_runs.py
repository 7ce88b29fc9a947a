"""The history of runs: newest first, readable while they go on, and honest about those whose process is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ttrain import runs
from ttrain.runs import RunRecord, history
from ttrain.store import read_json, write_json


def record(home: Path, started: float = 0.0, **notes: object) -> RunRecord:
    made = RunRecord(home, "full", ["tokenizer", "pretrain"], {"name": "x"})
    made.note(started_unix=started, **notes)
    return made


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    names = [record(tmp_path, started=started).run for started in (2.0, 3.0, 1.0)]
    assert [run["run"] for run in history(tmp_path)] == [names[1], names[0], names[2]]
    assert history(tmp_path / "empty") == []


def test_a_run_is_on_record_from_its_first_moment_to_its_end(tmp_path: Path) -> None:
    made = RunRecord(tmp_path, "full", ["tokenizer", "pretrain"], {"name": "x"})
    assert [stage["outcome"] for stage in history(tmp_path)[0]["stages"]] == ["pending", "pending"]
    made.stage("pretrain", outcome="running", key="k")
    (run,) = history(tmp_path)
    assert (run["outcome"], run["stages"][1]) == ("running", {"name": "pretrain", "outcome": "running", "key": "k"})
    made.finish("completed", {"eval/x": 1.0})
    (run,) = history(tmp_path)
    assert (run["outcome"], run["metrics"]) == ("completed", {"eval/x": 1.0})
    assert run["seconds"] >= 0


def test_a_run_whose_process_was_killed_is_shown_as_crashed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = runs.process_started(process.pid)
        made = record(tmp_path, process={"pid": process.pid, "started": started})
        made.stage("pretrain", outcome="running")
        assert history(tmp_path)[0]["outcome"] == "running"
        process.kill()
        process.wait()
    (run,) = history(tmp_path)
    assert run["outcome"] == "crashed"
    assert [stage["outcome"] for stage in run["stages"]] == ["pending", "crashed"]


def test_a_recycled_process_number_does_not_count_as_alive(tmp_path: Path) -> None:
    own = runs.process_started(os.getpid())
    assert own is not None
    record(tmp_path, process={"pid": os.getpid(), "started": own - 1000})
    assert history(tmp_path)[0]["outcome"] == "crashed"


@pytest.mark.parametrize("outcome", ["completed", "failed", "interrupted", "cached"])
def test_a_run_that_ended_keeps_its_outcome_when_its_process_is_gone(tmp_path: Path, outcome: str) -> None:
    record(tmp_path, process={"pid": os.getpid(), "started": 1.0}).finish(outcome, {})
    assert history(tmp_path)[0]["outcome"] == outcome


def test_a_broken_record_does_not_hide_the_others(tmp_path: Path) -> None:
    made = record(tmp_path)
    (tmp_path / "runs" / "broken.json").write_text('{"run": ')
    assert [run["run"] for run in history(tmp_path)] == [made.run]
    assert read_json(made.path)["run"] == made.run


def test_the_run_that_a_cached_one_equals_is_the_newest_completed_with_these_artifacts(tmp_path: Path) -> None:
    keys = {"tokenizer": "a", "pretrain": "b"}
    assert runs.equal_run(tmp_path, keys) is None
    names = {}
    for started, outcome, pretrain in (
        (1, "completed", "b"),
        (2, "completed", "b"),
        (3, "completed", "c"),
        (4, "failed", "b"),
    ):
        made = record(tmp_path, started=float(started))
        made.stage("tokenizer", key="a")
        made.stage("pretrain", key=pretrain)
        made.finish(outcome, {})
        names[started] = made.run
        values = read_json(made.path)
        write_json(made.path, {**values, "started_unix": float(started)})
    assert runs.equal_run(tmp_path, keys) == names[2]
    assert runs.equal_run(tmp_path, {"tokenizer": "a"}) is None
