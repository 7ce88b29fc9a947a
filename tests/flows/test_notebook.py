"""Plans, runs and their progress as a notebook shows them."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rich.console

from ttrain import api
from ttrain.engine.graph import Graph, Planned
from ttrain.engine.notebook_display import NotebookDisplay, notebook_display
from ttrain.store.artifacts import ArtifactStore
from ttrain.tasks import SFT

HOSTILE = "<script>alert(1)</script>"


def test_a_bar_moves_in_place_and_what_is_shown_is_escaped() -> None:
    drawn: list[str] = []
    display = NotebookDisplay(drawn.append)
    display("sft", "started", {"why": HOSTILE})
    assert HOSTILE not in drawn[-1] and "&lt;script&gt;" in drawn[-1]
    progress = {"done": 250, "total": 1000, "unit": "tokens", "figures": {"validation_loss": 3.25}}
    display("sft", "progressed", progress)
    assert len(drawn) == 1, "at most two drawings a second"
    display._drawn_at -= 1.0
    display("sft", "progressed", progress)
    assert '<progress max="1" value="0.250">' in drawn[-1] and "validation loss 3.250, 250 tokens" in drawn[-1]
    display("", "message", {"text": HOSTILE})
    display("sft", "ended", {"state": "completed", "seconds": 2.0, "figures": "validation_loss 3.000"})
    assert 'value="1.000"' in drawn[-1] and "validation_loss 3.000" in drawn[-1] and HOSTILE not in drawn[-1]
    display("lora", "failed", {"error": "no memory"})
    assert drawn[-1].count("<tr>") == 2 and "failed: no memory" in drawn[-1]


def test_progress_goes_to_the_cell_in_a_notebook_and_to_the_console_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert notebook_display() is None
    updates: list[Any] = []
    cell = SimpleNamespace(update=updates.append)
    module = SimpleNamespace(HTML=lambda text: text, display=lambda *objects, display_id: cell)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=module))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr(rich.console, "Console", lambda: SimpleNamespace(is_jupyter=True))
    display = notebook_display()
    assert display is not None
    display("sft", "started", {"why": "never run before"})
    assert len(updates) == 1 and "never run before" in updates[0]


def test_a_plan_and_a_run_are_escaped_tables_in_the_colours_of_the_page(tmp_path: Path) -> None:
    settings = api.Settings()
    store = ArtifactStore(tmp_path)
    plan = api.Plan("full", settings, store, Graph(), [Planned(SFT, "run", (HOSTILE,), "a" * 64)])
    stage = {"name": "sft", "outcome": "failed", "seconds": 2.0, "error": HOSTILE}
    record = {"run": "full-1", "outcome": "failed", "stages": [stage], "metrics": {"eval/bits_per_byte": 1.5}}
    for shown in (plan._repr_html_(), api.Run(record, store)._repr_html_()):
        assert HOSTILE not in shown and "&lt;script&gt;" in shown and "sft" in shown
        assert "#" not in shown and "color: inherit; background: none" in shown
    assert "1.500" in api.Run(record, store)._repr_html_()
