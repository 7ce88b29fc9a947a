"""A process that writes a tracked curve, is killed and continued; the count of MLflow's points."""

import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path

from support.outage_proxy import Proxy
from support.tracked_stores import only, pushed, steps
from support.waiting import wait_until

from ttrain.config import Settings
from ttrain.core.files import read_object, write_json
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import TRACKED
from ttrain.store.runs import RunRecord
from ttrain.tracking import pusher

CONTEXT = multiprocessing.get_context("forkserver")
# Loaded once, not by each of a hundred writers
CONTEXT.set_forkserver_preload(["mlflow.tracking", "support.tracked_writer"])
STAGE = "pretrain"
KEY = "a" * 64


def work_of(home: Path) -> Path:
    return ArtifactStore(home).work(STAGE, KEY)


def curve_in(home: Path) -> Path:
    return work_of(home) / "output" / "run" / "metrics.jsonl"


def write(home: Path, last: int, pace: float, url: str) -> None:
    os.environ.update({"MLFLOW_TRACKING_URI": url, "MLFLOW_HTTP_REQUEST_TIMEOUT": "1"})
    pusher.INTERVAL_SECONDS = 0.02
    pusher.RETRY_SECONDS = 0.2
    settings = Settings().replaced({"tracking": {"experiment": "outages"}})
    record = RunRecord(home, "full", [STAGE], settings.model_dump())
    path = curve_in(home)
    path.parent.mkdir(parents=True, exist_ok=True)
    known = work_of(home) / TRACKED
    identity = read_object(known).get("id") or f"{record.run}/{STAGE}"
    write_json(known, {"run": record.run, "id": identity})
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    keep = max(0, len(lines) // 10 * 10 - 10)  # back to the checkpoint
    path.write_text("".join(lines[:keep]))
    record.stage(STAGE, outcome="running", key=KEY, tracked=identity)
    follower = pusher.Pusher(home, record.run)
    follower.start()
    with path.open("a") as file:
        for step in range(keep + 1, last + 1):
            row = {"step": step, "tokens": 100 * step, "time": time.time()}
            file.write(json.dumps({**row, "metrics": {"loss": 1 / step}}) + "\n")
            file.flush()
            time.sleep(pace)
    record.stage(STAGE, outcome="completed")
    record.finish("completed", {})
    follower.finish()


def write_through(
    proxy: Proxy,
    home: Path,
    *,
    steps_in_all: int,
    modes: Sequence[str],
    seconds: float,
    pace: float,
) -> None:
    """Kill a writer in each of these outages, then let the last one finish."""
    path = curve_in(home)
    for mode in modes:
        writer = CONTEXT.Process(target=write, args=(home, steps_in_all, pace, proxy.url))
        before = path.stat() if path.exists() else None
        writer.start()
        wait_until(lambda: path.exists() and path.stat() != before, 120)  # noqa: B023
        assert writer.is_alive()
        time.sleep(seconds / 2)
        proxy.mode = mode
        time.sleep(seconds)
        writer.kill()
        proxy.mode = "well"
        writer.join(120)
    last = CONTEXT.Process(target=write, args=(home, steps_in_all, 0.0, proxy.url))
    last.start()
    last.join(300)
    assert last.exitcode == 0


def assert_whole(url: str, home: Path, last: int) -> None:
    os.environ["MLFLOW_TRACKING_URI"] = url
    pushed(home)
    run = only(home, read_object(work_of(home) / TRACKED)["id"], "outages")
    for key in ("loss", "tokens"):
        assert steps(home, run.info.run_id, key) == list(range(1, last + 1)), "0 lost, 0 doubled"
    assert run.info.status == "FINISHED"
