"""The log of a run, the results and the progress of its stages as they are shown."""

import io
import logging
import re
from pathlib import Path

import pytest
from rich.console import Console

from ttrain.core.terminal import showing_logs
from ttrain.engine import display as displays
from ttrain.engine import stage_worker
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
def test_progress_shows_speed_and_time_left(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize(
    ("level", "logged", "shown"),
    [
        ("debug", "step info warning", "started took warning failure"),
        ("warning", "warning", "warning failure"),
        ("error", "", "failure"),
    ],
)
def test_the_log_level_filters_the_log_of_a_stage_and_the_terminal(
    level: str, logged: str, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("ttrain.of_this_test")
    caplog.set_level(logging.DEBUG, logger=log.name)
    for rank in (0, 1):
        caplog.clear()
        log.setLevel(stage_worker.level_of(level, rank))
        log.debug("step")
        log.info("info")
        log.warning("warning")
        hidden = {"step", "info"} if rank and level != "debug" else set()
        assert set(caplog.messages) == set(logged.split()) - hidden

    output = io.StringIO()
    log.setLevel(logging.NOTSET)
    handler = logging.StreamHandler(output)
    logging.getLogger("ttrain").addHandler(handler)
    try:
        with showing_logs(level):
            display = Display(Console(file=output, width=150), level)
            display("sft", "started", {"why": "started"})
            display("sft", "ended", {"state": "completed", "seconds": 1.0, "figures": "took"})
            logging.getLogger("ttrain").warning("warning")
            display("sft", "failed", {"error": "failure"})
    finally:
        logging.getLogger("ttrain").removeHandler(handler)
    assert re.findall("started|took|failure|warning", output.getvalue()) == shown.split()
