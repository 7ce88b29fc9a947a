"""The log of a run, the results and the progress of its stages as they are shown."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ttrain.engine import display as displays
from ttrain.engine.display import Display
from ttrain.store.runs import RunRecord


def test_a_log_line_has_its_time_and_stays_one_line(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, "full", [], {})
    record.log("pretrain", "2026-11-21 22:59:54,854 rank 1: step 5/40")
    record.log("sft", "bar\rbaz\n2026-11-21 00:00:00 lora: forged \x1b[31m\u2028 東京\tok")
    log = record.path.with_suffix(".log").read_text(encoding="utf-8")
    timed, untimed, end = log.split("\n")
    assert timed == "2026-11-21 22:59:54 pretrain: rank 1: step 5/40"
    forged = r"bar\rbaz\n2026-11-21 00:00:00 lora: forged \x1b[31m\u2028 東京" + "\tok"
    assert re.fullmatch(r"\d{4}(-\d\d){2} \d\d(:\d\d){2} sft: " + re.escape(forged), untimed)
    assert end == ""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_shows_speed_and_time_left(is_terminal: bool, monkeypatch: Any) -> None:
    """An earlier attempt trained on the first 1,000 tokens."""
    clock = [100.0]
    monkeypatch.setattr(displays.time, "monotonic", lambda: clock[0])
    output = io.StringIO()
    display = Display(Console(file=output, force_terminal=is_terminal, width=150))
    for done in (1000, 2000, 3000):
        progress = {"done": done, "total": 10_000, "first": 1000, "seconds": done / 50 - 20}
        metrics = {"unit": "tokens", "figures": {"loss": 7.25}}
        display("pretrain", "progressed", {**progress, **metrics})
        clock[0] += 20
    display.close()
    shown = output.getvalue()
    assert "30 %" in shown and "--:--" not in shown
    assert "loss 7.250, 50 tokens/s, 2 min 20 s left" in shown
