"""A process that writes a curve and is tracked, killed and continued, and the count of what MLflow has of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from support.outage_proxy import Proxy
from support.paths import ROOT

from ttrain import tracking

WRITER = """
import json, sys, time
from pathlib import Path
from ttrain import tracking
home, path, last, seconds = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
store = tracking.open_store(home, "outages")
known = json.loads((home / "known.json").read_text()) if (home / "known.json").exists() else {}
run = store.start_run("writer", run_id=known.get("run_id"), identity=known.get("identity"), tags={}, params={"lr": 1})
(home / "known.json").write_text(json.dumps({"run_id": run.id, "identity": run.identity}))
follower = tracking.MetricsFollower(path, run, seconds=0.02)
lines = path.read_text().splitlines(keepends=True) if path.exists() else []
keep = max(0, len(lines) // 10 * 10 - 10)  # back to the checkpoint
path.write_text("".join(lines[:keep]))
with path.open("a") as file:
    for step in range(keep + 1, last + 1):
        row = {"step": step, "tokens": 100 * step, "time": time.time(), "metrics": {"loss": 1 / step}}
        file.write(json.dumps(row) + "\\n")
        file.flush()
        time.sleep(seconds)
follower.stop()
run.finish("FINISHED")
store.close()
"""


def write_through(
    proxy: Proxy, home: Path, *, steps_in_all: int, modes: tuple[str, ...], seconds: float = 0.4, pace: float = 0.001
) -> None:
    """A process that trains and is tracked, killed and continued while the server comes and goes; a step takes `pace` s."""
    code = [sys.executable, "-c", WRITER, str(home), str(home / "metrics.jsonl"), str(steps_in_all)]
    environment = {**os.environ, "MLFLOW_HTTP_REQUEST_TIMEOUT": "1", "PYTHONPATH": str(ROOT)}
    for mode in modes:
        process = subprocess.Popen([*code, str(pace)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        size = _size(home / "metrics.jsonl")
        while _size(home / "metrics.jsonl") == size:  # until it writes: its libraries take seconds
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(seconds / 2)
        proxy.mode = mode
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        proxy.mode = "well"
        process.wait(120)
    subprocess.run([*code, "0"], env=environment, check=True, timeout=300)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def assert_whole(url: str, home: Path, last: int) -> None:
    from mlflow import MlflowClient

    tracking.sync(home)
    client: Any = MlflowClient(url, url)
    known = json.loads((home / "known.json").read_text())
    (run,) = runs_of(client, known["identity"])
    for key in ("loss", "tokens"):
        found = Counter(steps(client, run.info.run_id, key))
        assert sorted(found) == list(range(1, last + 1)), "0 lost"
        assert set(found.values()) == {1}, "0 doubled"
    assert run.info.status == "FINISHED"


def steps(client: Any, run_id: str, key: str = "loss") -> list[int]:
    return sorted(metric.step for metric in client.get_metric_history(run_id, key))


def runs_of(client: Any, identity: str) -> list[Any]:
    experiment = client.get_experiment_by_name("outages").experiment_id
    found: list[Any] = client.search_runs([experiment], f"tags.`ttrain.id` = '{identity}'")
    return found
