"""What experiments decide on made-up metrics: error rates, what stops, repeated seeds."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ttrain.evaluate.noise import Noise
from ttrain.experiments.verdict import Judgement, Verdict
from ttrain.store import runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.sweeps import COMPLETED, DIVERGED, Experiment, Trial

Value = Callable[[int, int], float | None]


def play(value: Value, changes: int, **options: Any) -> tuple[Judgement, int]:
    """An experiment whose trials give `value(change, seed)`, and how many of them it took."""
    record = {
        "sweep": "sweep-1",
        "measure": {"metric": "eval/bits_per_byte", "stage": "evaluate"},
        "changes": [
            {"name": f"change {number}", "values": {"a": number}} for number in range(changes)
        ],
        "seeds": 5,
        "rounds": True,
        "noise": None,
        "looks": 0,
        "outcome": "running",
        "process": runs.this_process(),
        "trials": [],
        **options,
    }
    while True:
        judgement = Judgement(Experiment(Path(), record), ArtifactStore(Path("none")))
        assert changes > 5 or len(judgement.to_json()["settings"]) == changes, "at any moment"
        if not judgement.standing.wanted:
            return judgement, len(record["trials"])
        for change, seed in judgement.standing.wanted[:1]:
            number = value(change, seed)
            outcome = DIVERGED if number is None else COMPLETED
            record["trials"].append(vars(Trial(change, seed, outcome, value=number)))


def noisy(effects: Mapping[int, float], draw: int, spread: float = 0.03) -> Value:
    """The effect of each change, with noise of its own for each seed, and noise that all share."""

    def value(change: int, seed: int) -> float:
        common = np.random.default_rng([draw, seed]).normal(0, 0.1)
        own = np.random.default_rng([draw, seed, change]).normal(0, spread)
        return 1.6 + effects.get(change, 0.0) + float(common + own)

    return value


def verdicts(judgement: Judgement) -> list[str]:
    return [row.verdict for row in judgement.verdicts]


def test_of_one_change_without_effect_one_in_twenty_is_called_different() -> None:
    called = [verdicts(play(noisy({}, draw), 2)[0])[1] for draw in range(300)]
    assert {*called} <= {"better", "worse", "not decided"}
    assert sum(word != "not decided" for word in called) <= 0.08 * len(called)


def test_the_best_of_twelve_changes_without_effect_is_rarely_called_better() -> None:
    played = [play(noisy({}, draw), 13) for draw in range(40)]
    better = sum("better" in verdicts(judgement) for judgement, _ in played)
    assert better <= 2
    assert sum(judgement.standing.winner is not None for judgement, _ in played) > 30


def test_verdicts_that_are_looked_at_again_need_more() -> None:
    looked = [
        play(noisy({1: -0.1}, 12), 2, looks=looks)[0].verdicts[1].verdict for looks in (0, 12)
    ]
    assert looked == ["better", "not decided"]


def test_large_effects_are_decided_and_what_is_worse_stops_early() -> None:
    effects = {1: 0.33, 2: 0.08, 3: -0.15}
    worse = 0
    for draw in range(20):
        judgement, trials = play(noisy(effects, draw), 5)
        words = verdicts(judgement)
        worse += words[1] == "worse"
        assert words[0] == "baseline" and words[1] in ("worse", "stopped") and words[3] == "better"
        assert judgement.best is judgement.verdicts[3] and judgement.best.seeds[0] == 5001
        assert len(judgement.verdicts[1].seeds) < 5 and trials < 5 * 5 + 10
    assert worse >= 16, "of the rest it is known only that they are behind the best"


def test_fresh_seeds_alone_decide_the_winner() -> None:
    def lucky(change: int, seed: int) -> float:
        effect = -0.2 if change == 2 and seed < 100 else 0.0
        return noisy({2: effect}, 7)(change, seed)

    judgement, _ = play(lucky, 4)
    assert verdicts(judgement)[2] == "equal"
    assert judgement.best is None and "fresh seeds" in judgement.sentence


def test_without_rounds_all_seeds_run_and_every_change_is_judged() -> None:
    judgement, trials = play(noisy({1: -0.2, 2: 0.2}, 3), 4, rounds=False)
    assert trials == 20
    assert verdicts(judgement) == ["baseline", "better", "worse", "not decided"]
    assert "takes" in judgement.verdicts[3].why


def test_twelve_changes_without_effect_are_rarely_called_worse() -> None:
    played = [play(noisy({}, draw), 13)[0] for draw in range(30)]
    assert sum("worse" in verdicts(judgement) for judgement in played) <= 3


def test_the_second_of_two_good_changes_is_to_be_compared_alone() -> None:
    judgement, _ = play(noisy({1: -0.30, 2: -0.31}, 3), 3)
    assert sorted(verdicts(judgement)) == ["baseline", "better", "not decided"]
    [row] = [row for row in judgement.verdicts if row.verdict == "not decided"]
    assert "alone" in row.why


def test_more_is_better_where_the_metric_says_so() -> None:
    measure = {"metric": "eval/accuracy", "stage": "evaluate", "maximize": True}
    judgement, _ = play(noisy({1: 0.2, 2: -0.2}, 3), 3, measure=measure, rounds=False)
    assert verdicts(judgement) == ["baseline", "better", "worse"]


def test_one_seed_decides_nothing_and_one_that_changes_nothing_is_no_replicate() -> None:
    judgement, trials = play(noisy({1: -0.5}, 1), 2, seeds=1)
    assert trials == 2 and verdicts(judgement)[1] == "not decided"
    judgement, _ = play(lambda change, seed: 1.6 - 0.1 * change, 2)
    row = judgement.verdicts[1]
    assert row.repeats and row.verdict == "not decided" and "no replicates" in row.why


def test_a_change_that_diverges_is_lost_and_without_a_baseline_nothing_is_compared() -> None:
    judgement, _ = play(
        lambda change, seed: None if change == 1 else noisy({2: -0.3}, 1)(change, seed), 3
    )
    assert verdicts(judgement) == ["baseline", "diverged", "better"]
    judgement, trials = play(lambda change, seed: None if change == 0 else 1.0, 3)
    assert trials == 1 and verdicts(judgement)[0] == "diverged"


def test_the_noise_of_the_home_stops_what_is_far_behind_after_one_seed() -> None:
    judgement, _ = play(noisy({1: 0.5}, 1), 3, noise={"spread": 0.03, "freedom": 4})
    assert len(judgement.verdicts[1].seeds) == 1 and verdicts(judgement)[1] == "worse"


def test_intervals_over_seeds_are_those_of_paired_differences() -> None:
    row = Verdict("a", [1, 2, 3], [1.0, 1.2, 1.1], [1.1, 1.3, 1.3])
    assert row.difference == pytest.approx(-0.1333, abs=1e-4)
    assert row.over_seeds == pytest.approx(
        (-0.2768, 0.0101), abs=1e-4
    )  # 0.1333 -+ 4.303 * 0.0577 / sqrt(3)
    assert Noise(0.03, 5).seeds_for(0.1) == 4
    assert Noise(0.03, 5).seeds_for(0.03) == 18
    assert Noise(0.03, 5).seeds_for(1e-6) is None
