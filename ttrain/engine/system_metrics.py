"""System metrics while a stage runs: CPU, memory, disk, network and any GPUs.

`run/system.jsonl` has the form of `metrics.jsonl`, and goes to the tracker the same way; names and units are those of
MLflow's own system metrics, so that its tab shows them. The step of a row is the stage's running time in seconds: a training
step would be the same for several samples of a slow one, and stages that do not train have none. A stage that continues goes
on counting where it was stopped, so its rows are never cut, not even those of steps that were lost.
"""

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

MEGA = 1e6
GPU_METRICS = {  # by name: a function of torch.cuda, and the factor from its unit
    "utilization_percentage": ("utilization", 1.0),
    "memory_usage_megabytes": ("device_memory_used", 1 / MEGA),
    "temperature_celsius": ("temperature", 1.0),
    "power_usage_watts": ("power_draw", 1 / 1000),
}

Figures = dict[str, float]
log = logging.getLogger("ttrain")


def file_name(node: int) -> str:
    """The file of a node, under `run/`: each writes its own, since appending to one file over a network mixes lines."""
    return f"system-node{node}.jsonl" if node else "system.jsonl"


class SystemMetrics:
    """Appends a sample to a file about every `seconds`, from its own thread, and one at the end. Never raises.

    A sample takes about a millisecond, mostly in system calls that let the training's thread go on: with one every ten
    seconds 0.01 % of a core.
    """

    def __init__(self, path: Path, seconds: float, *, node: int | None = None) -> None:
        """`node`: set if several train together; names the metrics as MLflow does: `system/node_1/...`."""
        self._path, self._seconds = path, seconds
        self._prefix = "system/" if node is None else f"system/node_{node}/"
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="system-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the last sample is written; waits at most a second for a disk that hangs."""
        self._ending.set()
        self._thread.join(1.0)

    def _sample(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            last = last_step(self._path)
            reader = machine(self._path.parent)
            first, began, samples, ended = last + 1, time.monotonic(), 0, False
            while not ended:
                samples += 1
                ended = self._ending.wait(
                    max(0.0, began + samples * self._seconds - time.monotonic())
                )
                step = first + round(time.monotonic() - began)
                if step > last:  # otherwise the end came in the same second as a sample
                    metrics = {
                        f"{self._prefix}{name}": round(value, 3)
                        for name, value in (reader() | gpus()).items()
                    }
                    with self._path.open("a") as file:
                        file.write(
                            json.dumps({"step": step, "time": time.time(), "metrics": metrics})
                            + "\n"
                        )
                    last = step
        except Exception as error:  # never fail a training for a system metric
            log.warning("the system metrics end here: %r", error)


def last_step(path: Path) -> int:
    """Step of the last row, -1 if there is none; cuts off a half-written line that a crash left."""
    data = path.read_bytes() if path.exists() else b""
    rows = data[: data.rfind(b"\n") + 1]
    if rows != data:
        os.truncate(path, len(rows))
    return int(json.loads(rows.splitlines()[-1])["step"]) if rows else -1


def machine(directory: Path) -> Callable[[], Figures]:
    """Return a reader of CPU, memory and network, and of the disk that holds `directory`.

    CPU: percent of all cores since the last reading. Bytes through disks and network count from now on.
    """
    psutil: Any = import_module("psutil")

    def transferred() -> Figures:
        network, disks = psutil.net_io_counters(), psutil.disk_io_counters()
        found = {
            "network_receive_megabytes": network.bytes_recv,
            "network_transmit_megabytes": network.bytes_sent,
        }
        if disks:  # some containers tell of none
            found |= {
                "disk_read_megabytes": disks.read_bytes,
                "disk_write_megabytes": disks.write_bytes,
            }
        return found

    psutil.cpu_percent()  # the first call has no earlier reading to compare with
    before = transferred()

    def figures() -> Figures:
        memory, disk = psutil.virtual_memory(), psutil.disk_usage(str(directory))
        return {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / MEGA,
            "system_memory_usage_percentage": 100 * memory.used / memory.total,
            "disk_usage_percentage": disk.percent,
            "disk_usage_megabytes": disk.used / MEGA,
            "disk_available_megabytes": disk.free / MEGA,
            **{name: (value - before[name]) / MEGA for name, value in transferred().items()},
        }

    return figures


def gpus() -> Figures:
    """Utilization, memory, temperature and power of the GPUs, once the process trains on one."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)  # which may be loading
    if cuda is None or not cuda.is_initialized():  # asking would initialize it
        return {}
    found: Figures = {}
    for number in range(cuda.device_count()):
        for name, (function, scale) in GPU_METRICS.items():
            with contextlib.suppress(
                Exception
            ):  # not every board measures its power; NVML has errors of its own
                found[f"gpu_{number}_{name}"] = getattr(cuda, function)(number) * scale
    return found
