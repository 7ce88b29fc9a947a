"""`runtime.tune=auto` of a stage: how many rows of a micro-batch are fastest here, measured or remembered.

Forward and backward passes over rows of the run are timed; the model stays as it is. All ranks measure together.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ttrain.config import Runtime
from ttrain.core.files import PRIVATE_FILE, read_object, write_json
from ttrain.core.hashing import digest_of
from ttrain.core.machine import VERSION, processor, versions
from ttrain.core.text import format_duration
from ttrain.data.loader import BatchSource, Order
from ttrain.data.packing import Rows
from ttrain.model.factory import count_parameters
from ttrain.tasks.common.job import StageContext
from ttrain.train.distributed import Ranks
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.precision import Precision
from ttrain.train.resource_limits import cap_at_available_memory
from ttrain.train.task import TrainingTask

FILE = Path("cache", "tuning.json")  # in the home: {digest of what it was measured on: rows_per_device}
PASSES = 3  # of each size; the first one, which warms up, does not count
STATES = 2  # numbers that an optimizer keeps for each one that is trained
SLOWER = 1.02  # less is noise: the search goes on over sizes that are equally fast
SETTINGS = ("attention", "loss_chunk_tokens", "compile", "gradient_checkpointing", "memory_limit_gb", "threads")
LIBRARIES = ("torch", "transformers", "peft")

log = logging.getLogger("ttrain")


def tuned(
    task: LanguageModeling, rows: Rows, order: Order, job: StageContext, ranks: Ranks, precision: Precision
) -> Runtime:
    """The stage's runtime settings; with `tune=auto` with the `rows_per_device` that is fastest here.

    It changes the order of sums, and so the last bits of the weights: in deterministic mode nothing is tuned.
    """
    runtime = job.runtime
    if runtime.tune == "off" or order.steps == 0:
        return runtime
    if runtime.deterministic or (runtime.parallel == "fsdp" and ranks.world > 1):
        log.warning(
            "runtime.tune is auto, but nothing is tuned: it would change the last bits of the weights, and shards "
            "of a model cannot be measured; set runtime.deterministic=false runtime.parallel=ddp"
        )
        return runtime
    path = job.home / FILE if job.home and ranks.first else None
    remembered = read_object(path) if path else {}
    key = digest_of(_described(task, rows, order, runtime, ranks, precision))
    rows_per_device = int(ranks.sum([float(remembered.get(key, 0))])[0])
    if not rows_per_device:
        seconds = partial(step_seconds, task, rows, order, precision, ranks)
        rows_per_device = fastest(seconds, sizes(order, ranks), ranks)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {**remembered, key: rows_per_device}, PRIVATE_FILE)
    log.info("tuning: rows_per_device=%d", rows_per_device)
    return runtime.model_copy(update={"rows_per_device": rows_per_device})


def sizes(order: Order, ranks: Ranks) -> list[int]:
    """Powers of two up to the rows of a step for one rank, and these."""
    most = -(-order.rows_per_step // ranks.world)
    return sorted({most, *(1 << power for power in range(most.bit_length()))})


def fastest(measure: Callable[[int], float], sizes: Sequence[int], ranks: Ranks) -> int:
    """The size with the least seconds of a step, tried upwards until a step is slower or does not fit.

    `measure` raises an error where a size does not fit. The same size on all ranks; the first one where none could be
    measured. All sizes together take about as long as six steps, since each has twice the rows of the one before.
    """
    best, least = sizes[0], math.inf
    for size in sizes:
        seconds, failure = 0.0, ""
        try:
            with cap_at_available_memory(ranks.device, ranks.world):
                seconds = measure(size)
        except (RuntimeError, MemoryError) as error:
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
        total, failures = ranks.sum([seconds, float(bool(failure))])
        log.info("tuning: rows_per_device=%d: %s", size, failure or f"{format_duration(seconds)} a step")
        if failures or total > SLOWER * least:
            break
        if total < least:
            best, least = size, total
    return best


def step_seconds(
    task: TrainingTask, rows: BatchSource, order: Order, precision: Precision, ranks: Ranks, rows_per_device: int
) -> float:
    """Of the forward and backward passes of the rank that has most of them; weights and random numbers stay as they are.

    What the optimizer will keep is allocated meanwhile, so that a size which fits here fits in training.
    """
    device = ranks.device
    module: Any = task.build_model().to(device)
    module.train()
    reserved = torch.empty(STATES * count_parameters(module, trained=True), device=device)
    seconds = []
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for number in range(PASSES):
                batch = rows.batch(order.step_rows(number % order.steps)[:rows_per_device])
                began = time.perf_counter()
                with precision.autocast():
                    loss = task.train_step(module, batch, device)
                (loss.total / max(1, loss.count)).backward()  # type: ignore[no-untyped-call]  # torch's
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                seconds.append(time.perf_counter() - began)
    finally:
        module.zero_grad(set_to_none=True)
        del reserved
    micro_batches = -(-order.rows_per_step // rows_per_device)
    return min(seconds[1:]) * -(-micro_batches // ranks.world)


def _described(
    task: LanguageModeling, rows: Rows, order: Order, runtime: Runtime, ranks: Ranks, precision: Precision
) -> Mapping[str, Any]:
    """All on which the fastest size depends, as JSON: another machine, shape, version or setting is measured again."""
    module, installed = task.build_model(), versions()
    return {
        "processor": processor(),
        "device": torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else ranks.device.type,
        "ranks": ranks.world,
        "versions": {"ttrain": VERSION, **{name: installed.get(name) for name in LIBRARIES}},
        "model": type(module.causal).__name__,
        "parameters": [count_parameters(module), count_parameters(module, trained=True)],
        "row_length": rows.row_length,
        "rows_per_step": order.rows_per_step,
        "precision": precision.word,
        "settings": {name: getattr(runtime, name) for name in SETTINGS},
    }
