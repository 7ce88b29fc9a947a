"""The micro-batch with the fastest step: passes over rows of a run are timed.

The model stays as it is.
"""

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from ttrain.data.loader import BatchSource
from ttrain.data.order import Order
from ttrain.train.distributed import Ranks
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.precision import Precision
from ttrain.train.resource_limits import cap_at_available_memory

PASSES = 3  # of each size; the first one, which warms up, does not count
STATES = 2  # numbers that an optimizer keeps for each one that is trained
SLOWER = 1.02  # less is noise: the search continues over sizes that are equally fast

log = logging.getLogger("ttrain")


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
    trained = sum(each.numel() for each in module.parameters() if each.requires_grad)
    reserved = torch.empty(STATES * trained, device=device)
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
