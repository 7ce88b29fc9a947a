"""What a terminal and a log show of a stage at work."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ttrain.pipeline import progress_display
from ttrain.pipeline.progress_display import Display


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_speed_and_the_time_left_are_shown_from_the_second_report_on(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress_display.time, "monotonic", lambda: clock[0])
    output = io.StringIO()
    display = Display(Console(file=output, force_terminal=is_terminal, width=150))
    for done in (0, 1000, 2000):
        display.progressed("pretrain", {"done": done, "total": 10_000, "unit": "tokens", "figures": {"loss": 7.25}})
        if display._bars:
            display._bars.refresh()
        clock[0] += 20
    display.close()
    shown = output.getvalue()
    assert "20 %" in shown and "loss 7.250, 50 tokens/s, 2 min 40 s left" in shown and "--:--" not in shown
