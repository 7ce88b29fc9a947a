"""A run whose documents are all known: no failure, and no model, in its record, its status and its log."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console
from support.tiny_stages import Home

from ttrain.config import Settings
from ttrain.engine.execution import PipelineRun
from ttrain.engine.graph import Graph
from ttrain.engine.plan import Plan
from ttrain.engine.planner import plan
from ttrain.errors import NothingNew, StageFailed
from ttrain.flows.engine import RunOptions, run_pipeline
from ttrain.reports import summary
from ttrain.store import runs
from ttrain.store.layout import Artifact
from ttrain.tasks import SHARDS_PRETRAIN
from ttrain.tasks.shards import heldout_records

WHY = "data.pretrain: of 40 rows 40 are near-duplicates, most of documents that were learnt before"


def settings_of(home: Home, texts: Sequence[str]) -> Settings:
    path = home.store.root.parent / "docs.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return Settings.model_validate(
        {
            "tracking": {"enabled": False},
            "data": {"pretrain": str(path)},
            "reading": {"near_duplicates": 0.8, "heldout_fraction": 0.02},
            "runtime": {"workers": 1},
        }
    )


def sharded(home: Home, texts: Sequence[str], out: io.StringIO, **learnt: Artifact) -> PipelineRun:
    """Run the stage of the shards, and one that waits for it."""
    settings = settings_of(home, texts)

    graph = Graph()
    graph.add(SHARDS_PRETRAIN, tokenizer=home.tokenizer, **learnt)
    planned = Plan("nightly", settings, home.store, graph, plan(graph, settings, home.store))
    console = Console(file=out, width=200)
    return run_pipeline(planned, console, RunOptions("none"))


def test_a_run_without_a_new_document_ends_as_nothing_new_and_tells_its_stage_alone(tmp_path: Path) -> None:
    home, out = Home.make(tmp_path / "home"), io.StringIO()
    texts = [" ".join(f"{word}{number}" for word in range(40)) for number in range(40)]
    learnt = sharded(home, texts, out).artifacts["shards-pretrain"]
    out.truncate(out.seek(0))
    with pytest.raises(NothingNew, match=WHY):
        sharded(home, [f"{text} more" for text in texts], out, **{"learnt-0000": learnt})
    assert out.getvalue().splitlines()[1:] == ["= shards-pretrain: nothing new"], "the night says why"
    [night, _] = runs.history(home.store.root)
    [stage] = night["stages"]
    assert (night["outcome"], stage["outcome"]) == ("nothing-new", "nothing-new") and "error" not in night
    name, outcome, _, figures, _ = summary.status_row(stage)
    assert (name, outcome) == ("shards-pretrain", "nothing-new") and figures.startswith(WHY)
    log = home.store.root.joinpath("runs", f"{night['run']}.log").read_text()
    assert log.count("near-duplicates, most of") == 2 and "ERROR" not in log, "the stage's own line, and its end"


def test_documents_that_earlier_nights_hold_out_are_nothing_new_and_a_set_of_them_changes_the_key(tmp_path: Path) -> None:
    home, out = Home.make(tmp_path / "home"), io.StringIO()
    texts = [" ".join(f"{word}{number}" for word in range(40)) for number in range(40)]
    earlier = sharded(home, texts, out).artifacts["shards-pretrain"]
    [held_out] = heldout_records(earlier.path)
    why = r"data.pretrain: of 1 rows 0 are near-duplicates.* 1 are held out by earlier nights, and none is left to learn"
    with pytest.raises(NothingNew, match=why):
        sharded(home, [held_out["text"]], out, earlier=earlier)
    with pytest.raises(StageFailed, match=r"9 of 10 rows are bad"):  # a broken file is no known one
        sharded(home, [held_out["text"], *[None] * 9], out, earlier=earlier)  # type: ignore[list-item]
    more = [held_out["text"], *(f"{number}, {text[::-1]}" for number, text in enumerate(texts))]
    alone, beside = (sharded(home, more, out, **of).artifacts["shards-pretrain"] for of in ({}, {"earlier": earlier}))
    assert "of_earlier_heldout" not in alone.result and alone.key != beside.key
    assert "earlier" not in alone.manifest["inputs"] and beside.manifest["inputs"]["earlier"]["key"] == earlier.key
    lowest = [record["text"] for record in heldout_records(beside.path)]
    assert beside.result["of_earlier_heldout"] == (held_out["text"] not in lowest)
