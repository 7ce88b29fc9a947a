"""System metrics while a stage runs: CPU, memory, disk, network and any GPUs.

`run/system.jsonl` has the form of `metrics.jsonl`, and goes to the tracker the same way; names and units are those of
MLflow's own system metrics, so that its tab shows them. The step of a row is the stage's running time in seconds: a training
step would be the same for several samples of a slow one, and stages that do not train have none. A stage that continues goes
on counting where it was stopped, so its rows are never cut, not even those of steps that were lost.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

MEGA = 1e6

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
            last = last_step(self._path)
            readers = [machine(self._path.parent), *gpus()]
            first, began, samples, ended = last + 1, time.monotonic(), 0, False
            while not ended:
                samples += 1
                ended = self._ending.wait(max(0.0, began + samples * self._seconds - time.monotonic()))
                step = first + round(time.monotonic() - began)
                if step > last:  # otherwise the end came in the same second as a sample
                    metrics = {f"{self._prefix}{name}": round(value, 3) for name, value in read(readers).items()}
                    with self._path.open("a") as file:
                        file.write(json.dumps({"step": step, "time": time.time(), "metrics": metrics}) + "\n")
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


def read(readers: Iterable[Callable[[], Figures]]) -> Figures:
    """The figures of all readers that work: not every board measures its power, and a device may go away."""
    figures: Figures = {}
    for reader in readers:
        with contextlib.suppress(Exception):
            figures |= reader()
    return figures


def machine(directory: Path) -> Callable[[], Figures]:
    """Return a reader of CPU, memory and network, and of the disk that holds `directory`.

    CPU: percent of all cores since the last reading. Bytes through disks and network count from now on.
    """
    psutil: Any = import_module("psutil")

    def transferred() -> Figures:
        network, disks = psutil.net_io_counters(), psutil.disk_io_counters()
        found = {"network_receive_megabytes": network.bytes_recv, "network_transmit_megabytes": network.bytes_sent}
        if disks:  # some containers tell of none
            found |= {"disk_read_megabytes": disks.read_bytes, "disk_write_megabytes": disks.write_bytes}
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


def gpus() -> list[Callable[[], Figures]]:
    """A reader for each NVIDIA GPU that this process can see; [] without GPU, driver or nvidia-ml-py."""
    try:
        nvml: Any = import_module("pynvml")
        nvml.nvmlInit()
        count = int(nvml.nvmlDeviceGetCount())
    except Exception:  # NVML has errors of its own
        return []
    return [_gpu(nvml, number) for number in visible(count, os.environ.get("CUDA_VISIBLE_DEVICES"))]


def visible(count: int, chosen: str | None) -> list[int]:
    """Indices of the `count` GPUs that CUDA_VISIBLE_DEVICES selects; all if it does not use indices."""
    words = [word.strip() for word in (chosen or "").split(",")]
    if chosen is None or any(word and not word.lstrip("-").isdigit() for word in words):
        return list(range(count))
    return [number for number in range(count) if str(number) in words]


def _gpu(nvml: Any, number: int) -> Callable[[], Figures]:
    handle = nvml.nvmlDeviceGetHandleByIndex(number)

    def memory() -> Figures:
        usage = nvml.nvmlDeviceGetMemoryInfo(handle)
        return {"memory_usage_megabytes": usage.used / MEGA, "memory_usage_percentage": 100 * usage.used / usage.total}

    def power() -> Figures:
        watts = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
        limit = nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
        return {"power_usage_watts": watts, "power_usage_percentage": 100 * watts / limit}

    quantities = (
        lambda: {"utilization_percentage": float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)},
        memory,
        lambda: {"temperature_celsius": float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))},
        power,
    )
    return lambda: {f"gpu_{number}_{name}": value for name, value in read(quantities).items()}
