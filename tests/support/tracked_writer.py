"""A process that writes a curve and is tracked, killed and continued, and the count of what MLflow has of it."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from support.outage_proxy import Proxy

from ttrain import tracking

CONTEXT = multiprocessing.get_context("forkserver")  # the libraries are loaded once, not by each of a hundred writers
CONTEXT.set_forkserver_preload(["mlflow.tracking", "mlflow.utils.rest_utils", "support.tracked_writer"])


def write(home: Path, last: int, pace: float, environment: dict[str, str]) -> None:
    """Go on with the curve at its checkpoint, up to the step `last`, and track it."""
    os.environ.update(environment)
    path, known_path = home / "metrics.jsonl", home / "known.json"
    store = tracking.open_store(home, "outages")
    known = json.loads(known_path.read_text()) if known_path.exists() else {}
    run = store.start_run("writer", run_id=known.get("run_id"), identity=known.get("identity"), tags={}, params={"lr": 1})
    known_path.write_text(json.dumps({"run_id": run.id, "identity": run.identity}))
    follower = tracking.MetricsFollower(path, run, seconds=0.02)
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    keep = max(0, len(lines) // 10 * 10 - 10)  # back to the checkpoint
    path.write_text("".join(lines[:keep]))
    with path.open("a") as file:
        for step in range(keep + 1, last + 1):
            row = {"step": step, "tokens": 100 * step, "time": time.time(), "metrics": {"loss": 1 / step}}
            file.write(json.dumps(row) + "\n")
            file.flush()
            time.sleep(pace)
    follower.stop()
    run.finish("FINISHED")
    store.close()


def write_through(
    proxy: Proxy, home: Path, *, steps_in_all: int, modes: tuple[str, ...], seconds: float = 0.4, pace: float = 0.001
) -> None:
    """A process that trains and is tracked, killed and continued while the server comes and goes; a step takes `pace` s."""
    environment = {"MLFLOW_TRACKING_URI": proxy.url, "MLFLOW_HTTP_REQUEST_TIMEOUT": "1"}
    for mode in modes:
        writer = CONTEXT.Process(target=write, args=(home, steps_in_all, pace, environment))
        size = _size(home / "metrics.jsonl")
        writer.start()
        while _size(home / "metrics.jsonl") == size:
            assert writer.is_alive()
            time.sleep(0.01)
        time.sleep(seconds / 2)
        proxy.mode = mode
        time.sleep(seconds)
        writer.kill()
        proxy.mode = "well"
        writer.join(120)
    last = CONTEXT.Process(target=write, args=(home, steps_in_all, 0.0, environment))
    last.start()
    last.join(300)
    assert last.exitcode == 0


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
