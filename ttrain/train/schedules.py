"""Learning-rate schedules, in optimizer steps; plain arithmetic, so that the plan can ask them without torch."""

from __future__ import annotations

import math
from collections.abc import Callable

from ttrain.config import Schedule, Training


def steps_of(config: Training, rows: int) -> tuple[int, int]:
    """(optimizer steps, rows consumed) of a budget over a set of `rows` rows; tokens are rounded up to whole steps."""
    if config.tokens is not None:
        steps = -(-config.tokens // config.tokens_per_step)
        return steps, steps * config.rows_per_step
    assert config.epochs is not None, "the settings name one of tokens and epochs"
    total = max(1, math.ceil(config.epochs * rows))
    return -(-total // config.rows_per_step), total


def decay_start(config: Schedule, steps: int) -> int:
    """First step at which the learning rate depends on the length of the run; before it, runs of any length agree."""
    if config.kind == "constant":
        return steps
    if config.kind == "linear":
        return max(min(config.warmup_steps, steps), steps - round(config.decay_fraction * steps))
    return min(config.warmup_steps, steps)


def schedule(config: Schedule, steps: int) -> Callable[[int], float]:
    """Factor of the peak learning rate at a step, counted from 0: never 0 while the run lasts, unless the floor is."""
    start = decay_start(config, steps)

    def factor(step: int) -> float:
        if step < min(config.warmup_steps, steps):
            return (step + 1) / (config.warmup_steps + 1)
        if step < start or config.kind == "constant":
            return 1.0
        done = (step - start) / max(1, steps - start)
        if config.kind == "linear":
            return config.floor + (1 - config.floor) * (1 - done)
        return config.floor + (1 - config.floor) * 0.5 * (1 + math.cos(math.pi * done))

    return factor
