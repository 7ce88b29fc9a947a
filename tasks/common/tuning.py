"""`runtime.tune=auto` of a stage: how many rows of a micro-batch are fastest here, measured once.

Forward and backward passes over rows of the run are timed; the model stays as it is.
"""

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ttrain.config import Runtime
from ttrain.core.files import PRIVATE_FILE, read_object, write_json
from ttrain.core.hashing import digest_of
from ttrain.core.machine import processor, versions
from ttrain.data.loader import BatchSource
from ttrain.data.order import Order
from ttrain.data.packing import Rows
from ttrain.model.factory import count_parameters
from ttrain.tasks.common.job import StageContext
from ttrain.train.distributed import Ranks
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.precision import Precision
from ttrain.train.resource_limits import cap_at_available_memory

FILE = Path("cache", "tuning.json")  # in the home: {digest of what was measured: rows_per_device}
PASSES = 3  # of each size; the first one, which warms up, does not count
STATES = 2  # numbers that an optimizer keeps for each one that is trained
SLOWER = 1.02  # less is noise: the search continues over sizes that are equally fast
SETTINGS = {
    "attention",
    "loss_chunk_tokens",
    "compile",
    "gradient_checkpointing",
    "memory_limit_gb",
    "threads",
}

log = logging.getLogger("ttrain")


def tuned(
    task: LanguageModeling,
    rows: Rows,
    order: Order,
    job: StageContext,
    ranks: Ranks,
    precision: Precision,
) -> Runtime:
    """The stage's runtime settings; with `tune=auto` with the `rows_per_device` that is fastest
    here.

    It changes the order of sums, and so the last bits of the weights: not in deterministic mode.
    """
    runtime = job.runtime
    if runtime.tune == "off" or order.steps == 0:
        return runtime
    if runtime.deterministic or (runtime.parallel == "fsdp" and ranks.world > 1):
        log.warning(
            "runtime.tune is auto, but nothing is tuned: it would change the last bits of the "
            "weights, "
            "and shards of a model cannot be measured; "
            "set runtime.deterministic=false runtime.parallel=ddp"
        )
        return runtime
    model = task.build_model()
    # Another machine, shape, version or setting is measured again.
    key = digest_of(
        [
            processor(),
            torch.cuda.get_device_name(ranks.device)
            if ranks.device.type == "cuda"
            else ranks.device.type,
            ranks.world,
            versions(),
            precision.word,
            type(model.causal).__name__,
            [count_parameters(model), count_parameters(model, trained=True)],
            [rows.row_length, order.rows_per_step],
            runtime.model_dump(mode="json", include=SETTINGS),
        ]
    )
    path = job.home / FILE if job.home and ranks.first else None
    remembered = read_object(path) if path else {}
    rows_per_device = int(ranks.sum([float(remembered.get(key, 0))])[0])
    if not rows_per_device:
        rows_per_device = fastest(
            lambda size: step_seconds(task, rows, order, precision, ranks, size), order, ranks
        )
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {**remembered, key: rows_per_device}, PRIVATE_FILE)
    log.info("tuning: rows_per_device=%d", rows_per_device)
    return runtime.model_copy(update={"rows_per_device": rows_per_device})


def fastest(measure: Callable[[int], float], order: Order, ranks: Ranks) -> int:
    """The number of rows with the fastest step: doubled until it is slower or does not fit.

    The same on all ranks, which measure together; 1 where nothing could be measured.
    """
    most = -(-order.rows_per_step // ranks.world)
    totals: dict[int, float] = {}  # by size
    for size in sorted({most, *(1 << power for power in range(most.bit_length()))}):
        try:
            with cap_at_available_memory(ranks.device, ranks.world):
                seconds = measure(size)
        except (RuntimeError, MemoryError):  # it does not fit
            seconds = math.inf
        total = ranks.sum([seconds])[0]
        log.info("tuning: rows_per_device=%d: %.3g s a step", size, total / ranks.world)
        if total == math.inf or total > SLOWER * min(totals.values(), default=math.inf):
            break
        totals[size] = total
    return min(totals, key=totals.__getitem__, default=1)


def step_seconds(
    task: LanguageModeling,
    rows: BatchSource,
    order: Order,
    precision: Precision,
    ranks: Ranks,
    rows_per_device: int,
) -> float:
    """Of the passes of the rank that has most of them; weights and random numbers stay as they are.

    What the optimizer will keep is allocated meanwhile, so that a size which fits here fits in
    training.
    """
    device = ranks.device
    module: Any = task.build_model().to(device).train()
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
    return min(seconds[1:]) * math.ceil(order.rows_per_step / rows_per_device / ranks.world)
