"""How far a run in progress is, as another process sees it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ttrain.cli import pipeline as cli_pipeline
from ttrain.cli.main import app
from ttrain.store.runs import RunRecord

# 2,000 tokens in ten seconds; an earlier attempt trained on the first 1,000
PROGRESS = {"done": 3000, "total": 9000, "unit": "tokens", "first": 1000, "seconds": 10.0}


def status(*words: str) -> str:
    shown = CliRunner().invoke(app, ["pipeline", "status", *words])
    assert shown.exit_code == 0, shown.output
    return shown.output


def test_status_shows_percent_rate_and_time_left_until_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTRAIN_HOME", str(tmp_path))
    run = RunRecord(tmp_path, "full", ["pretrain", "sft"], {})
    run.stage("pretrain", outcome="completed", key="p", seconds=3.0)
    run.stage("sft", outcome="running", key="s", progress=PROGRESS)
    assert "33 %, 200 tokens/s, 30.0 s left" in status()
    (record,) = json.loads(status("--json"))
    assert record["stages"][1]["progress"]["seconds_left"] == 30.0
    assert record["outcome"] == "running"
    monkeypatch.setattr(cli_pipeline, "sleep", lambda seconds: run.finish("completed", {}))
    watched = status("--watch")
    assert "33 %" in watched and watched.count("completed") >= 2
