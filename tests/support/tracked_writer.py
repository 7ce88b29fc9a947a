"""A process that writes a curve and is tracked, killed and continued, and the count of what MLflow has of it."""

import json
import multiprocessing
import os
import time
from pathlib import Path

from support.outage_proxy import Proxy
from support.tracked_stores import only, pushed, steps

from ttrain.config import Settings
from ttrain.core.files import read_object, write_json
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import TRACKED
from ttrain.store.runs import RunRecord
from ttrain.tracking import pusher

CONTEXT = multiprocessing.get_context(
    "forkserver"
)  # the libraries are loaded once, not by each of a hundred writers
CONTEXT.set_forkserver_preload(
    ["mlflow.tracking", "mlflow.utils.rest_utils", "support.tracked_writer"]
)
STAGE, KEY = "pretrain", "a" * 64


def curve_of(home: Path) -> Path:
    return ArtifactStore(home).work(STAGE, KEY) / "output" / "run" / "metrics.jsonl"


def write(home: Path, last: int, pace: float, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    pusher.INTERVAL_SECONDS, pusher.RETRY_SECONDS = 0.02, 0.2
    record = RunRecord(
        home,
        "full",
        [STAGE],
        Settings().replaced({"tracking": {"experiment": "outages"}}).model_dump(),
    )
    path, known_path = curve_of(home), ArtifactStore(home).work(STAGE, KEY) / TRACKED
    path.parent.mkdir(parents=True, exist_ok=True)
    identity = read_object(known_path).get("id") or f"{record.run}/{STAGE}"
    write_json(known_path, {"run": record.run, "id": identity})
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    keep = max(0, len(lines) // 10 * 10 - 10)  # back to the checkpoint
    path.write_text("".join(lines[:keep]))
    record.stage(STAGE, outcome="running", key=KEY, tracked=identity)
    follower = pusher.Pusher(home, record.run)
    follower.start()
    with path.open("a") as file:
        for step in range(keep + 1, last + 1):
            row = {
                "step": step,
                "tokens": 100 * step,
                "time": time.time(),
                "metrics": {"loss": 1 / step},
            }
            file.write(json.dumps(row) + "\n")
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
    modes: tuple[str, ...],
    seconds: float = 0.4,
    pace: float = 0.001,
) -> None:
    environment = {"MLFLOW_TRACKING_URI": proxy.url, "MLFLOW_HTTP_REQUEST_TIMEOUT": "1"}
    for mode in modes:
        writer = CONTEXT.Process(target=write, args=(home, steps_in_all, pace, environment))
        size = _size(curve_of(home))
        writer.start()
        while _size(curve_of(home)) == size:
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
    os.environ["MLFLOW_TRACKING_URI"] = url
    pushed(home)
    identity = read_object(ArtifactStore(home).work(STAGE, KEY) / TRACKED)["id"]
    run = only(home, identity, "outages")
    for key in ("loss", "tokens"):
        assert steps(home, run.info.run_id, key) == list(range(1, last + 1)), "0 lost, 0 doubled"
    assert run.info.status == "FINISHED"
