"""Performance metrics of a training: speed and memory."""

import contextlib
import math
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ttrain.train.callbacks import Callback, StepRecord
from ttrain.train.precision import Precision

RECENT_STEPS = 200  # from which the time of later steps is estimated

TRIMMED = 0.05  # share of them left out at either end: a stall, a first step that compiles


TERA = 1e12
# Dense TFLOP/s in fp16, tf32 and fp32, accumulated in fp32, by a word of the name that
# torch.cuda.get_device_name gives. Chips with tf32 have bf16 too, as fast as fp16. Sources:
#   T4     nvidia.com, Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf
#   A10, A100, L4, L40S, H100, H200, B200: the data sheets at nvidia.com/en-us/data-center; half of
#          the figures with sparsity. GH200 holds the same chip as H100 SXM.
#   3090   "NVIDIA Ampere GA102 GPU Architecture", appendix A
#   4090   "NVIDIA Ada GPU Architecture", appendix A
# Boards of the same name that are slower (PCIe, NVL) have lines of their own, or none.
TFLOPS: dict[str, tuple[float, float | None, float]] = {
    "T4": (65, None, 8.1),
    "A10": (125, 62.5, 31.2),
    "A100": (312, 156, 19.5),
    "A100 PCIe": (312, 156, 19.5),
    "L4": (121, 60, 30.3),
    "L40S": (362, 183, 91.6),
    "3090": (71, 35.6, 35.6),
    "4090": (165.2, 82.6, 82.6),
    "H100": (989.4, 494.7, 66.9),
    "H100 PCIe": (756, 378, 51.2),
    "H200": (989.4, 494.7, 66.9),
    "GH200": (989.4, 494.7, 66.9),
    "B200": (2250, 1125, 75),
}
# Not covered by the line of the plain chip.
OTHER_BOARDS = frozenset({"PCIe", "NVL", "Laptop", "D", "MIG"})


class PerformanceMonitor(Callback):
    """Adds to the log, for the time since the last one:

    tokens_per_second     by the wall clock, with validations, checkpoints and samples
    step_seconds          mean of the steps' own time
    data_wait_fraction    share of that time that waited for rows
    mfu                   the model's FLOP/s as a share of `peak_flops`, if known
    memory_bytes          peak, of the process, or of tensors on CUDA and MPS
    eta_seconds           until the last step
    epoch_time            seconds for all rows once at this pace, with validations and the like
    """

    def __init__(
        self,
        *,
        device: torch.device,
        steps_per_epoch: float,
        flops_per_token: float = 0.0,
        peak_flops: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`peak_flops`: of all ranks together; 0: unknown."""
        self._device = device
        self._clock = clock
        self._steps_per_epoch = steps_per_epoch
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._window: list[StepRecord] = []  # since the last log
        self._all_steps = 0
        self._all_seconds = 0.0
        self._began = self._logged = 0.0

    def start(self, step: int, steps: int) -> None:
        self._began = self._logged = self._clock()

    def step_end(self, record: StepRecord) -> None:
        self._recent.append(record.seconds)
        self._window.append(record)
        self._all_steps += 1
        self._all_seconds += record.seconds

    def figures(self, record: StepRecord) -> Mapping[str, float]:
        now = self._clock()
        window = self._window
        seconds = sum(step.seconds for step in window)
        steps = max(1, len(window))
        rate = sum(step.tokens for step in window) / max(now - self._logged, 1e-9)
        # Of this whole run.
        between_steps = max(0.0, now - self._began - self._all_seconds) / max(1, self._all_steps)
        metrics = {
            "tokens_per_second": rate,
            "step_seconds": seconds / steps,
            "data_wait_fraction": sum(step.data_seconds for step in window) / max(seconds, 1e-9),
            "memory_bytes": float(peak_memory(self._device)),
            "eta_seconds": (record.steps - record.step)
            * (trimmed_mean(self._recent) + between_steps),
            "epoch_time": self._steps_per_epoch * (now - self._logged) / steps,
        }
        if self._peak_flops:
            metrics["mfu"] = rate * self._flops_per_token / self._peak_flops
        self._logged = now
        self._window = []
        return metrics


def trimmed_mean(values: deque[float]) -> float:
    """The mean without the lowest and highest 5 %, at least one of each of three values or more."""
    # Unlike the median it is right for steps of two kinds, as with rows grouped by length.
    ordered = sorted(values)
    cut = math.ceil(TRIMMED * len(ordered)) if len(ordered) > 2 else 0
    middle = ordered[cut : len(ordered) - cut]
    return sum(middle) / max(1, len(middle))


def peak_memory(device: torch.device) -> int:
    """Peak bytes of this process, on CUDA of tensors; on MPS what tensors take now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    with contextlib.suppress(OSError, StopIteration):
        # Getrusage has the peak of the parent's image too.
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def peak_flops(precision: Precision) -> float:
    """Peak FLOP/s of a rank's device in matrix products, by the table; 0 if it is not listed."""
    if precision.device.type != "cuda":
        return 0.0
    return datasheet_flops(torch.cuda.get_device_name(precision.device), precision.word)


def datasheet_flops(name: str, word: str) -> float:
    """The table's FLOP/s for a device name and a precision; 0 if not listed."""
    name_parts = {*name.replace("-", " ").split()}
    for chip, (half, tf32, fp32) in TFLOPS.items():
        chip_parts = {*chip.split()}
        if chip_parts <= name_parts and name_parts & OTHER_BOARDS <= chip_parts:
            tflops = {"fp16": half, "bf16": half if tf32 else None, "tf32": tf32, "fp32": fp32}
            return (tflops[word] or 0.0) * TERA
    return 0.0


def flops_per_token(model: nn.Module, positions: float) -> float:
    """FLOPs of forward and backward pass per token (PaLM, arXiv:2204.02311, appendix B)."""
    # 6 for each weight that multiplies, 4 if it is frozen; 12 for each layer, head width and
    # position in attention. Embeddings are looked up; of experts those count that a token visits.
    # Recomputation by gradient checkpointing does not count.
    looked_up = looked_up_weights(model)
    shares = visited_shares(model)
    weights = sum(
        p.numel() * shares.get(name, 1.0) * (6 if p.requires_grad else 4)
        for name, p in model.named_parameters()
        if name not in looked_up
    )
    config: Any = getattr(model, "config", None)
    heads = getattr(config, "num_attention_heads", 0)
    if not heads:
        return float(weights)
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return float(weights + 12 * config.num_hidden_layers * width * positions)


def looked_up_weights(model: Any) -> set[str]:
    """Names of embeddings that are not the output head's weight as well."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    multiplied = getattr(head, "weight", None)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {name for name, p in model.named_parameters() if id(p) in tables and p is not multiplied}


def visited_shares(model: nn.Module) -> dict[str, float]:
    """Share of each routed expert weight that a token uses, k of E, by name.

    transformers stacks the experts of a layer in tensors [E, ...] named `experts`.
    """
    visited = getattr(getattr(model, "config", None), "num_experts_per_tok", None)
    return {
        name: min(1.0, visited / len(p))
        for name, p in model.named_parameters()
        if visited and ".experts." in name and p.ndim > 1
    }
