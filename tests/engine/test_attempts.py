"""How runs end at a deadline, and without a new document."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console
from support.shard_sets import write_lines
from support.tiny_stages import Home, planned, run_of

from ttrain.config.loading import load
from ttrain.engine.execution import PipelineRun
from ttrain.engine.graph import Graph, Plan
from ttrain.engine.planner import plan
from ttrain.errors import Interrupted, NothingNew
from ttrain.flows.engine import RunOptions, run_pipeline
from ttrain.store import runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.tasks import SHARDS_PRETRAIN

FIXED = ["tracking.enabled=false", "reading.near_duplicates=0.8", "runtime.workers=1"]


def test_a_deadline_stops_only_a_run_that_has_not_ended(tmp_path: Path) -> None:
    settings = load(["tracking.enabled=false"], environment={}).settings
    execution = run_of(ArtifactStore(tmp_path), settings, planned("sft"))
    began = time.time()
    with execution.stopping_at(began + 0.2):
        pass
    execution.wait(0.4)
    assert time.time() - began >= 0.4 and not execution.signum, "it had ended"
    began = time.time()
    with execution.stopping_at(began + 0.3):
        execution.wait(60)  # ends with the request to stop
        assert 0.3 <= time.time() - began < 30
    execution.ask_to_stop(2, "cancelled in Prefect")
    with pytest.raises(Interrupted, match="deadline reached"):  # the first reason stays
        execution.raise_if_signalled()


def make_shards(home: Home, texts: Sequence[str], **learnt: Artifact) -> PipelineRun:
    path = write_lines(home.store.root.parent / "docs.jsonl", [{"text": text} for text in texts])
    settings = load([f"data.pretrain={path}", *FIXED], environment={}).settings
    graph = Graph()
    graph.add(SHARDS_PRETRAIN, tokenizer=home.tokenizer, **learnt)
    planned = Plan("nightly", settings, home.store, graph, plan(graph, settings, home.store))
    return run_pipeline(planned, Console(quiet=True), RunOptions("none"))


def test_a_run_without_a_new_document_ends_as_nothing_new(tmp_path: Path) -> None:
    home = Home.make(tmp_path / "home")
    texts = [" ".join(f"{word}{number}" for word in range(40)) for number in range(40)]
    learnt = make_shards(home, texts).artifacts["shards-pretrain"]
    with pytest.raises(NothingNew, match=r"data\.pretrain: of 40 rows 40 are near-duplicates"):
        make_shards(home, [f"{text} more" for text in texts], **{"learnt-0000": learnt})
    [night, _] = runs.history(home.store.root)
    assert night["outcome"] == night["stages"][0]["outcome"] == "nothing-new"
    log = home.store.root.joinpath("runs", f"{night['run']}.log").read_text()
    assert "error" not in night and "ERROR" not in log
