"""Checks of the machine against the settings: memory and disk."""

import ctypes
import functools
import gc
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import torch
from torch import Tensor

from ttrain.core.text import format_size
from ttrain.data.order import ShuffledOrder
from ttrain.doctor.parts import Finding, Learner, trainer_of
from ttrain.train.memory_rows import select_rows
from ttrain.train.monitor import peak_memory
from ttrain.train.resource_limits import available_bytes

GB = 1e9
MEASURED_ROWS = 3


@functools.lru_cache(maxsize=1)
def measure(learner: Learner) -> dict[str, int]:
    """Bytes of a rank: weights, gradients, optimizer, and activations at the peak of a micro-batch.

    Extrapolated from one row and three, so that the doctor itself does not run out of memory.
    """
    subject = learner.build()
    sample = select_rows(learner.rows, MEASURED_ROWS, positions=None)
    grown = {}
    for count in (1, 1, MEASURED_ROWS):  # the first step loads what libraries load once
        trainer = trainer_of(
            learner,
            subject,
            sample,
            ShuffledOrder(len(sample), count, count, learner.config.seed),
            rows_per_device=count,
        )
        grown[count] = memory_growth(trainer.fit, learner.precision.device)
    gradients = _bytes(trainer.optimizers.parameters)
    optimizer = _bytes(trainer.optimizers.state().values())
    one_row = max(0, grown[1] - gradients - optimizer)
    each_further = max(0, grown[MEASURED_ROWS] - grown[1]) // (MEASURED_ROWS - 1)
    rows = min(learner.runtime.rows_per_device, learner.config.rows_per_step)
    return {
        "weights": _bytes(trainer.bare.state_dict().values()),
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": one_row + each_further * (rows - 1),
    }


def memory_growth(work: Callable[[], object], device: torch.device) -> int:
    """By how many bytes this process grows meanwhile: torch's on CUDA, else resident ones."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    gc.collect()
    if Path("/proc/self/clear_refs").exists():  # elsewhere the peak is that of the process so far
        ctypes.CDLL(None).malloc_trim(0)  # or freed memory would be used again unseen
        Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory begins again
    before = int(psutil.Process().memory_info().rss)
    work()
    return max(0, peak_memory(torch.device("cpu")) - before)


def memory(learner: Learner) -> Finding:
    """Whether a step fits: each rank's in its GPU's memory, else all ranks' in the machine's."""
    footprint = measure(learner)
    runtime = learner.runtime
    device = learner.precision.device
    ranks = 1 if device.type == "cuda" else runtime.devices
    available = available_bytes(device)
    if runtime.memory_limit_gb is not None:
        available = min(available, runtime.memory_limit_gb * GB * ranks)
    needed = sum(footprint.values()) * ranks
    parts = ", ".join(f"{name} {format_size(size)}" for name, size in footprint.items())
    where = f"on {device}" if ranks == 1 else f"for {ranks} ranks"
    return Finding(
        needed <= available,
        f"{format_size(needed)} of {format_size(available)} {where}, in {learner.precision.word}: "
        f"{parts}",
        f"set runtime.rows_per_device={max(1, runtime.rows_per_device // 2)} or "
        "runtime.gradient_checkpointing=true (the weights stay the same), or take a smaller model",
    )


def disk(learner: Learner) -> Finding:
    """Whether checkpoints and the model fit into the free space."""
    footprint = measure(learner)
    runtime = learner.runtime
    steps = learner.steps
    every = steps // runtime.keep_every_steps if runtime.keep_every_steps else 0
    # 3: the best one, the one being written, and the one where the decay begins.
    most = min(steps // runtime.checkpoint_every_steps, runtime.keep_checkpoints + every) + 3
    checkpoint = footprint["weights"] + footprint["optimizer"]
    needed = most * checkpoint + footprint["weights"]
    existing = next(path for path in (learner.home, *learner.home.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    return Finding(
        needed <= free,
        f"{format_size(needed)} of {format_size(free)} free: "
        f"{most} checkpoints of {format_size(checkpoint)}, "
        f"the model {format_size(footprint['weights'])}",
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    # A tensor that occurs twice counts once.
    return sum(
        {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}.values()
    )
