"""Plans and runs as a notebook shows them."""

from pathlib import Path

from ttrain import api
from ttrain.engine.graph import Graph, Planned
from ttrain.store.artifacts import ArtifactStore
from ttrain.tasks import SFT

HOSTILE = "<script>alert(1)</script>"


def test_a_plan_and_a_run_are_escaped_tables_in_the_colours_of_the_page(tmp_path: Path) -> None:
    settings = api.Settings()
    store = ArtifactStore(tmp_path)
    plan = api.Plan("full", settings, store, Graph(), [Planned(SFT, "run", (HOSTILE,), "a" * 64)])
    stage = {"name": "sft", "outcome": "failed", "seconds": 2.0, "error": HOSTILE}
    record = {
        "run": "full-1",
        "outcome": "failed",
        "stages": [stage],
        "metrics": {"eval/bits_per_byte": 1.5},
    }
    for shown in (plan._repr_html_(), api.Run(record, store)._repr_html_()):
        assert HOSTILE not in shown and "&lt;script&gt;" in shown and "sft" in shown
        assert "#" not in shown and "color: inherit; background: none" in shown
    assert "1.500" in api.Run(record, store)._repr_html_()
