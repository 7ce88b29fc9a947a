"""System metrics: samples in time, quiet without a GPU, and no failure of the training."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from ttrain.config.loading import load
from ttrain.engine import stage_worker
from ttrain.engine.system_metrics import SystemMetrics, file_name, last_step
from ttrain.errors import UsageError


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_continued_stage_counts_on_after_its_last_complete_line(tmp_path: Path) -> None:
    path = tmp_path / "system-node1.jsonl"
    lines = '{"step": 10}\n{"step": 20}\n'
    path.write_text(lines + '{"step": 30, "ti')
    SystemMetrics(tmp_path / file_name(1), 600, node=1).stop()
    assert path.read_text().startswith(lines + '{"step": 21, ')
    assert [row["step"] for row in rows(path)] == [10, 20, 21]
    assert {name.rpartition("/")[0] for name in rows(path)[2]["metrics"]} == {"system/node_1"}
    assert last_step(tmp_path / "none") == -1 and file_name(0) == "system.jsonl"


def test_a_stage_is_sampled_and_never_fails_by_it(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.WARNING, "ttrain")
    for name, seconds in (("off", 0), ("on", 600), ("file", 600)):
        job = {"runtime": {"system_metrics_seconds": seconds, "nodes": 1}, "output": name}
        if name == "file":
            assert not caplog.text
            (tmp_path / name).write_text("where its directory should be")
        with stage_worker.sample_system_metrics(tmp_path, job):
            pass
    assert "system metrics end" in caplog.text
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "file"]
    assert files == [tmp_path / "on" / "run" / "system.jsonl"]
    with pytest.raises(UsageError, match=r"runtime\.system_metrics_seconds"):
        load(["runtime.system_metrics_seconds=0.5"], environment={})
