"""The log of a run, the progress of its stages as it is shown, and the system metrics."""

import io
import json
import logging
import re
from pathlib import Path
from typing import Any

from rich.console import Console

from ttrain.engine import display as displays
from ttrain.engine import stage_worker
from ttrain.engine.display import Display
from ttrain.engine.system_metrics import SystemMetrics, file_name
from ttrain.store.runs import RunRecord


def test_a_log_line_has_its_time_and_stays_one_line(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, "full", [], {})
    record.log("pretrain", "2026-11-21 22:59:54,854 rank 1: step 5/40")
    record.log("sft", "bar\rbaz\n2026-11-21 00:00:00 lora: forged \x1b[31m\u2028 東京\tok")
    timed, untimed, end = record.path.with_suffix(".log").read_text(encoding="utf-8").split("\n")
    assert timed == "2026-11-21 22:59:54 pretrain: rank 1: step 5/40"
    forged = r"bar\rbaz\n2026-11-21 00:00:00 lora: forged \x1b[31m\u2028 東京" + "\tok"
    assert re.fullmatch(r"\d{4}(-\d\d){2} \d\d(:\d\d){2} sft: " + re.escape(forged), untimed)
    assert end == ""


def test_progress_shows_speed_and_time_left(monkeypatch: Any) -> None:
    """An earlier attempt trained on the first 1,000 tokens."""
    clock = [100.0]
    monkeypatch.setattr(displays.time, "monotonic", lambda: clock[0])
    output = io.StringIO()
    display = Display(Console(file=output, width=150))
    for done in (1000, 2000, 3000):
        progress = {"done": done, "total": 10_000, "first": 1000, "seconds": done / 50 - 20}
        metrics = {"unit": "tokens", "figures": {"loss": 7.25}}
        display("pretrain", "progressed", {**progress, **metrics})
        clock[0] += 20
    display.close()
    shown = output.getvalue()
    assert "30 %" in shown and "loss 7.250, 50 tokens/s, 2 min 20 s left" in shown


def test_system_metrics_of_a_continued_stage_follow_its_last_complete_line(tmp_path: Path) -> None:
    path = tmp_path / "system-node1.jsonl"
    lines = '{"step": 10}\n{"step": 20}\n'
    path.write_text(lines + '{"step": 30, "ti')
    SystemMetrics(tmp_path / file_name(1), 600, node=1).stop()
    last = path.read_text().removeprefix(lines)
    assert last.startswith('{"step": 21, ') and last.count("\n") == 1
    assert all(name.startswith("system/node_1/") for name in json.loads(last)["metrics"])


def test_a_stage_is_sampled_and_never_fails_by_it(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.WARNING, "ttrain")
    (tmp_path / "file").write_text("where its directory should be")
    for name, seconds, warnings in (("off", 0, 0), ("on", 600, 0), ("file", 600, 1)):
        job = {"runtime": {"system_metrics_seconds": seconds, "nodes": 1}, "output": name}
        with stage_worker.sample_system_metrics(tmp_path, job):
            pass
        assert len(caplog.records) == warnings
    assert [*tmp_path.rglob("system*")] == [tmp_path / "on" / "run" / "system.jsonl"]
