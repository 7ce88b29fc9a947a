"""What asks a run to stop, and what its record keeps of its settings."""

import time
from pathlib import Path

import pytest
from rich.console import Console
from support.tiny_stages import planned

from ttrain.config.loading import load
from ttrain.engine.display import Display
from ttrain.engine.execution import PipelineRun
from ttrain.engine.graph import Graph, Plan
from ttrain.errors import Interrupted
from ttrain.store.artifacts import ArtifactStore

UNTRACKED = "tracking.enabled=false"


def test_a_deadline_stops_only_a_run_that_has_not_ended(tmp_path: Path) -> None:
    settings = load([UNTRACKED], environment={}).settings
    plan = Plan("full", settings, ArtifactStore(tmp_path), Graph(), planned("sft"))
    execution = PipelineRun(plan, Display(Console(quiet=True)))
    began = time.monotonic()
    with execution.stopping_at(time.time() + 0.2):
        pass
    execution.wait(0.4)
    assert 0.4 <= time.monotonic() - began < 9
    assert not execution.signum, "the run had ended before its deadline"
    began = time.time()
    with execution.stopping_at(began + 0.3):
        execution.wait(10)  # ends with the request to stop
        assert 0.3 <= time.time() - began < 9
    execution.ask_to_stop(2, "cancelled in Prefect")
    assert execution.stop_reason == "deadline reached", "the first reason stays"
    with pytest.raises(Interrupted, match="deadline reached"):
        execution.raise_if_signalled()
