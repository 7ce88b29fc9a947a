"""A run whose documents are all known: its outcome, its record, its status and its log."""

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console
from support.shard_sets import write_lines
from support.tiny_stages import Home

from ttrain.config.loading import load
from ttrain.engine.execution import PipelineRun
from ttrain.engine.graph import Graph, Plan
from ttrain.engine.planner import plan
from ttrain.errors import NothingNew
from ttrain.flows.engine import RunOptions, run_pipeline
from ttrain.reports import summary
from ttrain.store import runs
from ttrain.store.layout import Artifact
from ttrain.tasks import SHARDS_PRETRAIN

WHY = "data.pretrain: of 40 rows 40 are near-duplicates"
FIXED = ["tracking.enabled=false", "reading.near_duplicates=0.8", "runtime.workers=1"]


def make_shards(
    home: Home, texts: Sequence[str], out: io.StringIO, **learnt: Artifact
) -> PipelineRun:
    path = write_lines(home.store.root.parent / "docs.jsonl", [{"text": text} for text in texts])
    settings = load([f"data.pretrain={path}", *FIXED], environment={}).settings
    graph = Graph()
    graph.add(SHARDS_PRETRAIN, tokenizer=home.tokenizer, **learnt)
    planned = Plan("nightly", settings, home.store, graph, plan(graph, settings, home.store))
    return run_pipeline(planned, Console(file=out, width=200), RunOptions("none"))


def test_a_run_without_a_new_document_ends_as_nothing_new(tmp_path: Path) -> None:
    home = Home.make(tmp_path / "home")
    texts = [" ".join(f"{word}{number}" for word in range(40)) for number in range(40)]
    learnt = make_shards(home, texts, io.StringIO()).artifacts["shards-pretrain"]
    out = io.StringIO()
    with pytest.raises(NothingNew, match=WHY):
        make_shards(home, [f"{text} more" for text in texts], out, **{"learnt-0000": learnt})
    assert out.getvalue().splitlines()[1:] == ["= shards-pretrain: nothing new"]
    [night, _] = runs.history(home.store.root)
    [stage] = night["stages"]
    assert (night["outcome"], stage["outcome"]) == ("nothing-new", "nothing-new")
    assert "error" not in night and summary.status_row(stage)[3].startswith(WHY)
    log = home.store.root.joinpath("runs", f"{night['run']}.log").read_text()
    assert log.count("near-duplicates, most") == 2 and "ERROR" not in log
