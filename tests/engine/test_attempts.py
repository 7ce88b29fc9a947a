"""What asks a run to stop, and what its record keeps of its settings."""

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

UNTRACKED = "tracking.enabled=false"


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def execution(tmp_path: Path, output: io.StringIO) -> PipelineRun:
    settings = load([UNTRACKED], environment={}).settings
    plan = Plan("full", settings, ArtifactStore(tmp_path), Graph(), planned("sft"))
    return PipelineRun(plan, Display(Console(file=output, width=200)))


def test_the_first_reason_to_stop_stays(execution: PipelineRun, output: io.StringIO) -> None:
    execution.ask_to_stop(15, "deadline reached")
    execution.ask_to_stop(2, "cancelled in Prefect")
    assert (execution.signum, execution.stop_reason) == (15, "deadline reached")
    assert output.getvalue() == "deadline reached: the running stages save their state\n"
    with pytest.raises(Interrupted, match="deadline reached"):
        execution.raise_if_signalled()


def test_a_deadline_stops_only_a_run_that_has_not_ended(execution: PipelineRun) -> None:
    began = time.monotonic()
    waited = stopwatch()
    with execution.stopping_at(time.time() + 0.2):
        pass
    execution.wait(0.4)
    assert time.monotonic() - began >= 0.4 and waited() < 5
    assert not execution.signum, "the run had ended before its deadline"
    began = time.time()
    with execution.stopping_at(began + 0.3):
        execution.wait(10)  # ends with the request to stop
        assert time.time() - began >= 0.3 and waited() < 5
    assert execution.stop_reason == "deadline reached"


def test_a_record_keeps_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load(["data.sft=chats*.jsonl", UNTRACKED], environment={}).settings
    run = run_of(ArtifactStore(tmp_path), settings, planned("sft")).record.run
    monkeypatch.chdir("/")
    recorded = load(base=lookup.settings_of(need_run(tmp_path, run)), environment={}).settings
    assert recorded.data.sft == (str(tmp_path / "chats*.jsonl"),)
