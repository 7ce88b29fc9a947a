"""System metrics while a stage runs: CPU, memory, disk, network and any GPUs.

`run/system.jsonl` has the form of `metrics.jsonl`, with MLflow's names and units. Its step is the
running time of the stage in seconds: by training step, samples of a slow step would collide.
"""

import contextlib
import itertools
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
    """The file of a node under `run/`; nodes cannot append to one file over a network."""
    return f"system-node{node}.jsonl" if node else "system.jsonl"


class SystemMetrics:
    """Append a sample to a file about every `seconds`, in a thread, and one at the end. Never
    raises.

    A sample takes about 1 ms: 0.01 % of a core at one every ten seconds.
    """

    def __init__(self, path: Path, seconds: float, *, node: int | None = None) -> None:
        """`node`: set if several train together; part of the metrics' names, as in MLflow."""
        self._path = path
        self._seconds = seconds
        self._prefix = "system/" if node is None else f"system/node_{node}/"
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="system-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Write the last sample; waits at most a second for the disk."""
        self._ending.set()
        self._thread.join(1.0)

    def _sample(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            last = last_step(self._path)
            reader = machine(self._path.parent)
            first = last + 1
            began = time.monotonic()
            for samples in itertools.count(1):
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
                if ended:
                    return
        except Exception as error:  # never fail a training for a system metric
            log.warning("the system metrics end here: %r", error)


def last_step(path: Path) -> int:
    """Step of the last row, -1 if there is none; removes a half-written line."""
    data = path.read_bytes() if path.exists() else b""
    rows = data[: data.rfind(b"\n") + 1]
    if rows != data:
        os.truncate(path, len(rows))
    return int(json.loads(rows.splitlines()[-1])["step"]) if rows else -1


def machine(directory: Path) -> Callable[[], Figures]:
    """A reader of CPU (% of all cores), memory, network and the disk of `directory`."""
    psutil: Any = import_module("psutil")

    def transferred() -> Figures:
        network = psutil.net_io_counters()
        disks = psutil.disk_io_counters()
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
        memory = psutil.virtual_memory()
        disk = psutil.disk_usage(str(directory))
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
    """Utilization, memory, temperature and power of the GPUs, if CUDA is initialized."""
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
