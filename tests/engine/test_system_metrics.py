"""What the machine does: samples in time, quiet without a GPU, never twice for one second, and no part of the training."""

import json
import logging
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.waiting import wait_until

from ttrain.config.loading import load
from ttrain.engine import stage_worker
from ttrain.engine.system_metrics import SystemMetrics, file_name, gpus, last_step
from ttrain.errors import UsageError

MACHINE = {
    "cpu_utilization_percentage",
    "system_memory_usage_megabytes",
    "system_memory_usage_percentage",
    "disk_usage_percentage",
    "disk_usage_megabytes",
    "disk_available_megabytes",
    "network_receive_megabytes",
    "network_transmit_megabytes",
}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_for(path: Path, count: int) -> list[dict[str, Any]]:
    wait_until(lambda: len(path.read_text().splitlines()) >= count)
    return rows(path)


def test_samples_come_in_time_with_the_running_seconds_as_their_step(tmp_path: Path) -> None:
    path = tmp_path / "system.jsonl"
    began = time.time()
    metrics = SystemMetrics(path, 1)
    found = wait_for(path, 2)
    metrics.stop()
    assert [row["step"] for row in found[:2]] == [1, 2]
    assert all(began + row["step"] - 0.1 < row["time"] < began + row["step"] + 5 for row in found)
    for row in found:
        assert {f"system/{name}" for name in MACHINE} <= {*row["metrics"]}


def test_a_stage_that_continues_goes_on_counting_and_ends_the_line_that_a_kill_tore(
    tmp_path: Path,
) -> None:
    path = tmp_path / "system.jsonl"
    lines = [
        json.dumps({"step": step, "time": 1.0, "metrics": {"system/x": 1.0}}) + "\n"
        for step in (10, 20)
    ]
    path.write_text("".join(lines) + '{"step": 30, "ti')
    SystemMetrics(path, 600).stop()
    assert path.read_text().startswith("".join(lines) + '{"step": 21, ')
    assert [row["step"] for row in rows(path)] == [10, 20, 21]
    assert last_step(tmp_path / "none") == -1


def test_several_nodes_have_files_and_names_of_their_own_and_a_short_stage_one_sample(
    tmp_path: Path,
) -> None:
    assert [file_name(node) for node in range(3)] == [
        "system.jsonl",
        "system-node1.jsonl",
        "system-node2.jsonl",
    ]
    SystemMetrics(tmp_path / file_name(1), 600, node=1).stop()
    (row,) = rows(tmp_path / "system-node1.jsonl")
    assert (
        row["step"] == 0 and 0 <= row["metrics"]["system/node_1/cpu_utilization_percentage"] <= 100
    )
    assert {name.rpartition("/")[0] for name in row["metrics"]} == {"system/node_1"}


def sampled(directory: Path, seconds: float) -> list[Path]:
    """The files that a stage leaves in this directory, which is sampled so often."""
    job = {"runtime": {"system_metrics_seconds": seconds, "nodes": 1}, "output": "output"}
    with stage_worker.sample_system_metrics(directory, job):
        pass
    return [path for path in directory.rglob("*") if path.is_file()]


def test_stages_are_sampled_unless_that_is_off_and_fail_by_themselves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "ttrain")
    assert sampled(tmp_path, 0) == []
    assert (
        sampled(tmp_path, 600) == [tmp_path / "output" / "run" / "system.jsonl"] and not caplog.text
    )
    with pytest.raises(UsageError, match=r"runtime\.system_metrics_seconds"):
        load(["runtime.system_metrics_seconds=0.5"], environment={})
    shutil.rmtree(tmp_path / "output")
    (tmp_path / "output").write_text("a file where its directory should be")
    sampled(tmp_path, 600)
    assert "the system metrics end here" in caplog.text


def test_gpus_tell_use_memory_temperature_and_power_as_far_as_they_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A double of torch.cuda, since there may be no GPU; the second board has no sensor of its power."""
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        utilization=lambda number: 97 - number,
        device_memory_used=lambda number: 20e9 * (number + 1),
        temperature=lambda number: 61 + number,
        power_draw=lambda number: {0: 350_000}[number],
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert gpus() == {
        "gpu_0_utilization_percentage": 97.0,
        "gpu_0_memory_usage_megabytes": 20000.0,
        "gpu_0_temperature_celsius": 61.0,
        "gpu_0_power_usage_watts": 350.0,
        "gpu_1_utilization_percentage": 96.0,
        "gpu_1_memory_usage_megabytes": 40000.0,
        "gpu_1_temperature_celsius": 62.0,
    }
    monkeypatch.setattr(cuda, "is_initialized", lambda: False)
    assert gpus() == {}, "asking would initialize it in a process that does not train"
