"""How often a stage is tried, how long it may take, and what asks a run to stop."""

import io
import time
from pathlib import Path

import pytest
from rich.console import Console
from support.tiny_stages import planned, run_of
from support.waiting import stopwatch

from ttrain.config.loading import load
from ttrain.engine.display import Display
from ttrain.engine.execution import PipelineRun
from ttrain.engine.graph import Graph, Plan
from ttrain.errors import Interrupted
from ttrain.lineage import lookup
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.run_views import need_run


@pytest.fixture
def execution(tmp_path: Path) -> PipelineRun:
    settings = load(["tracking.enabled=false"], environment={}).settings
    console = Console(file=io.StringIO(), width=200)
    return PipelineRun(
        Plan("full", settings, ArtifactStore(tmp_path), Graph(), planned("sft")), Display(console)
    )


def said(execution: PipelineRun) -> str:
    assert isinstance(execution.display.console.file, io.StringIO)
    return execution.display.console.file.getvalue()


def test_the_first_reason_to_stop_is_the_one_that_is_told(execution: PipelineRun) -> None:
    execution.ask_to_stop(15, "deadline reached")
    execution.ask_to_stop(2, "cancelled in Prefect")
    assert (execution.signum, execution.stop_reason) == (15, "deadline reached")
    assert said(execution) == "deadline reached: the running stages save their state\n"
    with pytest.raises(Interrupted, match="deadline reached before a stage began"):
        execution.raise_if_signalled()


def test_the_deadline_stops_a_run_and_one_that_is_over_does_not(execution: PipelineRun) -> None:
    began, waited = time.monotonic(), stopwatch()
    with execution.stopping_at(time.time() + 0.2):
        pass
    execution.wait(0.4)
    assert time.monotonic() - began >= 0.4 and waited() < 5, (
        "a waiting stage waits as long as it should"
    )
    assert not execution.signum, "the run had ended before its deadline"
    began, waited = time.time(), stopwatch()
    with execution.stopping_at(began + 0.3):
        execution.wait(10)  # which ends with the request to stop
        assert time.time() - began >= 0.3 and waited() < 5
    assert execution.stop_reason == "deadline reached"


def test_a_run_s_record_means_the_same_files_wherever_its_stage_is_rerun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load(["data.sft=chats*.jsonl", "tracking.enabled=false"], environment={}).settings
    made = run_of(ArtifactStore(tmp_path), settings, planned("sft"))
    monkeypatch.chdir("/")
    again = load(
        base=lookup.settings_of(need_run(tmp_path, made.record.run)), environment={}
    ).settings
    assert again.data.sft == (str(tmp_path / "chats*.jsonl"),)
