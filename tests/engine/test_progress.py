"""How far a run in progress is, as another process sees it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ttrain.cli import pipeline as cli_pipeline
from ttrain.cli.main import app
from ttrain.store.runs import RunRecord


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunRecord:
    """A run whose SFT has trained on 3,000 of 9,000 tokens in ten seconds, of which an earlier attempt had 1,000."""
    monkeypatch.setenv("TTRAIN_HOME", str(tmp_path))
    run = RunRecord(tmp_path, "full", ["pretrain", "sft"], {})
    run.stage("pretrain", outcome="completed", key="p", seconds=3.0)
    run.stage("sft", outcome="running", key="s")
    run.stage(
        "sft",
        progress={"done": 3000, "total": 9000, "unit": "tokens", "first": 1000, "seconds": 10.0},
    )
    return run


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
    monkeypatch.setattr(
        cli_pipeline.time, "sleep", lambda seconds: training.finish("completed", {})
    )
    watched = status("--watch")
    assert "33 %" in watched and watched.count("completed") >= 2
