"""A run whose documents are all known: no failure, and no model, in its record, its status and its log."""

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

WHY = "data.pretrain: of 40 rows 40 are near-duplicates, most of documents that were learnt before"


def sharded(home: Home, texts: Sequence[str], out: io.StringIO, **learnt: Artifact) -> PipelineRun:
    """Run the stage of the shards alone."""
    path = write_lines(home.store.root.parent / "docs.jsonl", [{"text": text} for text in texts])
    fixed = ["tracking.enabled=false", "reading.near_duplicates=0.8", "runtime.workers=1"]
    settings, graph = load([f"data.pretrain={path}", *fixed], environment={}).settings, Graph()
    graph.add(SHARDS_PRETRAIN, tokenizer=home.tokenizer, **learnt)
    planned = Plan("nightly", settings, home.store, graph, plan(graph, settings, home.store))
    return run_pipeline(planned, Console(file=out, width=200), RunOptions("none"))


def test_a_run_without_a_new_document_ends_as_nothing_new_and_tells_its_stage_alone(
    tmp_path: Path,
) -> None:
    home, out = Home.make(tmp_path / "home"), io.StringIO()
    texts = [" ".join(f"{word}{number}" for word in range(40)) for number in range(40)]
    learnt = sharded(home, texts, out).artifacts["shards-pretrain"]
    out.truncate(out.seek(0))
    with pytest.raises(NothingNew, match=WHY):
        sharded(home, [f"{text} more" for text in texts], out, **{"learnt-0000": learnt})
    assert out.getvalue().splitlines()[1:] == ["= shards-pretrain: nothing new"], (
        "the night says why"
    )
    [night, _] = runs.history(home.store.root)
    [stage] = night["stages"]
    assert (night["outcome"], stage["outcome"]) == (
        "nothing-new",
        "nothing-new",
    ) and "error" not in night
    assert summary.status_row(stage)[3].startswith(WHY)
    log = home.store.root.joinpath("runs", f"{night['run']}.log").read_text()
    assert log.count("near-duplicates, most of") == 2 and "ERROR" not in log, (
        "the stage's own line, and its end"
    )
