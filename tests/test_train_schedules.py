"""Learning rates by hand-written tables, and how many steps a budget is."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttrain.config import Schedule, Training
from ttrain.train.schedules import decay_start, schedule, steps_of

KINDS = ("linear", "cosine", "constant")
COSINE = [0.1 + 0.45 * (1 + math.cos(math.pi * n / 8)) for n in range(8)]


@pytest.mark.parametrize(
    ("config", "steps", "table"),
    [
        # two steps of warm-up, four of trunk, four of decay: 1, 3/4, 2/4, 1/4
        (Schedule(kind="linear", warmup_steps=2, decay_fraction=0.4), 10, [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]),
        (Schedule(kind="linear", warmup_steps=0, decay_fraction=1.0, floor=0.2), 4, [1.0, 0.8, 0.6, 0.4]),
        (Schedule(kind="linear", warmup_steps=3, decay_fraction=1.0), 6, [0.25, 0.5, 0.75, 1, 2 / 3, 1 / 3]),
        (Schedule(kind="cosine", warmup_steps=2, floor=0.1), 10, [1 / 3, 2 / 3, *COSINE]),
        (Schedule(kind="cosine", warmup_steps=0), 2, [1.0, 0.5]),
        (Schedule(kind="constant", warmup_steps=1), 4, [0.5, 1, 1, 1]),
        (Schedule(kind="linear", warmup_steps=9), 3, [0.1, 0.2, 0.3]),  # the run ends within the warm-up
    ],
)
def test_rates_follow_the_table(config: Schedule, steps: int, table: list[float]) -> None:
    factor = schedule(config, steps)
    assert [factor(step) for step in range(steps)] == pytest.approx(table, abs=1e-12)


@pytest.mark.parametrize(
    ("config", "start"),
    [
        (Schedule(kind="linear", warmup_steps=2, decay_fraction=0.4), 6),
        (Schedule(kind="linear", warmup_steps=8, decay_fraction=0.4), 8),
        (Schedule(kind="linear", warmup_steps=20, decay_fraction=0.4), 10),
        (Schedule(kind="linear", warmup_steps=2, decay_fraction=0.0), 10),
        (Schedule(kind="cosine", warmup_steps=2), 2),
        (Schedule(kind="cosine", warmup_steps=20), 10),
        (Schedule(kind="constant", warmup_steps=2), 10),
    ],
)
def test_the_decay_starts_where_the_table_says(config: Schedule, start: int) -> None:
    assert decay_start(config, 10) == start


SCHEDULES = st.builds(
    Schedule,
    kind=st.sampled_from(KINDS),
    warmup_steps=st.integers(0, 30),
    decay_fraction=st.floats(0, 1),
    floor=st.floats(0, 1),
)


@given(SCHEDULES, st.integers(1, 60))
def test_rates_rise_in_the_warm_up_and_never_after_it_and_are_never_0(config: Schedule, steps: int) -> None:
    factor = schedule(config, steps)
    rates = [factor(step) for step in range(steps)]
    warm = min(config.warmup_steps, steps)
    assert all(first < second for first, second in pairwise(rates[: warm + 1]))
    assert all(first >= second - 1e-12 for first, second in pairwise(rates[warm:]))
    assert 0 < min(rates) <= max(rates) <= 1 + 1e-12


@given(SCHEDULES, st.integers(1, 60), st.integers(1, 60))
def test_runs_of_any_length_agree_before_their_decay(config: Schedule, short: int, long: int) -> None:
    common = min(decay_start(config, short), decay_start(config, long))
    first, second = schedule(config, short), schedule(config, long)
    assert [first(step) for step in range(common)] == [second(step) for step in range(common)]


@pytest.mark.parametrize(
    ("budget", "rows", "expected"),
    [
        ({"tokens": 1024}, 5, (4, 32)),
        ({"tokens": 1025}, 5, (5, 40)),
        ({"tokens": 1}, 5, (1, 8)),
        ({"epochs": 1.0}, 20, (3, 20)),
        ({"epochs": 1.0}, 16, (2, 16)),
        ({"epochs": 2.5}, 10, (4, 25)),
        ({"epochs": 0.01}, 10, (1, 1)),
    ],
)
def test_a_budget_is_whole_steps_of_tokens_or_whole_rows_of_epochs(
    budget: dict[str, float], rows: int, expected: tuple[int, int]
) -> None:
    assert steps_of(Training(tokens_per_step=256, row_length=32, **budget), rows) == expected  # type: ignore[arg-type]
