"""Checks of the machine against the settings: disk, memory, number format, threads, versions."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import shutil
import timeit
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
import torch
from torch import Tensor

from ttrain.config import Runtime, Training
from ttrain.core.text import first_of, format_size
from ttrain.data.packing import Rows
from ttrain.doctor.parts import Check, Learner, make_check, select_rows, trainer_of
from ttrain.train import native
from ttrain.train.distributed import Ranks
from ttrain.train.monitor import peak_memory
from ttrain.train.precision import DTYPES, Precision, has_bf16
from ttrain.train.schedules import decay_start, steps_of

GB = 1e9
MATMUL, MATMUL_ELSEWHERE = 512, 4096  # rows of a matrix, on a CPU and elsewhere
TRIES = 20
EMULATED = 0.5  # of the speed of fp32: what is computed in other numbers is slower still
MEASURED_ROWS = 3


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank. `activations` is what one micro-batch adds at its peak, of which nothing stays."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def peak(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def checkpoint(self) -> int:
        """What a checkpoint keeps."""
        return self.weights + self.optimizer


def measure(learner: Learner, rows: Rows, precision: Precision) -> Footprint:
    """The sizes of the tensors, and the memory that a step takes: measured with one row and with three, and extrapolated.

    So the doctor itself does not run out of memory.
    """
    subject = learner.build()
    sample = select_rows(rows, MEASURED_ROWS, positions=None)
    grown = {}
    for count in (1, 1, MEASURED_ROWS):  # a step before those that count loads what libraries load once
        trainer = trainer_of(
            learner, subject, sample, ranks=Ranks(0, 1, precision.device), precision=precision,
            steps=1, rows_per_step=count, rows_per_device=count,
        )  # fmt: skip
        grown[count] = memory_growth(trainer.fit, precision.device)
    weights, gradients = _bytes(trainer.bare.state_dict().values()), _bytes(trainer.optimizers.parameters)
    optimizer = _bytes(trainer.optimizers.state().values())
    one_row = max(0, grown[1] - gradients - optimizer)
    each_further = max(0, grown[MEASURED_ROWS] - grown[1]) // (MEASURED_ROWS - 1)
    rows_per_device = min(learner.runtime.rows_per_device, learner.config.rows_per_step)
    return Footprint(weights, gradients, optimizer, one_row + each_further * (rows_per_device - 1))


def memory_growth(work: Callable[[], object], device: torch.device) -> int:
    """By how many bytes this process grows at most on a device while `work` runs: torch's on CUDA, else resident ones."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    _give_back_freed()
    before = int(psutil.Process().memory_info().rss)
    with contextlib.suppress(OSError):  # not on Linux: the peak is that of the process so far
        Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory begins again
    work()
    return max(0, peak_memory(torch.device("cpu")) - before)


def memory(footprint: Footprint, runtime: Runtime, device: torch.device, available: float) -> Check:
    """Whether a step fits in `available` bytes: of the GPU for each rank, of the machine for all of them together."""
    ranks = 1 if device.type == "cuda" else runtime.devices
    if runtime.memory_limit_gb is not None:
        available = min(available, runtime.memory_limit_gb * GB * ranks)
    needed = footprint.peak * ranks
    parts = ", ".join(f"{name} {format_size(getattr(footprint, name))}" for name in Footprint.__dataclass_fields__)
    several = f" for {ranks} ranks" if ranks > 1 else ""
    figure = f"{format_size(needed)} of {format_size(available)} available{several}: {parts}"
    fix = (
        f"set runtime.rows_per_device={max(1, runtime.rows_per_device // 2)} or runtime.gradient_checkpointing=true "
        "(the weights stay the same), or take a smaller model"
    )
    return make_check("memory", needed <= available, figure, fix)


def disk(
    footprint: Footprint, config: Training, runtime: Runtime, rows: int, other_bytes: float, free_bytes: float
) -> Check:
    """Whether checkpoints, the model and `other_bytes` (shards still to be made) fit in what is free."""
    steps = steps_of(config, rows)[0]
    permanent = int(0 < decay_start(config.schedule, steps) < steps)
    every = steps // runtime.keep_every_steps if runtime.keep_every_steps else 0
    kept_checkpoints = runtime.keep_checkpoints + every + permanent
    # 2: the best one, and the one being written
    most = min(kept_checkpoints + 2, steps // runtime.checkpoint_every_steps + permanent + 2)
    needed = most * footprint.checkpoint + footprint.weights + other_bytes
    figure = (
        f"{format_size(needed)} of {format_size(free_bytes)} free: {most} checkpoints of "
        f"{format_size(footprint.checkpoint)}, the model {format_size(footprint.weights)}, shards {format_size(other_bytes)}"
    )
    fix = "free some space, set TTRAIN_HOME to a larger disk, or lower runtime.keep_checkpoints and keep_every_steps"
    return make_check("disk", needed <= free_bytes, figure, fix)


def free_bytes(directory: Path) -> float:
    """Free bytes on the disk of a directory, which need not exist yet."""
    existing_directory = next(path for path in (directory, *directory.parents) if path.exists())
    return float(shutil.disk_usage(existing_directory).free)


def matmul_seconds(dtype: torch.dtype, device: torch.device) -> float:
    """The fastest of a few products of two matrices."""
    rows = MATMUL if device.type == "cpu" else MATMUL_ELSEWHERE
    matrix = torch.ones(rows, rows, dtype=dtype, device=device)
    return min(timeit.repeat(lambda: float((matrix @ matrix)[0, 0]), number=1, repeat=TRIES))  # float waits for the device


def chosen_precision(requested: str, precision: Precision) -> Check:
    """The number format and device that were chosen, why, and how fast matrices are multiplied in it here."""
    device, word = precision.device, precision.word
    speed = 1.0 if word == "fp32" else matmul_seconds(torch.float32, device) / matmul_seconds(DTYPES[word], device)
    why = f"{requested} was asked for" if requested != "auto" else (
        "the chip has bf16" if word == "bf16" else "CUDA without bf16" if word == "fp16" else "no bf16 in the chip"
    )  # fmt: skip
    figure = f"{word} on {device}, since {why}; {speed:.1f} x the speed of fp32, measured"
    best = "bf16" if has_bf16(device) and word != "bf16" else "fp32"
    return make_check(
        "precision", speed >= EMULATED, figure, f"set precision=auto or {best}: {word} is emulated on this {device}"
    )


def native_kernels(computed_in: Precision) -> Check:
    """Whether layers have kernels for this CPU and number format; without them training is slower, not wrong."""
    dtype = DTYPES[computed_in.word]
    if computed_in.device.type != "cpu":
        figure = "not used: they are for CPUs"
    elif dtype in native.kernels():
        figure = f"used, for {computed_in.word}"
    elif native.kernels() or not native.suits_machine():
        figure = f"not used: they are for bf16 with AVX512-BF16 and fp32 with AVX2, not for {computed_in.word} on this CPU"
    else:
        figure = f"not compiled at installation; {native.ADVICE}: small models train up to twice as fast"
    return Check("native kernels", True, figure)


def threads(runtime: Runtime, cores: int) -> Check:
    """Whether the threads of all ranks have a core each."""
    each = runtime.threads or max(1, cores // runtime.devices)
    figure = f"{runtime.devices} x {each} threads on {cores} cores"
    fix = f"set runtime.threads={max(1, cores // runtime.devices)}, or fewer runtime.devices: threads wait for each other"
    return make_check("threads", each * runtime.devices <= cores, figure, fix)


def versions(required: Sequence[str], pins: Mapping[str, str]) -> Check:
    """What is installed against what ttrain declares (`required`) and what was tested together (`pins`).

    A required package that is missing or outside its declared range is not ok. Another version than the tested one may be
    as good: it is named, and ok.
    """
    from packaging.requirements import Requirement

    wrong, untested = [], []
    for requirement in map(Requirement, required):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        have = _installed(requirement.name)
        if have is None or not requirement.specifier.contains(have, prereleases=True):
            wrong.append(f"{requirement.name} {have or 'is missing'}, {requirement.specifier or 'any'} is required")
    for name, pin in pins.items():
        have = _installed(name)
        if have is not None and have.partition("+")[0] != pin:
            untested.append(f"{name} {have} (tested: {pin})")
    figure = "; ".join(wrong) or (
        f"all required are there; {len(untested)} of {len(pins)} differ from those tested together" if pins
        else "all required are there"
    )  # fmt: skip
    if untested and not wrong:
        figure += f": {first_of(untested, 4)}"
    return make_check("versions", not wrong, figure, "pip install -c constraints.txt ttrain, with the file of this version")


def pins_of(constraints: Path) -> dict[str, str]:
    """{name: version} of a constraints file; empty where there is none, as beside an installed wheel."""
    lines = constraints.read_text().splitlines() if constraints.exists() else []
    pairs = (line.partition("#")[0].strip().partition("==") for line in lines)
    return {name: version for name, equals, version in pairs if equals}


def _give_back_freed() -> None:
    """Return freed memory to the system, so that none of it is used again unseen: the peak would be too low by it."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc has it, others need it less
        ctypes.CDLL(None).malloc_trim(0)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all tensors; one that occurs twice counts once."""
    return sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}.values())
