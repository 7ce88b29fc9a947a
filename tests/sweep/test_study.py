"""The trials of a sweep: what is drawn, what is kept, what is ended early, and what a kill leaves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ttrain.errors import UsageError
from ttrain.sweep.space import IntegerRange, Interval, Space, ValueList
from ttrain.sweep.study import COMPLETED, DIVERGED, FAILED, PRUNED, RUNNING, STARTUP_TRIALS, Study, Trial, upcoming

LR = "pretrain.optim.lr"
SPACE = Space({LR: Interval(1e-4, 1e-1, log=True), "kind": ValueList(("muon", "adamw"))}, {})


def study_of(path: Path | None, space: Space = SPACE, **options: Any) -> Study:
    return Study(path, space, **{"sampler": "tpe", "seed": 1, "maximize": False, **options})


def loss(trial: Trial) -> float:
    """Least at a learning rate of 0.01 with muon."""
    return 3.0 + abs(math.log10(trial.values[LR] / 1e-2)) + (trial.values["kind"] == "adamw")


def run(study: Study, count: int, measure: Callable[[Trial], float] = loss) -> None:
    for _ in range(count):
        trial = study.ask()
        study.tell(trial.number, COMPLETED, measure(trial))


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_sweep_that_is_opened_again_for_each_trial_draws_what_one_in_a_single_process_does(
    tmp_path: Path, sampler: str
) -> None:
    whole = study_of(None, sampler=sampler)
    run(whole, 9)
    for _ in range(9):
        run(study_of(tmp_path / "journal", sampler=sampler), 1)
    again = study_of(tmp_path / "journal", sampler=sampler)
    assert [trial.values for trial in again.trials()] == [trial.values for trial in whole.trials()]
    assert [trial.value for trial in again.trials()] == [trial.value for trial in whole.trials()]
    other = study_of(None, sampler=sampler, seed=2)
    run(other, 9)
    assert [trial.values for trial in other.trials()] != [trial.values for trial in whole.trials()]


def test_tpe_finds_better_values_than_chance_does() -> None:
    """Over three seeds, so that no luck of one decides."""
    means = {}
    for sampler in ("tpe", "random"):
        found = [study_of(None, sampler=sampler, seed=seed) for seed in range(3)]
        for study in found:
            run(study, 16)
        means[sampler] = sum(study.best().value for study in found) / len(found)  # type: ignore[union-attr,misc]
    assert means["tpe"] < means["random"]


def test_the_first_trials_reach_every_part_of_a_range() -> None:
    for seed in range(20):
        drawn = upcoming(SPACE, [], STARTUP_TRIALS, sampler="tpe", seed=seed, maximize=False)
        parts = sorted(int(STARTUP_TRIALS * math.log10(trial.values[LR] / 1e-4) / 3) for trial in drawn)
        assert parts == [0, 1, 2, 3]
        assert len({trial.values["kind"] for trial in drawn}) == 2


def test_a_dry_run_names_the_trials_that_come_and_no_others() -> None:
    shown = upcoming(SPACE, [], 8, sampler="tpe", seed=3, maximize=False)
    study = study_of(None, seed=3)
    run(study, 8)
    assert len(shown) == STARTUP_TRIALS
    assert [t.values for t in shown] == [t.values for t in study.trials()[:STARTUP_TRIALS]]
    later = upcoming(SPACE, study.trials()[:2], 3, sampler="random", seed=3, maximize=False)
    chance = study_of(None, seed=3, sampler="random")
    run(chance, 5)
    assert [(t.number, t.values) for t in later] == [(t.number, t.values) for t in chance.trials()[2:]]


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_no_values_are_tried_twice_until_all_were(tmp_path: Path, sampler: str) -> None:
    values = {"b": ValueList((None, "x", [2, 0.3], 1, True)), "c": ValueList((0.1, 0.2), ordered=True)}
    space = Space({"a": IntegerRange(1, 3), **values}, {})
    study = study_of(tmp_path / "journal", space, sampler=sampler)
    for number in range(30):
        study.tell(study.ask().number, COMPLETED, float(number))
    study = study_of(tmp_path / "journal", space, sampler=sampler)
    combinations = [json.dumps(space.combination(number)) for number in range(30)]
    found = [json.dumps(trial.values) for trial in study.trials()]
    assert sorted(found) == sorted(combinations), "each value with its type, through the journal: 1 is not true"
    assert sampler != "grid" or found == combinations
    narrow = study_of(None, Space({LR: Interval(1e-4, 1.001e-4)}, {}), sampler=sampler.replace("grid", "random"))
    with pytest.raises(UsageError, match=r"pretrain\.optim\.lr have no values left for trial 3; vary them more widely"):
        run(narrow, 3, lambda trial: 1.0)


def test_what_was_running_when_its_process_was_killed_is_still_to_be_done(tmp_path: Path) -> None:
    study = study_of(tmp_path / "journal")
    run(study, 2)
    trial = study.ask()
    study.note(trial.number, run="full-1")
    study.report(trial.number, {1000: 4.0, 2000: 3.5})
    again = study_of(tmp_path / "journal")
    last = again.trials()[-1]
    assert (last.number, last.values, last.outcome, last.run) == (3, trial.values, RUNNING, "full-1")
    again.report(3, {1000: 9.9, 2000: 9.9, 3000: 3.2})  # the curve from its beginning: what is known stays
    again.tell(3, COMPLETED, 3.2)
    assert again.trials()[-1].curve == {1000: 4.0, 2000: 3.5, 3000: 3.2}
    assert [trial.number for trial in again.trials()] == [1, 2, 3]


@pytest.mark.parametrize("lines", range(1, 12))
def test_a_kill_between_any_two_writes_of_a_draw_leaves_a_study_that_goes_on_alike(tmp_path: Path, lines: int) -> None:
    """Two trials are whole; the third one's draw, and that of a fourth, which Optuna draws itself, end after some lines."""
    whole = study_of(tmp_path / "whole")
    run(whole, 2)
    kept = (tmp_path / "whole").read_bytes()
    for _ in range(4):
        study_of(tmp_path / "whole").tell(study_of(tmp_path / "whole").ask().number, COMPLETED, 3.0)
    added = (tmp_path / "whole").read_bytes()[len(kept) :].split(b"\n")
    cut = tmp_path / "cut"
    cut.write_bytes(kept + b"\n".join(added[:lines]) + b"\n" + added[lines][: len(added[lines]) // 2])
    study = study_of(cut)
    while len(study.trials()) < 6:
        study.ask()
    expected = study_of(tmp_path / "whole").trials()
    assert [trial.number for trial in study.trials()] == [1, 2, 3, 4, 5, 6]
    assert [trial.values for trial in study.trials()[:4]] == [trial.values for trial in expected[:4]]


def test_a_trial_behind_the_median_of_three_is_hopeless_after_a_fifth_of_the_way() -> None:
    study = study_of(None)
    for level in (3.0, 3.1, 3.2):
        trial = study.ask()
        study.report(trial.number, {tokens: level + 1000 / tokens for tokens in range(1000, 10001, 1000)})
        assert not study.is_hopeless(trial.number)
        study.tell(trial.number, COMPLETED, level)
    bad, good = study.ask(), study.ask()
    for tokens, hopeless in ((1000, False), (2000, True), (3000, True)):
        study.report(bad.number, {tokens: 5.0})
        study.report(good.number, {tokens: 2.9 + 1000 / tokens})
        assert study.is_hopeless(bad.number) is hopeless
        assert not study.is_hopeless(good.number)


def test_where_more_is_better_the_low_ones_are_hopeless_and_the_highest_is_best() -> None:
    study = study_of(None, maximize=True)
    for level in (0.5, 0.6, 0.7):
        trial = study.ask()
        study.report(trial.number, {1000: level / 2, 2000: level})
        study.tell(trial.number, COMPLETED, level)
    low, high = study.ask(), study.ask()
    study.report(low.number, {1000: 0.1, 2000: 0.1})
    study.report(high.number, {1000: 0.4, 2000: 0.9})
    assert study.is_hopeless(low.number) and not study.is_hopeless(high.number)
    best = study.best()
    assert best is not None and best.value == 0.7


def test_outcomes_are_kept_and_only_complete_trials_can_be_best(tmp_path: Path) -> None:
    study = study_of(tmp_path / "journal")
    for outcome, value in ((PRUNED, None), (DIVERGED, None), (COMPLETED, 3.0), (COMPLETED, 2.5), (FAILED, None)):
        trial = study.ask()
        study.report(trial.number, {1000: 1.0})  # lower than all, but no trial ended so
        study.note(trial.number, error=f"{outcome} it is", seconds=1.5)
        study.tell(trial.number, outcome, value)
    found = study_of(tmp_path / "journal").trials()
    assert [trial.outcome for trial in found] == [PRUNED, DIVERGED, COMPLETED, COMPLETED, FAILED]
    assert [trial.value for trial in found] == [None, None, 3.0, 2.5, None]
    assert found[0].last == 1.0 and found[1].error == "diverged it is" and found[2].seconds == 1.5
    best = study.best()
    assert best is not None and best.number == 4


def test_a_failed_trial_that_is_tried_again_keeps_its_number_and_its_values(tmp_path: Path) -> None:
    study = study_of(tmp_path / "journal")
    first, second = study.ask(), study.ask()
    study.tell(first.number, FAILED)
    study.tell(second.number, COMPLETED, 3.0)
    again = study.retry(study.trials()[0])
    assert (again.number, again.values) == (1, first.values)
    study.tell(1, COMPLETED, 2.0)
    reopened = study_of(tmp_path / "journal")
    assert [(t.number, t.outcome, t.value) for t in reopened.trials()] == [(1, COMPLETED, 2.0), (2, COMPLETED, 3.0)]
    assert reopened.ask().number == 3


def test_who_only_looks_changes_nothing_also_in_the_middle_of_a_draw(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    assert study_of(journal, writes=False).trials() == []
    study = study_of(journal)
    run(study, 3)
    study.ask()
    torn = journal.read_bytes()[:-20]
    journal.write_bytes(torn)
    assert [trial.outcome for trial in study_of(journal, writes=False).trials()] == [COMPLETED] * 3
    assert journal.read_bytes() == torn
