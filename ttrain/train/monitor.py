"""How fast a training runs and what it uses: figures that depend on the clock and the machine, and move nothing."""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ttrain.train.callbacks import Callback, StepRecord

# Names that two runs of the same training do not share.
PERFORMANCE = ("tokens_per_second", "step_seconds", "data_wait_fraction", "memory_bytes", "mfu", "eta_seconds", "epoch_time")
RECENT_STEPS = 200  # whose time tells that of the steps to come
TRIMMED = 0.05  # share of them left out at either end: a stall, a first step that compiles


class PerformanceMonitor(Callback):
    """Adds to the log, for the time since the last one:

    tokens_per_second     by the wall clock, so validations, checkpoints and samples count
    step_seconds          mean of the steps' own time
    data_wait_fraction    share of that time that waited for rows
    mfu                   share of `peak_flops`, where there is one, that the model's own FLOPs of these tokens are
    memory_bytes          the most so far, of the process, or of tensors on CUDA and MPS
    eta_seconds           until the last step
    epoch_time            seconds that all rows take once at this pace, validations and the like counted
    """

    def __init__(
        self,
        tokens_per_step: float,
        *,
        device: torch.device,
        steps_per_epoch: float,
        flops_per_token: float = 0.0,
        peak_flops: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`peak_flops`: of all ranks together; asked for when training starts."""
        self._tokens_per_step, self._device, self._clock = tokens_per_step, device, clock
        self._steps_per_epoch = steps_per_epoch
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self._peak = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._steps, self._seconds, self._data_seconds = 0, 0.0, 0.0  # since the last log
        self._all_steps, self._all_seconds = 0, 0.0
        self._began = self._logged = 0.0

    def start(self, step: int, steps: int) -> None:
        self._peak = self._peak_flops() if self._peak_flops and step < steps else 0.0
        self._began = self._logged = self._clock()

    def step_end(self, record: StepRecord) -> None:
        self._recent.append(record.seconds)
        self._steps, self._all_steps = self._steps + 1, self._all_steps + 1
        self._seconds, self._all_seconds = self._seconds + record.seconds, self._all_seconds + record.seconds
        self._data_seconds += record.data_seconds

    def figures(self, record: StepRecord) -> Mapping[str, float]:
        now = self._clock()
        rate = self._steps * self._tokens_per_step / max(now - self._logged, 1e-9)
        found = {
            "tokens_per_second": rate,
            "step_seconds": self._seconds / max(1, self._steps),
            "data_wait_fraction": self._data_seconds / max(self._seconds, 1e-9),
            "memory_bytes": float(peak_memory(self._device)),
            "eta_seconds": self._eta(record, now),
            "epoch_time": self._steps_per_epoch * (now - self._logged) / max(1, self._steps),
        }
        if self._peak:
            found["mfu"] = rate * self._flops_per_token / self._peak
        self._logged, self._steps, self._seconds, self._data_seconds = now, 0, 0.0, 0.0
        return found

    def _eta(self, record: StepRecord, now: float) -> float:
        """What the steps to come take, as the recent ones did, and what lies between steps, as in all of this run."""
        between = max(0.0, now - self._began - self._all_seconds) / max(1, self._all_steps)
        return (record.steps - record.step) * (trimmed_mean(self._recent) + between)


def trimmed_mean(values: deque[float]) -> float:
    """The mean without the least and the greatest twentieth, at least one of each where there are more than two.

    Unlike the median it is right where steps are of two kinds, as with rows grouped by length.
    """
    ordered = sorted(values)
    cut = math.ceil(TRIMMED * len(ordered)) if len(ordered) > 2 else 0
    kept = ordered[cut : len(ordered) - cut]
    return sum(kept) / max(1, len(kept))


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that this process held in memory so far; on CUDA the most that tensors took, on MPS what they take."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()  # getrusage has the peak of the parent's image too
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
