"""How far a run in progress is, as another process sees it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ttrain.cli import pipeline as cli_pipeline
from ttrain.cli.main import app
from ttrain.core import files
from ttrain.core.files import ProgressWriter
from ttrain.pipeline.run_progress import FILE, progress_of
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.runs import RunRecord, read


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunRecord:
    """A run whose SFT has trained on 3,000 of 9,000 tokens in ten seconds, of which an earlier attempt had 1,000."""
    monkeypatch.setenv("TTRAIN_HOME", str(tmp_path))
    run = RunRecord(tmp_path, "full", ["pretrain", "sft"], {})
    run.stage("pretrain", outcome="completed", key="p", seconds=3.0)
    run.stage("sft", outcome="running", key="s")
    work = ArtifactStore(tmp_path).work("sft", "s")
    work.mkdir(parents=True)
    clock = iter([100.0, 110.0])
    monkeypatch.setattr(files.time, "monotonic", lambda: next(clock))
    progress = ProgressWriter(work / FILE)
    progress.update(1000, 9000, "tokens", start=True)
    progress.update(3000, 9000, "tokens", loss=2.5)
    monkeypatch.undo()
    monkeypatch.setenv("TTRAIN_HOME", str(tmp_path))
    return run


def test_the_rate_counts_what_this_attempt_did_and_gives_the_time_left(training: RunRecord, tmp_path: Path) -> None:
    (sft,) = progress_of(tmp_path, read(tmp_path, training.run) or {})
    assert (sft.stage, sft.per_second, sft.seconds_left) == ("sft", 200.0, 30.0)
    assert sft.percent == pytest.approx(100 / 3) and str(sft) == "33 %, 200 tokens/s, 30.0 s left"


def test_a_run_that_has_ended_or_crashed_and_a_damaged_file_have_no_progress(training: RunRecord, tmp_path: Path) -> None:
    (ArtifactStore(tmp_path).work("sft", "s") / FILE).write_text('{"done": "x"}')
    assert progress_of(tmp_path, read(tmp_path, training.run) or {}) == []
    training.finish("failed", {})
    assert progress_of(tmp_path, read(tmp_path, training.run) or {}) == []


def test_status_shows_stage_percent_rate_and_time_left_and_watch_ends_with_the_run(
    training: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def status(*words: str) -> str:
        done = CliRunner().invoke(app, ["pipeline", "status", *words])
        assert done.exit_code == 0, done.output
        return done.output

    assert "33 %, 200 tokens/s, 30.0 s left" in status()
    (run,) = json.loads(status("--json"))
    assert run["stages"][1]["progress"]["seconds_left"] == 30.0 and run["outcome"] == "running"
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            training.finish("completed", {})

    monkeypatch.setattr(cli_pipeline.time, "sleep", sleep)
    assert status("--watch").count("running") >= 2 and len(waits) == 2
    assert [json.loads(line)[0]["outcome"] for line in status("--watch", "--json").splitlines()] == ["completed"]


def test_status_of_a_run_that_is_named_lists_that_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTRAIN_HOME", str(tmp_path))
    first, second = (RunRecord(tmp_path, "full", ["sft"], {}) for _ in range(2))
    for record in (first, second):
        record.finish("failed", {})
    for word, listed in ((first.run, first), ("latest", second)):
        done = CliRunner().invoke(app, ["status", word, "--json"])
        assert [run["run"] for run in json.loads(done.output)] == [listed.run]
