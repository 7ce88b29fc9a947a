"""What values the trials of a sweep get, and what its record keeps of them."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ttrain.errors import UsageError
from ttrain.experiments import records
from ttrain.experiments.records import COMPLETED, DIVERGED, FAILED, RUNNING, Trial
from ttrain.experiments.sampler import STARTUP_TRIALS, TrialSampler
from ttrain.experiments.space import Interval, Space, ValueList

LR = "pretrain.optim.lr"
SPACE = Space({LR: Interval(1e-4, 1e-1, log=True), "kind": ValueList(("muon", "adamw"))}, {})


def sampler_of(space: Space = SPACE, kind: str = "tpe", seed: int = 1) -> TrialSampler:
    return TrialSampler(space, kind, seed, maximize=False)


def loss(trial: Trial) -> float:
    """Least at a learning rate of 0.01 with muon."""
    return 3.0 + abs(math.log10(trial.values[LR] / 1e-2)) + (trial.values["kind"] == "adamw")


def run(sampler: TrialSampler, count: int, measure: Callable[[Trial], float] = loss) -> list[Trial]:
    trials: list[Trial] = []
    for _ in range(count):
        trial = sampler.draw(trials)
        trials.append(replace(trial, outcome=COMPLETED, value=measure(trial)))
    return trials


@pytest.mark.parametrize("kind", ["tpe", "random"])
def test_the_same_seed_draws_the_same_values_also_from_a_record_that_was_read_again(kind: str, tmp_path: Path) -> None:
    sweep, expected = records.begin(tmp_path, {}), run(sampler_of(kind=kind), 9)
    for _ in range(9):
        sweep = records.find_sweep(tmp_path)
        trial = sampler_of(kind=kind).draw(sweep.trials)
        sweep.put(replace(trial, outcome=COMPLETED, value=loss(trial)))
    assert records.find_sweep(tmp_path).trials == expected
    assert [trial.values for trial in run(sampler_of(kind=kind, seed=2), 9)] != [trial.values for trial in expected]


def test_the_first_trials_reach_every_part_of_a_range() -> None:
    for seed in range(20):
        drawn = sampler_of(seed=seed).upcoming([], STARTUP_TRIALS)
        parts = sorted(int(STARTUP_TRIALS * math.log10(trial.values[LR] / 1e-4) / 3) for trial in drawn)
        assert parts == [0, 1, 2, 3]
        assert len({trial.values["kind"] for trial in drawn}) == 2


@pytest.mark.parametrize("kind", ["tpe", "random", "grid"])
def test_no_values_are_tried_twice_until_all_were(kind: str) -> None:
    values = {"b": ValueList((None, "x", [2, 0.3], 1, True)), "c": ValueList((0.1, 0.2), ordered=True)}
    space = Space({"a": ValueList(range(1, 4), ordered=True), **values}, {})
    found = [json.dumps(trial.values) for trial in run(sampler_of(space, kind), 30, lambda trial: float(trial.number))]
    combinations = [json.dumps(space.combination(number)) for number in range(30)]
    assert sorted(found) == sorted(combinations), "each value with its type: 1 is not true"
    assert kind != "grid" or found == combinations
    narrow = sampler_of(Space({LR: Interval(1e-4, 1.001e-4)}, {}), kind.replace("grid", "random"))
    with pytest.raises(UsageError, match=r"pretrain\.optim\.lr have no values left for trial 3; vary them more widely"):
        run(narrow, 3, lambda trial: 1.0)


def test_a_record_keeps_trials_by_their_numbers_and_only_complete_ones_can_be_best(tmp_path: Path) -> None:
    measure = {"metric": "m", "stage": "s"}
    sweep = records.begin(tmp_path, {"measure": measure})
    highest = records.begin(tmp_path, {"measure": {**measure, "maximize": True}})
    outcomes = ((DIVERGED, None), (COMPLETED, 3.0), (COMPLETED, 2.5), (FAILED, None), (RUNNING, None))
    for number, (outcome, value) in enumerate(outcomes, start=1):
        sweep.put(Trial(number, {LR: 0.01}, outcome, value, seconds=1.5, run=f"full-{number}", error=f"{outcome} it is"))
    sweep.put(Trial(4, {LR: 0.01}, COMPLETED, 4.0))
    found = records.find_sweep(tmp_path, sweep.name).trials
    assert [trial.number for trial in found] == [1, 2, 3, 4, 5]
    assert [trial.outcome for trial in found] == [DIVERGED, COMPLETED, COMPLETED, COMPLETED, RUNNING]
    assert (found[0].error, found[0].seconds, found[4].run) == ("diverged it is", 1.5, "full-5")
    for trial in found:
        highest.put(trial)
    assert sweep.best and highest.best and (sweep.best.number, highest.best.number) == (3, 4)
