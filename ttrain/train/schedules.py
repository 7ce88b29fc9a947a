"""Learning-rate schedules in optimizer steps, without torch, which the plan does not import."""

import math
from collections.abc import Callable

from ttrain.config import Schedule, Training

WARMUP_STEPS = 10
MINIMIND_FLOOR = 0.1
# Of the time of a training's steps that its quick validations may take; LoRA's took up to 2.9 %.
QUICK_SHARE = 0.02
FEWEST_QUICK_ROWS = 4
MOST_QUICK_ROWS = 64
BUDGET = frozenset({"tokens", "epochs"})  # settings that may change when a checkpoint is continued


# May also change if the user names the run to continue.
RATES = frozenset({"optim.lr", "optim.muon_lr", "optim.embedding_lr", "optim.head_lr"})


def steps_of(config: Training, rows: int, fill: float = 1.0) -> tuple[int, int]:
    """(optimizer steps, rows consumed) of a budget over `rows` rows; tokens round up.

    `fill`: mean tokens of a row, as a share of `row_length`, if rows count by length.
    """
    if config.token_budget is not None:
        steps = math.ceil(config.token_budget / (config.step_tokens * fill))
        return steps, steps * config.rows_per_step
    assert config.passes is not None, "the settings name one of tokens and epochs"
    total = max(1, math.ceil(config.passes * rows))
    return -(-total // config.rows_per_step), total


def spread_steps(steps: int, times: int) -> frozenset[int]:
    """`times` evenly spread steps of a run, with the last; all steps if there are fewer."""
    return frozenset(-(-steps * number // times) for number in range(1, times + 1))


def quick_rows(rows: int, times: int) -> int:
    """Rows of each quick validation of a training over `rows` rows."""
    # A forward pass takes a third of a row's training (quickstart: 0.34), and all of them may take
    # 2 % of it. A power of two, so that most runs are measured on the same rows.
    most = int(QUICK_SHARE * 3 * rows / max(1, times))
    return min(MOST_QUICK_ROWS, max(FEWEST_QUICK_ROWS, 1 << most.bit_length() >> 1))


def warmup_steps(config: Schedule) -> int:
    """Steps of the warm-up: as set, else 10; 0 for `minimind`, whose formula has none."""
    if config.warmup_steps is not None:
        return config.warmup_steps
    return 0 if config.kind == "minimind" else WARMUP_STEPS


def decay_start(config: Schedule, steps: int) -> int:
    """First step of a decay that ends with the run; `steps` for constant and exponential rates."""
    return steps if config.kind in ("constant", "exponential") else _peak_end(config, steps)


def shared_steps(config: Schedule, steps: int) -> int:
    """First step at which the rate depends on the length of the run."""
    return 0 if steps > (config.full_rate_steps or steps) else decay_start(config, steps)


def plateau_end(config: Schedule, steps: int) -> int | None:
    """Steps before the decay of `infinite`, which another training continues; None without any."""
    end = decay_start(config, steps)
    return end if config.kind == "infinite" and end > 0 else None


def schedule(config: Schedule, steps: int) -> Callable[[int], float]:
    """Factor of the peak learning rate at an optimizer step, counted from 0."""
    # The first of w warm-up steps has 1/(w + 1). A decay from step s has done (step - s)/(steps -
    # s): its first step has the peak, the step after the last would reach the floor. Every decay is
    # floor + (1 - floor) * shape, which, unlike max(floor, shape), has no bend. `minimind` is lr *
    # (0.1 + 0.45 * (1 + cos(pi * t/T))), t = step, T = steps (github.com/jingyaogong/minimind,
    # `get_lr`, where t counts micro-batches from 1); `wsd` and the branch of `infinite`
    # (arXiv:2403.08763) are the 1 - sqrt cooldown of arXiv:2405.18392; `cosine` is
    # arXiv:1608.03983.
    warmup = warmup_steps(config)
    start = _peak_end(config, steps)
    floor = MINIMIND_FLOOR if config.kind == "minimind" else config.floor
    peak = min(1.0, math.sqrt((config.full_rate_steps or steps) / max(1, steps)))

    def factor(step: int) -> float:
        if step < min(warmup, steps):
            return peak * (step + 1) / (warmup + 1)
        if step < start:
            return peak
        return peak * (floor + (1 - floor) * _shape(config, step - start, max(1, steps - start)))

    return factor


def _peak_end(config: Schedule, steps: int) -> int:
    hold_end = min(warmup_steps(config) + config.hold_steps, steps)
    if config.kind in ("linear", "wsd", "infinite"):
        return max(hold_end, steps - round(config.decay_fraction * steps))
    return hold_end


def _shape(config: Schedule, step: int, steps: int) -> float:
    """Remaining share, 1 to 0, of a decay over `steps` steps, at its own step from 0."""
    done = step / steps
    if config.kind == "linear":
        return 1 - done
    if config.kind in ("wsd", "infinite"):
        return 1 - math.sqrt(done)
    if config.kind == "exponential":
        return float(config.decay_rate ** (step / config.decay_steps))
    if config.kind == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * done))  # cosine, minimind
