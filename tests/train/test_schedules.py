"""Learning rates by hand-written tables, and how many steps a budget is."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttrain.config import Schedule, Training
from ttrain.train.schedules import (
    decay_start,
    plateau_end,
    quick_rows,
    schedule,
    shared_steps,
    spread_steps,
    steps_of,
    warmup_steps,
)

KINDS = ("linear", "cosine", "constant", "minimind", "exponential", "wsd", "infinite")
COSINE = [0.1 + 0.45 * (1 + math.cos(math.pi * n / 8)) for n in range(8)]
# Four steps of cooldown: 1, 1 - sqrt(1/4), 1 - sqrt(2/4), 1 - sqrt(3/4), between the peak and 0.2.
COOLDOWN = [0.25, 0.5, 0.75, 1, 1, 1, 1, 0.6, 0.434314575050762, 0.307179676972449]
MINIMIND = [1.0, 0.977975432332819, 0.914057647468726, 0.814503363531613, 0.689057647468726, 0.55]
MINIMIND += [0.410942352531274, 0.285496636468387, 0.185942352531274, 0.122024567667181]
# One step of warm-up, two of hold, then half of what is above the floor every two steps.
HALVING = [0.5, 1, 1, 1, 0.6, 0.4, 0.3, 0.25, 0.225, 0.2125]


def of(kind: str, warmup_steps: int | None = None, **settings: Any) -> Schedule:
    return Schedule(kind=kind, warmup_steps=warmup_steps, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "table"),
    [
        # Two steps of warm-up, four of trunk, four of decay.
        (of("linear", 2, decay_fraction=0.4), [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]),
        (of("linear", 0, decay_fraction=1.0, floor=0.2), [1.0, 0.8, 0.6, 0.4]),
        (of("linear", 3, decay_fraction=1.0), [0.25, 0.5, 0.75, 1, 2 / 3, 1 / 3]),
        (of("cosine", 2, floor=0.1), [1 / 3, 2 / 3, *COSINE]),
        (of("constant", 1), [0.5, 1, 1, 1]),
        (of("linear", 9), [0.1, 0.2, 0.3]),  # the run ends within the warm-up
        (of("linear"), [1 / 11, 2 / 11, 3 / 11]),  # ten steps of warm-up by default
        (of("linear", 1, hold_steps=2, decay_fraction=1), [0.5, 1, 1, 1, 0.75, 0.5, 0.25]),
        (of("exponential", 1, hold_steps=2, decay_rate=0.25, decay_steps=2, floor=0.2), HALVING),
        (of("exponential", 0, decay_rate=0.5, decay_steps=1), [1, 0.5, 0.25, 0.125, 0.0625]),
        (of("wsd", 3, decay_fraction=0.4, floor=0.2), COOLDOWN),
        (of("infinite", 3, decay_fraction=0.4, floor=0.2), COOLDOWN),
        (of("minimind"), MINIMIND),
        (of("minimind", 2), [1 / 3, 2 / 3, *COSINE]),
    ],
)
def test_rates_follow_the_table(config: Schedule, table: list[float]) -> None:
    factor = schedule(config, len(table))
    assert [factor(step) for step in range(len(table))] == pytest.approx(table, abs=1e-12)


def test_minimind_has_a_floor_of_its_own() -> None:
    with pytest.raises(ValueError, match=r"floor.*0\.3.*schedule\.kind.*minimind"):
        of("minimind", floor=0.3)


@pytest.mark.parametrize(
    ("config", "start", "end"),
    [
        (of("linear", 2, decay_fraction=0.4), 6, None),
        (of("linear", 8, decay_fraction=0.4), 8, None),
        (of("linear", 20, decay_fraction=0.4), 10, None),
        (of("linear", 2, decay_fraction=0.0), 10, None),
        (of("cosine", 2, hold_steps=3), 5, None),
        (of("constant", 2), 10, None),
        (of("exponential", 2), 10, None),
        (of("minimind"), 0, None),
        (of("wsd", 2, hold_steps=6, decay_fraction=0.3), 8, None),
        (of("wsd", 2, decay_fraction=0.3), 7, None),
        (of("infinite", 2, decay_fraction=0.3), 7, 7),
        (of("infinite", 0, decay_fraction=0.0), 10, 10),
        (of("infinite", 0, decay_fraction=1.0), 0, None),
    ],
)
def test_the_decay_starts_where_the_table_says_and_an_infinite_schedule_alone_has_a_plateau(
    config: Schedule, start: int, end: int | None
) -> None:
    assert (decay_start(config, 10), plateau_end(config, 10)) == (start, end)


def any_schedule(kind: str, floor: float, **settings: Any) -> Schedule:
    return of(kind, floor=0.0 if kind == "minimind" else floor, **settings)


SCHEDULES = st.builds(
    any_schedule,
    kind=st.sampled_from(KINDS),
    floor=st.floats(0, 1),
    warmup_steps=st.none() | st.integers(0, 30),
    hold_steps=st.integers(0, 30),
    decay_fraction=st.floats(0, 1),
    decay_rate=st.floats(0.1, 1),
    decay_steps=st.integers(1, 50),
)


@given(SCHEDULES, st.integers(1, 60))
def test_rates_rise_in_the_warm_up_alone_and_are_never_0(config: Schedule, steps: int) -> None:
    factor = schedule(config, steps)
    rates = [factor(step) for step in range(steps)]
    warm = min(warmup_steps(config), steps)
    held = rates[warm : warm + config.hold_steps + 1]
    assert all(first < second for first, second in pairwise(rates[: warm + 1]))
    assert all(first >= second - 1e-12 for first, second in pairwise(rates[warm:]))
    assert 0 < min(rates) <= max(rates) <= 1 + 1e-12
    assert min(rates[warm:], default=1.0) >= config.floor - 1e-12
    assert held == pytest.approx([1.0] * len(held))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "constant"])
def test_a_decay_nears_its_floor_to_the_last_step_and_never_lies_flat_on_it(kind: str) -> None:
    config = any_schedule(kind, 0.3, warmup_steps=0, decay_fraction=1, decay_steps=100)
    factor = schedule(config, 1000)
    assert all(factor(step) > factor(step + 1) for step in range(1000))
    assert factor(1000) == pytest.approx(0.1 if kind == "minimind" else 0.3, abs=1e-3)


def test_in_more_steps_than_those_of_the_full_rate_it_is_lower_by_the_root_of_their_ratio() -> None:
    config = of("infinite", 0, decay_fraction=0, full_rate_steps=8)
    for steps, peak in ((1, 1.0), (8, 1.0), (32, 0.5), (800, 0.1)):
        assert {schedule(config, steps)(step) for step in range(steps)} == {peak}
        shared = steps if steps <= 8 else 0
        assert shared_steps(config, steps) == shared, "no two longer ones agree"
        assert plateau_end(config, steps) == steps
    linear = [of("linear", 3, decay_fraction=0.5, full_rate_steps=steps) for steps in (8, None)]
    lowered, plain = (schedule(config, 32) for config in linear)
    assert [lowered(step) for step in range(32)] == [0.5 * plain(step) for step in range(32)]


@given(SCHEDULES, st.integers(1, 60), st.integers(1, 60))
def test_runs_of_any_length_agree_before_decay(config: Schedule, short: int, long: int) -> None:
    common = min(shared_steps(config, short), shared_steps(config, long))
    first, second = schedule(config, short), schedule(config, long)
    assert [first(step) for step in range(common)] == [second(step) for step in range(common)]


@pytest.mark.parametrize(
    ("budget", "rows", "expected"),
    [
        ({"tokens": 1024}, 5, (4, 32)),
        ({"tokens": 1025}, 5, (5, 40)),
        ({"epochs": 1.0}, 16, (2, 16)),
        ({"epochs": 2.5}, 10, (4, 25)),
        ({"epochs": 0.01}, 10, (1, 1)),
    ],
)
def test_a_budget_is_whole_steps_of_tokens_or_whole_rows_of_epochs(
    budget: dict[str, float], rows: int, expected: tuple[int, int]
) -> None:
    assert steps_of(Training(tokens_per_step=256, row_length=32, **budget), rows) == expected  # type: ignore[arg-type]


def test_quick_validations_are_spread_over_the_run_and_take_two_percent_of_it_at_most() -> None:
    assert sorted(spread_steps(40, 8)) == [5, 10, 15, 20, 25, 30, 35, 40]
    assert sorted(spread_steps(5, 8)) == [1, 2, 3, 4, 5] and spread_steps(40, 0) == frozenset()
    assert [quick_rows(rows, 8) for rows in (100, 1017, 3904, 10**6)] == [4, 4, 16, 64]
    for rows in (1017, 3904, 10**6):
        assert 8 * quick_rows(rows, 8) / 3 <= 0.02 * rows
