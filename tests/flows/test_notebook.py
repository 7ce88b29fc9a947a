"""Plans and runs as a notebook shows them."""

from pathlib import Path

from ttrain import api
from ttrain.engine.graph import Graph, Planned
from ttrain.store.artifacts import ArtifactStore
from ttrain.tasks import SFT

HOSTILE = "<script>alert(1)</script>"


def test_a_plan_and_a_run_are_escaped_tables(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    stages = [Planned(SFT, "run", (HOSTILE,), "a" * 64)]
    plan = api.Plan("full", api.Settings(), store, Graph(), stages)
    stage = {"name": "sft", "outcome": "failed", "seconds": 2.0, "error": HOSTILE}
    metrics = {"eval/bits_per_byte": 1.5}
    record = {"run": "full-1", "outcome": "failed", "stages": [stage], "metrics": metrics}
    run = api.Run(record, store)
    for table in (plan._repr_html_(), run._repr_html_()):
        assert HOSTILE not in table and "&lt;script&gt;" in table and "sft" in table
    assert "1.500" in run._repr_html_()
